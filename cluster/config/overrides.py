"""Flags over a file: the tree with what a command line says. Pure.

Nothing is validated here. Where the file has something else than a mapping or a list, it stays as it is, for
validation to say so.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from tidemill.cluster.config.flags import ROLES, Flag
from tidemill.cluster.config.problems import ConfigError, Place
from tidemill.workers.messages import Role

Tree = dict[str, Any]
Found = tuple[Place, Tree]
"""A mapping of the tree, and its place."""


@dataclass(frozen=True, slots=True)
class Given:
    """A flag on a command line, with its value."""

    flag: Flag
    value: object


def overridden(
    tree: Mapping[str, Any], model: str | None, given: Sequence[Given]
) -> tuple[Tree, dict[Place, str]]:
    """The tree, and which flag has set what. `model` is MODEL. Raises ConfigError."""
    tree = deepcopy(dict(tree))
    flags: dict[Place, str] = {}
    if model is not None:
        _name(tree, model)
    models = list(_entries(tree, (), "models"))
    if len(models) > 1 and any(one.flag.key == "served_model_name" for one in given):
        raise ConfigError(
            ["--served-model-name names one model, and there are several: name them in the file"]
        )
    if any(one.flag.scope in {"group", *ROLES} for one in given):
        _give_groups(models, given, flags)
    for one in sorted(given, key=lambda one: one.flag.scope in ROLES):  # the narrower ones have the last word
        nodes = list(_nodes(tree, models, one.flag))
        if not nodes and one.flag.scope in ROLES and any(_groups(*model) for model in models):
            raise ConfigError(
                [f"{one.flag.option} is of {one.flag.scope} workers, and there are none: leave it out"]
            )
        for place, node in nodes:
            node[one.flag.key] = one.value
            flags[(*place, one.flag.key)] = one.flag.option
    return tree, flags


def _name(tree: Tree, model: str) -> None:
    models = cast("object", tree.get("models") or [{}])
    tree["models"] = models
    if not isinstance(models, list):
        return
    first, *others = cast("list[Any]", models)
    if others:
        raise ConfigError([f"MODEL names one model, and the file has {len(others) + 1}: leave it out"])
    if isinstance(first, dict):
        first["model"] = model


def _give_groups(models: Sequence[Found], given: Sequence[Given], flags: dict[Place, str]) -> None:
    """A flag that says how many adds a group of its role, where no model has one. Mixed workers do the work
    of the others, so their group takes the place of these."""
    asked = {one.flag.scope: one.flag.option for one in given if one.flag.key == "replicas"}
    for place, model in models:
        if "groups" not in model:
            model["groups"] = [{"role": role} for role in (("mixed",) if "mixed" in asked else ROLES[:2])]
        elif asked.keys() == {"mixed"} and not _groups(place, model, "mixed"):
            _mix(place, model)
    for role in ROLES:
        if role not in asked or any(_groups(*model, role) for model in models):
            continue
        for place, model in models:
            if isinstance(model["groups"], list):
                cast("list[Tree]", model["groups"]).append({"role": role})
                flags[(*place, "groups")] = asked[role]


def _mix(place: Place, model: Tree) -> None:
    """One group that is like the first decode group, which keeps its streams and most of the memory; an empty
    list or something else stays."""
    groups = _groups(place, model, "decode") or _groups(place, model)
    if groups:
        _, first = groups[0]
        kept = {key: value for key, value in first.items() if key not in {"replicas", "replicas_max"}}
        model["groups"] = [{**kept, "role": "mixed"}]


def _nodes(tree: Tree, models: Sequence[Found], flag: Flag) -> Iterator[Found]:
    """The mappings that have the flag's key."""
    match flag.scope:
        case "model":
            yield from models
        case "engine":
            for place, model in models:
                yield from _below(model, place, "engine")
        case "group":
            for place, model in models:
                yield from _groups(place, model)
        case "prefill" | "decode" | "mixed":
            for place, model in models:
                yield from _of_role(_groups(place, model, flag.scope), flag)
        case section:
            yield from _below(tree, (), section)


def _of_role(groups: Sequence[Found], flag: Flag) -> Sequence[Found]:
    """Those of one model."""
    if flag.key == "replicas" and len(groups) > 1:
        places = ", ".join(f"groups[{place[-1]}]" for place, _ in groups)
        raise ConfigError(
            [f"{flag.option} is of one group, and there are {places}: say `replicas` in the file"]
        )
    return groups[:1] if flag.key == "replicas_max" else groups


def _groups(place: Place, model: Tree, role: Role | None = None) -> list[Found]:
    groups = _entries(model, place, "groups")
    return [(at, group) for at, group in groups if role is None or group.get("role") == role]


def _entries(node: Tree, place: Place, key: str) -> Iterator[Found]:
    """The mappings in a list."""
    entries = node.get(key)
    for index, entry in enumerate(cast("list[Any]", entries) if isinstance(entries, list) else []):
        if isinstance(entry, dict):
            yield (*place, key, index), cast("Tree", entry)


def _below(node: Tree, place: Place, key: str) -> Iterator[Found]:
    below = node.setdefault(key, {})
    if isinstance(below, dict):
        yield (*place, key), cast("Tree", below)
