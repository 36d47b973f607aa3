"""Find out whether a value may fit several alternatives of an `oneOf`. Pure.

Alternatives exclude each other by their types, by their values (`const`, `enum`), or by a member that one of
them requires: its types or values differ, or the other one has no such member.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, cast

ALTERNATIVES_MAX = 64
"""The most alternatives that are compared in pairs, unless all of them are values."""

REFERENCES_MAX = 16
"""The most references that lead to a schema one after the other."""

TYPES = frozenset(["null", "boolean", "integer", "number", "string", "array", "object"])
OF_PYTHON: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}

Schema = Mapping[str, Any]


class _Plain(NamedTuple):
    """The types of a schema's values, and the values in JSON if it lists them."""

    types: frozenset[str]
    values: frozenset[str] | None

    def excludes(self, other: "_Plain") -> bool:
        listed = self.values is not None and other.values is not None
        shared = self.values & other.values if self.values and other.values else None
        return self.types.isdisjoint(other.types) or (listed and not shared)


class _Alternative(NamedTuple):
    plain: _Plain
    members: Mapping[str, _Plain]
    required: frozenset[str]
    is_closed: bool  # it has no other members

    def excludes(self, other: "_Alternative") -> bool:
        return self.plain.excludes(other.plain) or (
            self.plain.types & other.plain.types == frozenset(["object"])
            and any(self._differs(name, other) for name in self.required | other.required)
        )

    def _differs(self, name: str, other: "_Alternative") -> bool:
        own, others = self.members.get(name), other.members.get(name)
        if own is not None and others is not None:
            return own.excludes(others)
        return (own is None and self.is_closed) or (others is None and other.is_closed)


def may_overlap(alternatives: Sequence[object], root: Schema) -> bool:
    """Return whether a value may fit two alternatives, whose references are names within `root`."""
    known = [_alternative(schema, root) for schema in alternatives]
    listed = [sorted(part.plain.values) for part in known if part.plain.values is not None]
    if len(listed) == len(known):
        values = [value for values in listed for value in values]
        return len({*values}) < len(values)
    pairs = combinations(known, 2)
    return len(known) > ALTERNATIVES_MAX or not all(first.excludes(second) for first, second in pairs)


def _alternative(schema: object, root: Schema) -> _Alternative:
    given = _followed(schema, root)
    found, named = given.get("properties"), given.get("required")
    members = cast("dict[str, object]", found) if isinstance(found, dict) else {}
    return _Alternative(
        plain=_plain(given, root),
        members={name: _plain(part, root) for name, part in members.items()},
        required=_names(named),
        is_closed=given.get("additionalProperties") is False and "patternProperties" not in given,
    )


def _plain(schema: object, root: Schema) -> _Plain:
    given = _followed(schema, root)
    listed = [given["const"]] if "const" in given else given.get("enum")
    if isinstance(listed, list):
        values = cast("list[object]", listed)
        types = frozenset(OF_PYTHON.get(type(value), "object") for value in values)
        return _Plain(types, frozenset(json.dumps(value, sort_keys=True) for value in values))
    types = _names(given["type"]) if "type" in given else TYPES
    return _Plain(types | {"integer"} if "number" in types else types, None)


def _names(value: object) -> frozenset[str]:
    """Return the texts in a list, or a text alone."""
    listed = cast("list[object]", value) if isinstance(value, list) else [value]
    return frozenset(name for name in listed if isinstance(name, str))


def _followed(schema: object, root: Schema) -> Schema:
    """Return what a reference leads to; one without a schema is one that anything fits."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, dict):
            return {"type": []} if schema is False else {}
        given = cast("Schema", schema)
        reference = given.get("$ref")
        if not isinstance(reference, str):
            return given
        schema = root if reference.startswith("#") else None
        for name in reference.split("/")[1:]:
            schema = cast("Schema", schema).get(name) if isinstance(schema, dict) else None
    return {}
