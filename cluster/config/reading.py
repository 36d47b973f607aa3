"""Read a configuration from a file and from flags, which override the file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml
from pydantic import ValidationError

from tidemill.cluster.config.overrides import GivenFlag, apply_flags
from tidemill.cluster.config.problems import ConfigError, Location, problems_of
from tidemill.cluster.config.tree import RootConfig


def read_config(path: Path) -> RootConfig:
    """Read a file. Raises ConfigError."""
    return parse_config(_read(path), str(path))


def parse_config(text: str, source: str) -> RootConfig:
    """Parse the text of a file; errors name `source`. Raises ConfigError."""
    return _validate(_parse(text, source), {}, source)


def load_config(path: Path | None, model: str | None, given: Sequence[GivenFlag]) -> RootConfig:
    """Return the configuration of a file, if there is one, and a command line. Raises ConfigError."""
    source = "" if path is None else str(path)
    tree: object = {} if path is None else _parse(_read(path), source)
    if not isinstance(tree, dict):
        return _validate(tree, {}, source)  # raises
    tree, options = apply_flags(cast("Mapping[str, object]", tree), model, given)
    if not tree.get("models"):
        raise ConfigError(["name a model: a Hugging Face folder, or one of `tidemill models`"], source)
    return _validate(tree, options, source)


def dump(config: RootConfig) -> str:
    """Return the text of a file with all keys, including defaults."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validate(tree: object, options: Mapping[Location, str], source: str) -> RootConfig:
    try:
        return RootConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error, options), source) from None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"is not UTF-8 text ({error.reason} at byte {error.start})"], str(path)) from error


def _parse(text: str, source: str) -> object:
    """Return the tree of a YAML text; that of an empty text is an empty mapping."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        _check_keys(root)
        return cast("object", loader.construct_document(root))
    except RecursionError:
        raise ConfigError(["is nested too deep for a configuration"], source) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"is not YAML: {' '.join(str(error).split())}"], source) from error


def _check_keys(root: yaml.Node) -> None:
    """Raise MarkedYAMLError for a duplicate key, of which the YAML parser would silently take the last."""
    nodes, seen = [root], {id(root)}
    while nodes:
        node = nodes.pop()
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
            names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
            if duplicates := [name for name in names if names.count(name) > 1]:
                raise yaml.MarkedYAMLError(
                    problem=f"{duplicates[0]} is given twice: leave one", problem_mark=node.start_mark
                )
            children = [value for _, value in pairs]
        elif isinstance(node, yaml.SequenceNode):
            children = cast("list[yaml.Node]", node.value)
        nodes += [child for child in children if id(child) not in seen]
        seen |= {id(child) for child in children}
