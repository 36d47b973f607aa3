"""Calls of tools as models write them between <tool_call> and </tool_call>, in one of two forms.

    json    {"name": "look", "arguments": {"at": "the harbor"}}                                 Hermes, Qwen3
    xml     <function=look> <parameter=at> the harbor </parameter> </function>                  Qwen3-Coder

XML says nothing about types: what a parameter is comes from the schema of its function.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

FUNCTION = "<function="
"""What a chat template has that asks for XML."""

WHOLE = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
CONSTANTS = {"True": True, "False": False, "None": None}
"""As models write them that think of Python."""

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function."""


@dataclass(frozen=True, slots=True)
class Call:
    """`arguments` is the text of a JSON object."""

    index: int
    name: str
    arguments: str


def call_of(body: str, index: int, schemas: Schemas | None) -> Call | None:
    """The call that stands between the tags; None if it is none. `schemas` are those of a model that writes
    XML."""
    found = _json(body) if schemas is None else _xml(body, schemas)
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


def _xml(body: str, schemas: Schemas) -> tuple[str, dict[str, object]] | None:
    whole = WHOLE.fullmatch(body)
    if whole is None:
        return None
    name, text = whole.groups()
    parameters = parameters_of(schemas.get(name, {}))
    arguments: dict[str, object] = {}
    end = 0
    while parameter := PARAMETER.match(text, end):
        end = parameter.end()
        arguments[parameter[1]] = _value(parameter[2], parameters.get(parameter[1], {}))
    return None if text[end:].strip() else (name, arguments)


def _value(text: str, wanted: Mapping[str, Any]) -> object:
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
