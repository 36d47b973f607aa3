"""Calls of tools as models write them between <tool_call> and </tool_call>, in one of two forms.

    json    {"name": "look", "arguments": {"at": "the harbor"}}                                 Hermes, Qwen3
    xml     <function=look> <parameter=at> the harbor </parameter> </function>                  Qwen3-Coder

XML says nothing about types: what a parameter is comes from the schema of its function.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

FUNCTION = "<function="
"""What a chat template has that asks for XML."""

WITHOUT_PARAMETERS = re.compile(r"\s*<function=([^>\s]+)>\s*(?:</function>\s*)?")
CONSTANTS = {"True": True, "False": False, "None": None}
"""As models write them that think of Python."""

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, or a piece of one: the first piece has the name, and the arguments of all of them add up to the
    text of a JSON object."""

    index: int
    name: str | None
    arguments: str


def joined(pieces: Iterable[Call]) -> list[Call]:
    """The same with what there is of each call in one piece."""
    whole: dict[int, Call] = {}
    for piece in pieces:
        before = whole.get(piece.index)
        whole[piece.index] = (
            piece if before is None else Call(piece.index, before.name, before.arguments + piece.arguments)
        )
    return list(whole.values())


def call_of(body: str, index: int, schemas: Schemas | None) -> Call | None:
    """The call that stands between the tags, of those that cannot be told while they come; None if it is
    none. `schemas` are those of a model that writes XML."""
    if schemas is not None:
        bare = WITHOUT_PARAMETERS.fullmatch(body)
        return None if bare is None else Call(index, bare[1], "{}")
    found = _json(body)
    if found is None:
        return None
    name, arguments = found
    return Call(index, name, json.dumps(arguments, ensure_ascii=False))


def _json(body: str) -> tuple[str, dict[str, object]] | None:
    try:
        called: object = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(called, dict):
        return None
    fields = cast("dict[str, object]", called)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, cast("dict[str, object]", arguments)


def value_of(text: str, wanted: Mapping[str, Any]) -> object:
    """What stands in a parameter, if that can be what its schema says; else its text."""
    if is_text(wanted):
        return text
    bare = text.strip()
    if bare in CONSTANTS:
        return CONSTANTS[bare]
    try:
        value: object = json.loads(bare)
    except (ValueError, RecursionError):
        return text
    return value


def parameters_of(schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The schema of each parameter, of what a client takes for a schema; empty where it says nothing."""
    properties: object = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        str(name): cast("dict[str, Any]", wanted) if isinstance(wanted, dict) else {}
        for name, wanted in cast("dict[object, object]", properties).items()
    }


def choices_of(wanted: Mapping[str, Any]) -> list[str] | None:
    """The texts that a parameter may be; None if it may be anything, or something that is no text."""
    values: object = wanted.get("enum")
    if not isinstance(values, list) or not values:
        return None
    texts = [value for value in cast("list[object]", values) if isinstance(value, str)]
    return texts if len(texts) == len(cast("list[object]", values)) else None


def is_text(wanted: Mapping[str, Any]) -> bool:
    """Whether a parameter is a text, and nothing but a text, as far as its schema says."""
    if "type" in wanted:
        return wanted["type"] == "string"
    if "enum" in wanted:
        return choices_of(wanted) is not None
    return not {"anyOf", "oneOf", "allOf", "$ref", "const"} & wanted.keys()
