"""The texts that a JSON schema allows, as terminals of a grammar, for values that are not JSON. Pure."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

from tidemill.cluster.edge.chat.output.tool_call_parser import choices_of, resolved

ANY_TEXT = "/(?s:.*)/"
"""The definition of the terminal TEXT, to which others refer."""

DEPTH_MAX = 8
"""The most objects, lists and alternatives one in another whose schemas are followed."""

_DATE = "[0-9]{4}-((0[1-9]|1[0-2])-(0[1-9]|[12][0-9])|(0[13-9]|1[0-2])-30|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]+W|([0-9]+D)?T[0-9]+[HMS]|[0-9]+[YMD])",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|({_GROUP}(:{_GROUP}){{0,3}})?::({_GROUP}(:{_GROUP}){{0,2}})?",
    "uuid": "[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": "[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~/?#@!$&'()*+,;=:%-]+",
}
"""The usual texts of each format, and no other ones."""


def terminal_of(wanted: Mapping[str, Any], depth: int = 0) -> str:
    """Return the terminal, in Lark's syntax, of the texts that a schema allows; empty if it allows any."""
    wanted = resolved(wanted)
    low, high = count_of(wanted, "minLength"), count_of(wanted, "maxLength")
    choices, pattern, named = choices_of(wanted), wanted.get("pattern"), wanted.get("format")
    found = [] if choices is None else [one_of(map(quoted, choices))]
    if low or high is not None:
        found.append(f"/(?s:.{{{low or 0},{'' if high is None else high}}})/")
    if isinstance(pattern, str):
        found.append(_found(pattern))
    if isinstance(named, str) and named in FORMATS:
        found.append(_regex(FORMATS[named]))
    for keyword in ("allOf", "anyOf", "oneOf") if depth < DEPTH_MAX else ():
        terminals = [terminal_of(part, depth + 1) for part in parts_of(wanted, keyword)]
        if keyword == "allOf":
            found += filter(None, terminals)
        elif terminals and all(terminals):
            found.append(one_of(terminals))
    return f"({' & '.join(f'({terminal})' for terminal in found)})" if found else ""


def _found(pattern: str) -> str:
    """Return the terminal of the texts in which a pattern is found. An anchor at its start or end counts for
    all of its alternatives."""
    begins = pattern.startswith("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$\Z", pattern) is not None
    body = _regex(f"(?:{pattern[begins : len(pattern) - ends]})")
    return " ".join(["TEXT"] * (not begins) + [body] + ["TEXT"] * (not ends))


def _regex(pattern: str) -> str:
    slashed = re.sub(r"(\\[^/])|\\?/", lambda found: found[1] or r"\/", pattern)
    return f"/{slashed}/".replace("\n", "\\n")


def parts_of(wanted: Mapping[str, Any], keyword: str) -> list[dict[str, Any]]:
    """Return the schemas in the list of a keyword, with the definitions."""
    parts: object = wanted.get(keyword)
    found = cast("list[object]", parts) if isinstance(parts, list) else []
    return [
        {**cast("dict[str, Any]", part), **definitions_of(wanted)} for part in found if isinstance(part, dict)
    ]


def count_of(wanted: Mapping[str, Any], keyword: str) -> int | None:
    """Return the number of a keyword."""
    value: object = wanted.get(keyword)
    return int(value) if isinstance(value, int | float) else None


def definitions_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that references lead to."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def one_of(alternatives: Iterable[str]) -> str:
    return " | ".join(alternatives)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
