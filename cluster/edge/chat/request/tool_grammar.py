"""The grammar of an answer that must call a tool, in the model's syntax. Pure.

Tags that are single tokens stand in it as these tokens, so that no other tokens spell them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, assert_never, cast

from tidemill.cluster.edge.chat.formats import NUMBER, QUOTE, Body, CallForm, Parameters
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.tool_call_parser import (
    choices_of,
    is_text,
    parameters_of,
    resolved,
    types_of,
)
from tidemill.cluster.edge.chat.request.schema import enforced
from tidemill.cluster.edge.chat.request.structured import check_schema
from tidemill.cluster.edge.chat.request.tools import Tool
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError

BREAK = "\n\n"
LINE = "\n"
ONE_LINE = {
    "coerce_one_of": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One line, because a model could continue with blanks forever."""

Rules = dict[str, str]
"""The definition of each rule by its name, in Lark's syntax."""

SCALARS = frozenset(["number", "integer", "boolean", "null"])
GEMMA_VALUES: Rules = {
    "value": "quote text | scalar | list | object",
    "scalar": '%json {"type": ["number", "boolean", "null"]}',
    "list": '"[" (value ("," value)*)? "]"',
    "object": '"{" (member ("," member)*)? "}"',
    "member": '/[A-Za-z_][A-Za-z0-9_.-]*/ ":" value',
}
"""Any value as Gemma writes it."""

GEMMA_WORD = re.compile(r"[^\s:,<>{}\[\]\"]+")
PYTHON_WORD = re.compile(r"[^\W\d]\w*")
"""The names that a keyword may have."""

GEMMA_TYPES = {"string": "quote text", "array": "list", "object": "object"}

ANYTHING: dict[str, Any] = {"anyOf": [{}]}
"""A schema of any JSON, where one without a type stands for a text."""

DEPTH_MAX = 8
"""The most objects and lists one in another of which a grammar of Gemma's follows the schemas."""


def forced(tools: Sequence[Tool], output_format: OutputFormat, added: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer that calls one of the tools, or one of them several times.

    `added` has the texts that are single tokens. Raises RequestError.
    """
    form = output_format.form
    assert form is not None, "an answer that may call nothing"
    functions = [tool.function for tool in tools]
    written = form.written
    literal = partial(literal_of, added=added)
    several = output_format.calls_max is None and written.between is not None
    more = f"({literal((written.between or '') + written.name)} call)*" if several else ""
    bodies = [
        f"{literal(function.name + written.arguments)} f{number}" for number, function in enumerate(functions)
    ]
    rules = {
        "start": _in_order(literal(written.before + written.name), "call", more, literal(written.behind)),
        "call": _in_order("body", literal(written.end)),
        "body": _one_of(bodies),
    }
    for number, function in enumerate(functions):
        rules |= _arguments(f"f{number}", function.parameters or {}, form, added)
    if form.parameters is not None:
        rules |= _text(form.parameters, added)
    if form.body == "gemma":
        rules |= GEMMA_VALUES | {"quote": literal(QUOTE)}
    text = "\n".join(f"{name}: {definition}" for name, definition in rules.items())
    if len(text.encode(errors="replace")) > GRAMMAR_BYTES_MAX:
        raise RequestError(
            f"tools: their schemas have more than {GRAMMAR_BYTES_MAX:,} bytes, too many to force a call: "
            "shorten them, or use tool_choice auto",
            param="tools",
        )
    return Grammar(kind="lark", text=text)


def enforceable(tools: Sequence[Tool]) -> tuple[list[Tool], tuple[str, ...]]:
    """Return the tools with schemas that a grammar can follow, and the paths of what was left out. Raises
    RequestError."""
    kept: list[Tool] = []
    left_out: list[str] = []
    for tool in tools:
        function = tool.function
        check_schema(function.parameters or {}, "tools")
        found = enforced(
            function.parameters or {}, f"tools.{function.name}.parameters", strict=function.strict is True
        )
        parameters = None if function.parameters is None else found.schema
        kept.append(_with_parameters(tool, parameters))
        left_out += found.left_out
    return kept, tuple(left_out)


def free(tools: Sequence[Tool], output_format: OutputFormat) -> list[Tool]:
    """Return the tools with the names of their parameters alone."""
    assert output_format.form is not None
    return [_with_parameters(tool, _names_alone(tool, output_format.form)) for tool in tools]


def _names_alone(tool: Tool, form: CallForm) -> dict[str, Any]:
    if form.body in ("json", "channels"):
        return {}
    schema = tool.function.parameters or {}
    marked = form.parameters is not None and "{is_text}" in form.parameters.before
    free = {
        name: ANYTHING if marked and not is_text(wanted, schema) else dict[str, Any]()
        for name, wanted in parameters_of(schema).items()
    }
    return {"properties": free}


def _with_parameters(tool: Tool, parameters: dict[str, Any] | None) -> Tool:
    function = tool.function.model_copy(update={"parameters": parameters})
    return tool.model_copy(update={"function": function})


def _in_order(*parts: str) -> str:
    return " ".join(part for part in parts if part) or EMPTY


def _one_of(alternatives: Sequence[str]) -> str:
    return " | ".join(alternatives)


def literal_of(text: str, added: Mapping[str, int]) -> str:
    """Return a text as a grammar literal, with single tokens where parts of it are some."""
    if NUMBER in text:
        before, _, behind = text.partition(NUMBER)
        return _in_order(literal_of(before, added), "/[0-9]{1,4}/", literal_of(behind, added))
    there = sorted((tag for tag in added if tag in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, there))})", text) if there else [text]
    return " ".join(f"<[{added[part]}]>" if part in there else quoted(part) for part in parts if part)


def _arguments(name: str, schema: Mapping[str, Any], form: CallForm, added: Mapping[str, int]) -> Rules:
    """Return the rule `name` of a function's arguments, and the rules that it refers to."""
    match form.body:
        case "json" | "channels":
            return {name: _json({**schema, "type": "object"})}
        case "xml":
            assert form.parameters is not None
            return _xml_arguments(name, schema, form.parameters, added)
        case "python" | "gemma":
            return _keywords(name, schema, form.body)
        case _:
            assert_never(form.body)


def _xml_arguments(
    name: str, schema: Mapping[str, Any], marks: Parameters, added: Mapping[str, int]
) -> Rules:
    """Return the parameters in their order; optional ones may be left out."""
    needed = _needed(schema)
    parameters = list(parameters_of(schema).items())
    rules = {
        f"{name}p{position}": _xml_parameter(parameter, wanted, schema, marks, added)
        for position, (parameter, wanted) in enumerate(parameters)
    }
    counts = ["" if parameter in needed else "?" for parameter, _ in parameters]
    return rules | {name: _in_order(*(rule + count for rule, count in zip(rules, counts, strict=True)))}


def _xml_parameter(
    name: str, wanted: dict[str, Any], schema: Mapping[str, Any], marks: Parameters, added: Mapping[str, int]
) -> str:
    texts = is_text(wanted, schema)
    before = literal_of(marks.before.format(name=name, is_text=json.dumps(texts)), added)
    choices = choices_of(wanted)
    if texts and choices is None:
        return _in_order(before, "text")
    if choices is not None:
        value = f"({_one_of([quoted(choice) for choice in choices])})"
    else:
        value = _json({**wanted, **_defined(schema)})
    return _in_order(before, value, literal_of(marks.behind, added))


def _text(marks: Parameters, added: Mapping[str, int]) -> Rules:
    """Return the rule of a text with what stands behind it. Where a part of that is a single token, the text
    ends there: no text has such a token."""
    behind = marks.behind
    token = min((tag for tag in added if tag in behind), key=behind.index, default=None)
    if token is None:
        rest = behind.partition(marks.ends[0])[2]
        suffix = f"chars[suffix={json.dumps(marks.ends[0])}]"
        return {suffix: "/(?s:.*)/", "text": _in_order("chars", literal_of(rest, added))}
    at = behind.index(token)
    before = re.escape(behind[:at]).replace("\\\n", "\\n").replace("/", "\\/")
    return {"chars": f"/(?s:.*){before}/", "text": _in_order("chars", literal_of(behind[at:], added))}


def _keywords(name: str, schema: Mapping[str, Any], body: Body, depth: int = 0) -> Rules:
    """Return keyword arguments in their order, those of Gemma by name. Two rules per position say what may
    follow: `first` before any argument, `more` after a comma."""
    gemma = body == "gemma"
    word = GEMMA_WORD if gemma else PYTHON_WORD
    parameters = [parameter for parameter in parameters_of(schema).items() if word.fullmatch(parameter[0])]
    if gemma:
        parameters.sort(key=lambda parameter: parameter[0].lower())
    needed, defined = _needed(schema), _defined(schema)
    first = [name, *(f"{name}x{position + 1}" for position in range(len(parameters)))]
    more = [f"{name}m{position}" for position in range(len(first))]
    rules = {first[-1]: EMPTY, more[-1]: EMPTY}
    for position, (parameter, wanted) in enumerate(parameters):
        if gemma:
            value = _gemma_value(f"{name}v{position}", {**wanted, **defined}, rules, depth)
        else:
            value = _json({**wanted, **defined})
        argument = _in_order(quoted(parameter + (":" if gemma else "=")), value, more[position + 1])
        rules[first[position]] = argument
        rules[more[position]] = _in_order(quoted("," if gemma else ", "), argument)
        if parameter not in needed:
            rules[first[position]] = _one_of([argument, first[position + 1]])
            rules[more[position]] = _one_of([rules[more[position]], more[position + 1]])
    return rules


def _gemma_value(name: str, wanted: Mapping[str, Any], rules: Rules, depth: int) -> str:
    """Return the rule of a value, and add those that it refers to, whose names begin with `name`. Of schemas
    it follows types, properties, items and choices of texts."""
    wanted = resolved(wanted)
    types = types_of(wanted, wanted)
    choices = choices_of(wanted)
    items: object = wanted.get("items")
    if choices is not None:
        return f"quote ({_one_of([quoted(choice) for choice in choices])}) quote"
    if types is not None and types <= SCALARS:
        return _json(wanted)
    if types == frozenset(["array"]) and isinstance(items, dict) and depth < DEPTH_MAX:
        schema = {**cast("dict[str, Any]", items), **_defined(wanted)}
        rules[name] = _gemma_value(f"{name}i", schema, rules, depth + 1)
        return f'"[" ({name} ("," {name})*)? "]"'
    if types == frozenset(["object"]) and parameters_of(wanted) and depth < DEPTH_MAX:
        rules |= _keywords(name, wanted, "gemma", depth + 1)
        return f'"{{" {name} "}}"'
    if types is None or not types <= {*GEMMA_TYPES, *SCALARS}:
        return "value"
    scalars = [_json({"type": sorted(types & SCALARS)})] if types & SCALARS else []
    return f"({_one_of([*(GEMMA_TYPES[kind] for kind in sorted(types - SCALARS)), *scalars])})"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE}, ensure_ascii=False)}"


def _needed(schema: Mapping[str, Any]) -> list[object]:
    required: object = schema.get("required")
    return cast("list[object]", required) if isinstance(required, list) else []


def _defined(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


EMPTY = quoted("")
