"""Parses complete tool calls: the function, and the values of its arguments.

    json    {"name": "look", "arguments": {"at": "the harbor"}}
    xml     <function=look> <parameter=at> the harbor </parameter> </function>
    python  look(at="the harbor")

XML has no types, so the schema of the function determines the type of a parameter.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, assert_never, cast

from tidemill.cluster.edge.chat.formats import Body
from tidemill.cluster.edge.chat.output.parts import Call

WITHOUT_PARAMETERS = re.compile(r"\s*<function=([^>\s]+)>\s*(?:</function>\s*)?")
CONSTANTS = {"True": True, "False": False, "None": None}
"""Constants of models that write JSON like Python."""

NAMES = {"true": True, "false": False, "null": None}
"""Constants of models that write Python like JSON."""

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function."""


def call_of(text: str, index: int, body: Body) -> Call | None:
    """Return the call in `text`, in a format that cannot be parsed while it arrives; None if it is none."""
    match body:
        case "json":
            found = _json(text)
        case "xml":
            bare = WITHOUT_PARAMETERS.fullmatch(text)
            found = None if bare is None else (bare[1], dict[str, object]())
        case "python":
            found = _python(text)
        case "channels":
            found = None
        case _:
            assert_never(body)
    if found is None:
        return None
    name, arguments = found
    return Call(index, name, json.dumps(arguments, ensure_ascii=False))


def _json(text: str) -> tuple[str, dict[str, object]] | None:
    called = _object(text.strip().removeprefix("["))
    name, arguments = called.get("name"), called.get("arguments", called.get("parameters", {}))
    if isinstance(arguments, str) and arguments:
        arguments = _object(arguments) or None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, cast("dict[str, object]", arguments)


def _object(text: str) -> dict[str, object]:
    """Return the JSON object in the text; an empty one for anything else."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _python(text: str) -> tuple[str, dict[str, object]] | None:
    """Return the function and arguments of a call with keyword arguments only, whose values are constants."""
    name, bracket, arguments = text.strip().removeprefix("[").partition("(")
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that Python does not know
            tree = ast.parse(f"f{bracket}{arguments}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        found = {
            str(keyword.arg): _constant(keyword.value) for keyword in tree.keywords if keyword.arg is not None
        }
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return (name.strip(), found) if len(found) == len(tree.keywords) else None


def _constant(node: ast.expr) -> object:
    """Return a constant of Python or JSON, or lists and objects of them. Raises ValueError."""
    match node:
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_constant(key)): _constant(value) for key, value in pairs if key is not None}
        case _:
            return ast.literal_eval(node)


def value_of(text: str, wanted: Mapping[str, Any]) -> object:
    """Return the value of a parameter if its schema allows it; else its text."""
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
    """Return the schema of each parameter in what a client sent as a schema; empty if there is none."""
    properties: object = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {
        str(name): cast("dict[str, Any]", wanted) if isinstance(wanted, dict) else {}
        for name, wanted in cast("dict[object, object]", properties).items()
    }


def choices_of(wanted: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a parameter allows; None if it allows anything, or something that is no text."""
    values: object = wanted.get("enum")
    if not isinstance(values, list) or not values:
        return None
    texts = [value for value in cast("list[object]", values) if isinstance(value, str)]
    return texts if len(texts) == len(cast("list[object]", values)) else None


def is_text(wanted: Mapping[str, Any]) -> bool:
    """Return whether a parameter's schema allows only a text."""
    if "type" in wanted:
        return wanted["type"] == "string"
    if "enum" in wanted:
        return choices_of(wanted) is not None
    return not {"anyOf", "oneOf", "allOf", "$ref", "const"} & wanted.keys()
