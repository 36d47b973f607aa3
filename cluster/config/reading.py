"""A configuration from a file and from flags, which have the last word."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import yaml
from pydantic import ValidationError

from tidemill.cluster.config.overrides import Given, overridden
from tidemill.cluster.config.problems import ConfigError, Place, problems_of
from tidemill.cluster.config.tree import RootConfig


def read_config(path: Path) -> RootConfig:
    """Raises ConfigError."""
    return parse_config(_text_of(path), str(path))


def parse_config(text: str, source: str) -> RootConfig:
    """`source` is named in errors. Raises ConfigError."""
    return _validated(_tree(text, source), {}, source)


def config_of(path: Path | None, model: str | None, given: Sequence[Given]) -> RootConfig:
    """What a file, if there is one, and a command line say together. Raises ConfigError."""
    source = "" if path is None else str(path)
    tree: object = {} if path is None else _tree(_text_of(path), source)
    if not isinstance(tree, dict):
        return _validated(tree, {}, source)  # which says why not
    tree, flags = overridden(cast("Mapping[str, object]", tree), model, given)
    if not tree.get("models"):
        raise ConfigError(["name a model: a Hugging Face folder, or one of `tidemill models`"], source)
    return _validated(tree, flags, source)


def dumped(config: RootConfig) -> str:
    """The whole tree with its defaults, as a file."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _validated(tree: object, flags: Mapping[Place, str], source: str) -> RootConfig:
    try:
        return RootConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems_of(error, flags), source) from None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"cannot be read: {error.strerror}"], str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"is no text in UTF-8 ({error.reason} at byte {error.start})"], str(path)
        ) from error


def _tree(text: str, source: str) -> object:
    """An empty file is an empty mapping."""
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        _check_keys(root)
        return cast("object", loader.construct_document(root))  # pyright: ignore[reportUnknownMemberType] - PyYAML's stubs leave it open
    except RecursionError:
        raise ConfigError(["is nested too deep for a configuration"], source) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"is no YAML: {' '.join(str(error).split())}"], source) from error


def _check_keys(root: yaml.Node) -> None:
    """Of two keys that are called the same, YAML would take the last without a word."""
    nodes, seen = [root], {id(root)}
    while nodes:
        node = nodes.pop()
        below: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            pairs = cast("list[tuple[yaml.Node, yaml.Node]]", node.value)
            names = [key.value for key, _ in pairs if isinstance(key, yaml.ScalarNode)]
            if twice := [name for name in names if names.count(name) > 1]:
                raise yaml.MarkedYAMLError(
                    problem=f"{twice[0]} stands twice: leave one", problem_mark=node.start_mark
                )
            below = [value for _, value in pairs]
        elif isinstance(node, yaml.SequenceNode):
            below = cast("list[yaml.Node]", node.value)
        nodes += [one for one in below if id(one) not in seen]
        seen |= {id(one) for one in below}
