"""Apply the flags of a command line to the tree of a configuration file. Pure.

Nothing is validated here. A value that is not the expected mapping or list stays, so that
validation reports it.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from tidemill.cluster.config.flags import ROLES, KeyFlag
from tidemill.cluster.config.problems import ConfigError, Location
from tidemill.workers.messages import Role

Tree = dict[str, Any]
Node = tuple[Location, Tree]
"""A mapping of the tree with its location."""


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag on a command line, with its value."""

    flag: KeyFlag
    value: object


def apply_flags(
    tree: Mapping[str, Any], model: str | None, given: Sequence[GivenFlag]
) -> tuple[Tree, dict[Location, str]]:
    """Return the tree with the flags applied, and the option that set the value at each location. `model` is
    the argument MODEL. Raises ConfigError."""
    tree = deepcopy(dict(tree))
    options: dict[Location, str] = {}
    if model is not None:
        _set_model(tree, model)
    models = list(_entries(tree, (), "models"))
    if len(models) > 1 and any(entry.flag.key == "served_model_name" for entry in given):
        raise ConfigError(
            ["--served-model-name names one model, and there are several: name them in the file"]
        )
    if any(entry.flag.scope in {"group", *ROLES} for entry in given):
        _add_groups(models, given, options)
    for entry in sorted(given, key=lambda entry: entry.flag.scope in ROLES):  # those of a role come last
        flag = entry.flag
        nodes = list(_nodes(tree, models, flag))
        if not nodes and flag.scope in ROLES and any(_groups(*model) for model in models):
            raise ConfigError([f"{flag.option} sets {flag.scope} workers, and there are none: leave it out"])
        for location, node in nodes:
            node[flag.key] = entry.value
            options[(*location, flag.key)] = flag.option
    return tree, options


def _set_model(tree: Tree, model: str) -> None:
    models = cast("object", tree.get("models") or [{}])
    tree["models"] = models
    if not isinstance(models, list):
        return
    first, *others = cast("list[Any]", models)
    if others:
        raise ConfigError([f"MODEL names one model, and the file has {len(others) + 1}: leave it out"])
    if isinstance(first, dict):
        first["model"] = model


def _add_groups(models: Sequence[Node], given: Sequence[GivenFlag], options: dict[Location, str]) -> None:
    """Add a group for each flag with a number of workers, if no model has a group of that role. A group of
    mixed workers replaces all others, because they do the work of both roles."""
    counted = {entry.flag.scope: entry.flag.option for entry in given if entry.flag.key == "replicas"}
    for location, model in models:
        if "groups" not in model:
            is_split = "mixed" not in counted and any(entry.flag.scope in ROLES[:2] for entry in given)
            model["groups"] = [{"role": role} for role in (ROLES[:2] if is_split else ("mixed",))]
        elif counted.keys() == {"mixed"} and not _groups(location, model, "mixed"):
            _replace_with_mixed(location, model)
    for role in ROLES:
        if role not in counted or any(_groups(*model, role) for model in models):
            continue
        for location, model in models:
            if isinstance(model["groups"], list):
                cast("list[Tree]", model["groups"]).append({"role": role})
                options[(*location, "groups")] = counted[role]


def _replace_with_mixed(location: Location, model: Tree) -> None:
    """Replace the groups by a mixed one with the settings of the first decode group. Decode workers have the
    streams and most of the memory. An empty list or another value stays."""
    groups = _groups(location, model, "decode") or _groups(location, model)
    if groups:
        _, first = groups[0]
        kept = {key: value for key, value in first.items() if key not in {"replicas", "replicas_max"}}
        model["groups"] = [{**kept, "role": "mixed"}]


def _nodes(tree: Tree, models: Sequence[Node], flag: KeyFlag) -> Iterator[Node]:
    """Yield the mappings that have the flag's key."""
    match flag.scope:
        case "model":
            yield from models
        case "adapter" | "autoscaling" | "engine":
            for location, model in models:
                yield from _child(model, location, flag.scope)
        case "group":
            for location, model in models:
                yield from _groups(location, model)
        case "prefill" | "decode" | "mixed":
            for location, model in models:
                yield from _role_groups(_groups(location, model, flag.scope), flag)
        case section:
            yield from _child(tree, (), section)


def _role_groups(groups: Sequence[Node], flag: KeyFlag) -> Sequence[Node]:
    """Return the groups of a model and a role that the flag sets. Raises ConfigError."""
    if flag.key == "replicas" and len(groups) > 1:
        names = ", ".join(f"groups[{location[-1]}]" for location, _ in groups)
        raise ConfigError(
            [f"{flag.option} sets one group, and there are {names}: set `replicas` in the file"]
        )
    return groups[:1] if flag.key == "replicas_max" else groups


def _groups(location: Location, model: Tree, role: Role | None = None) -> list[Node]:
    groups = _entries(model, location, "groups")
    return [(at, group) for at, group in groups if role is None or group.get("role") == role]


def _entries(node: Tree, location: Location, key: str) -> Iterator[Node]:
    """Yield the mappings in the list at `key`."""
    entries = node.get(key)
    for index, entry in enumerate(cast("list[Any]", entries) if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            yield (*location, key, index), cast("Tree", entry)


def _child(node: Tree, location: Location, key: str) -> Iterator[Node]:
    """Yield the mapping at `key`, which is made if it is missing."""
    child = node.setdefault(key, {})
    if isinstance(child, dict):
        yield (*location, key), cast("Tree", child)
