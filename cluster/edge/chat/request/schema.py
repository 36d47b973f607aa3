"""The part of a JSON schema that a grammar can enforce. Pure.

An `oneOf` is read as `anyOf`: it is named where a value may fit two alternatives (request/alternatives.py).

Libraries write keywords that no grammar follows: they are left out and named, or refused where the client
asks for all of its schema by `strict`.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from tidemill.cluster.edge.chat.request.alternatives import may_overlap
from tidemill.workers.messages import RequestError

UNENFORCED = frozenset(
    [
        *("not", "if", "then", "else", "propertyNames", "uniqueItems", "contains"),
        *("minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"),
    ]
)
FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
LOOKS_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9]")

NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
SINGLE = ("items", "additionalProperties", "additionalItems")
"""The keywords whose values hold schemas: by name, in a list, or one."""

OPEN = frozenset(["additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"])
"""An object without these has no other members than its `properties`, as in vLLM: a model could write on."""


class Enforced(NamedTuple):
    """A schema, and the paths of the keywords that were left out."""

    schema: dict[str, Any]
    left_out: tuple[str, ...]


def enforced(schema: Mapping[str, Any], param: str, *, strict: bool = False) -> Enforced:
    """Return the part of a schema that can be enforced. Raises RequestError for others in a `strict` one."""
    left_out: list[str] = []
    kept = _kept(schema, param, _Seen(schema, left_out), closes="allOf" not in _keywords(schema))
    if strict and left_out:
        raise RequestError(
            f"{left_out[0]} cannot be enforced: leave it out, or set strict to false", param=left_out[0]
        )
    return Enforced(kept, tuple(left_out))


class _Seen(NamedTuple):
    root: Mapping[str, Any]
    left_out: list[str]


def _kept(schema: Mapping[str, Any], path: str, seen: _Seen, *, closes: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    inner_closes = closes and "properties" not in schema
    for keyword, value in schema.items():
        at = f"{path}.{keyword}"
        if _is_lost(keyword, value, schema):
            if value is not False:
                seen.left_out.append(at)
        elif keyword in NAMED and isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            kept[keyword] = {
                name: _part(part, f"{at}.{name}", seen, closes=closes) for name, part in named.items()
            }
        elif keyword in LISTS and isinstance(value, list):
            if keyword == "oneOf" and may_overlap(cast("list[object]", value), seen.root):
                seen.left_out.append(at)
            parts = enumerate(cast("list[Any]", value))
            kept[keyword] = [
                _part(part, f"{at}[{index}]", seen, closes=inner_closes) for index, part in parts
            ]
        else:
            kept[keyword] = _part(value, at, seen, closes=closes) if keyword in SINGLE else value
    if closes and isinstance(schema.get("properties"), dict) and not OPEN & schema.keys():
        kept["additionalProperties"] = False
    return kept


def _part(value: object, path: str, seen: _Seen, *, closes: bool) -> object:
    if not isinstance(value, dict):
        return value
    return _kept(cast("dict[str, Any]", value), path, seen, closes=closes)


def _is_lost(keyword: str, value: object, schema: Mapping[str, Any]) -> bool:
    match keyword:
        case "format":
            is_text = "type" not in schema or "string" in (schema["type"] or ())
            return is_text and value not in FORMATS
        case "pattern":
            return isinstance(value, str) and LOOKS_AROUND.search(value) is not None
        case _:
            return keyword in UNENFORCED


def _keywords(value: object) -> Iterator[str]:
    """Yield all names of members, in any depth."""
    if isinstance(value, dict):
        for name, member in cast("dict[str, object]", value).items():
            yield name
            yield from _keywords(member)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            yield from _keywords(item)
