"""Parses complete tool calls: the function, and the values of its arguments.

    json    {"name": "look", "arguments": {"at": "the harbor"}}
    xml     <function=look> <parameter=at> the harbor </parameter> </function>
    python  look(at="the harbor")
    gemma   look{at:<|"|>the harbor<|"|>}

XML has no types, so the schema of the function determines the type of a parameter.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from sys import float_info
from typing import Any, assert_never, cast

from tidemill.cluster.edge.chat.formats import QUOTE, CallForm
from tidemill.cluster.edge.chat.output.parts import Call

GEMMA_NAME = re.compile(r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:")
"""Matches the name of a member, which has no quotation marks."""
PYTHON_CONSTANT = re.compile(r"\b(?:True|False|None)\b")

CONSTANTS = {"True": True, "False": False, "None": None}
"""Constants of models that write JSON like Python."""

NAMES = {"true": True, "false": False, "null": None}
"""Constants of models that write Python like JSON."""


def _finite(number: str | float) -> float:
    """Return the number, or the largest one of its sign: JSON can be read back with no other."""
    return max(-float_info.max, min(float(number), float_info.max))


def _refused(constant: str) -> float:
    raise ValueError(constant)


FINITE = json.JSONDecoder(parse_float=_finite, parse_constant=_refused)
"""A decoder whose values can be written as JSON."""

REFERENCES_MAX = 8
"""The most references and alternatives that are followed one inside another to find a type."""

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schemas of the arguments, by function."""


def call_of(text: str, index: int, form: CallForm) -> Call | None:
    """Return the call in `text`, in a format that cannot be parsed while it arrives; None if it is none."""
    bare = form.without and form.without.fullmatch(text)
    match form.body:
        case _ if bare is not None:
            found = bare[1], dict[str, object]()
        case "json":
            found = _json(text)
        case "python":
            found = _python(text)
        case "xml" | "gemma" | "channels":
            found = None
        case _:
            assert_never(form.body)
    if found is None:
        return None
    name, arguments = found
    return Call(index, name, json.dumps(arguments, ensure_ascii=False))


def _json(text: str) -> tuple[str, dict[str, object]] | None:
    called = _object(text.strip().removeprefix("["))
    name, arguments = called.get("name"), called.get("arguments", called.get("parameters"))
    if isinstance(arguments, str) and arguments:
        arguments = _object(arguments) or arguments
    if not isinstance(name, str) or not (arguments is None or isinstance(arguments, dict)):
        return None
    return name, cast("dict[str, object]", arguments or {})


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
    arguments = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], arguments)
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes that Python does not know
            tree = ast.parse(f"f{bracket}{arguments}", mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        found = {
            keyword.arg: _constant(keyword.value) for keyword in tree.keywords if keyword.arg is not None
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
        case ast.Constant(value=str(text)):  # perhaps with the escapes of JSON, which has pairs of halves
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_constant(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_constant(key)): _constant(value) for key, value in pairs if key is not None}
        case _:
            value: object = ast.literal_eval(node)
            return _finite(value) if isinstance(value, float) else value


Types = frozenset[str]


def value_of(text: str, types: Types | None) -> object:
    """Return the value that a text has as JSON, if it is some and of one of the `types`; else the text."""
    bare = text.strip()
    try:
        value: object = CONSTANTS[bare] if bare in CONSTANTS else FINITE.decode(bare)
    except (ValueError, RecursionError):
        return text
    return text if types and "string" in types and not types & _types_of_value(value) else value


def json_of_gemma(text: str) -> str:
    """Return JSON for a value as Gemma writes it, with names and texts in the quotation marks of JSON."""
    parts = enumerate(text.split(QUOTE))
    return "".join(
        json.dumps(part, ensure_ascii=False) if index % 2 else _quoted(part) for index, part in parts
    )


def _quoted(part: str) -> str:
    """Return JSON for what stands between texts of Gemma."""
    named = GEMMA_NAME.sub(r'\1"\2":', part)
    return PYTHON_CONSTANT.sub(lambda found: json.dumps(CONSTANTS[found[0]]), named)


def types_of(  # noqa: PLR0911 - a case for each keyword
    wanted: object, schema: Mapping[str, Any], depth: int = 0
) -> Types | None:
    """Return the JSON types that a parameter's schema allows; None: any, as far as it is known."""
    if not isinstance(wanted, dict) or depth > REFERENCES_MAX:
        return None

    def inner(part: object) -> Types | None:
        return types_of(part, schema, depth + 1)

    match cast("dict[str, Any]", wanted):
        case {"type": str(name)}:
            return Types([name])
        case {"type": [*names]}:
            return Types(map(str, names))
        case {"const": value}:
            return _types_of_value(value)
        case {"enum": [_, *_] as values}:
            return Types().union(*map(_types_of_value, values))
        case {"anyOf": [*parts]} | {"oneOf": [*parts]}:
            types = [inner(part) for part in parts]
            return None if None in types else Types().union(*filter(None, types))
        case {"allOf": [*parts]}:
            return next(filter(None, map(inner, parts)), None)
        case {"$ref": str(pointer)}:
            return inner(_at(schema, pointer))
        case _:
            return None


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, with what it refers to among its own definitions in place of the reference."""
    for _ in range(REFERENCES_MAX):
        match schema:
            case {"$ref": str(pointer)}:
                found = _at(schema, pointer)
                rest = {key: value for key, value in schema.items() if key != "$ref"}
                schema = {**rest, **cast("dict[str, Any]", found)} if isinstance(found, dict) else rest
            case _:
                break
    return schema


def _at(schema: Mapping[str, Any], pointer: str) -> object:
    """Return a definition by its JSON pointer."""
    found: object = schema
    for name in pointer.removeprefix("#").split("/")[1:]:
        found = cast("dict[str, object]", found).get(name) if isinstance(found, dict) else None
    return found


TEXT = Types(["string"])
KINDS = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def _types_of_value(value: object) -> Types:
    name = next((name for kind, name in KINDS if isinstance(value, kind)), "null")
    whole = name == "number" and float(cast("float", value)).is_integer()
    return Types([name, "integer"] if whole else [name])


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
    """Return the texts among the values that a parameter lists; None if it lists none."""
    values: object = [wanted["const"]] if "const" in wanted else wanted.get("enum")
    listed = cast("list[object]", values) if isinstance(values, list) else []
    return [value for value in listed if isinstance(value, str)] or None


def is_text(wanted: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether a parameter's schema allows only a text or names no type. `schema` has definitions."""
    if not {"type", "enum", "anyOf", "oneOf", "allOf", "$ref", "const"} & wanted.keys():
        return True
    return types_of(wanted, schema) == TEXT
