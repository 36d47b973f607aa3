"""Options from YAML files: `--config` has those of the command line, `--model-config` those of each model."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml

from tidemill.kvstore.errors import TidemillError

MODELS_MAX = 64


class UsageError(TidemillError):
    """Options that do not go together."""


class _Parser(argparse.ArgumentParser):
    """Of the options in a file: what is wrong there is said of the file."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}")


def with_config(
    arguments: Sequence[str], options: argparse.Namespace, command: argparse.ArgumentParser
) -> list[str]:
    """The arguments of a command with those of its --config file before them, which so come second.

    The file is a mapping of option names without dashes to values, as vLLM has it: true for a flag, a list
    for several values. Raises UsageError.
    """
    path: Path = options.config
    given = _mapping(path, _read(path))
    if options.model is not None:
        given.pop("model", None)
    name, *rest = arguments
    return [name, *_arguments(command, given, str(path)), *rest]


def models_of(
    options: argparse.Namespace, add_options: Callable[[argparse.ArgumentParser], None]
) -> list[argparse.Namespace]:
    """The options of each model that is served: what the file of --model-config has for it, and for the rest
    what the command line says for all. Without the file there is one model. `add_options` adds the options
    that each model may have of its own. Raises UsageError."""
    path: Path | None = options.model_config
    if path is None:
        if options.model is None:
            raise UsageError("name a model: a Hugging Face folder, or one of `tidemill models`")
        return [options]
    if options.model is not None or options.served_model_name:
        raise UsageError("--model-config names all models: leave MODEL and --served-model-name out")
    entries = _mapping(path, _read(path)).get("models")
    if not isinstance(entries, list) or not 1 <= len(cast("list[object]", entries)) <= MODELS_MAX:
        raise UsageError(f"{path}: it has a list of 1 to {MODELS_MAX} entries under `models:`")
    models: list[argparse.Namespace] = []
    for index, entry in enumerate(cast("list[object]", entries), start=1):
        where = f"{path}, model {index}"
        given = _mapping(where, entry)
        if "model" not in given:
            raise UsageError(f"{where}: `model:` is missing: a Hugging Face folder, or a bundled model")
        parser = _Parser(prog=where, add_help=False, allow_abbrev=False)
        parser.add_argument("model", nargs="?")
        add_options(parser)
        # argparse sets no default where there is a value
        models.append(parser.parse_args(_arguments(parser, given, where), copy(options)))
    return models


def _arguments(parser: argparse.ArgumentParser, given: Mapping[str, object], where: str) -> list[str]:
    """As they would be written on a command line."""
    actions = cast("Mapping[str, argparse.Action]", parser._option_string_actions)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - argparse tells its options in no other way
    arguments: list[str] = []
    for name, value in given.items():
        option = f"--{name}"
        if name == "model":
            arguments.insert(0, _text(value, f"{where}: model"))
        elif option not in actions or name in ("config", "help"):
            near = get_close_matches(option, actions, n=1)
            advice = f": did you mean {near[0].lstrip('-')}?" if near else ""
            raise UsageError(f"{where}: there is no option {name!r} here{advice}")
        else:
            arguments += _written(actions[option], option, value, where)
    return arguments


def _written(action: argparse.Action, option: str, value: object, where: str) -> list[str]:
    match value:
        case bool() if action.nargs == 0:
            negative = f"--no-{option.removeprefix('--')}"
            if value:
                return [option]
            return [negative] if negative in action.option_strings else []
        case list():
            texts = [_text(one, f"{where}: {option}") for one in cast("list[object]", value)]
            if action.nargs == "+":
                return [option, *texts]
            return [part for text in texts for part in (f"{option}={text}",)]
        case _:
            return [f"{option}={_text(value, f'{where}: {option}')}"]


def _text(value: object, where: str) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UsageError(f"{where}: {value!r} is no value of this option")


def _mapping(where: object, found: object) -> dict[str, Any]:
    if not isinstance(found, dict) or not all(
        isinstance(name, str) for name in cast("dict[Any, Any]", found)
    ):
        raise UsageError(f"{where}: write options as `name: value`, without dashes before the name")
    return dict(cast("dict[str, Any]", found))


def _read(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
