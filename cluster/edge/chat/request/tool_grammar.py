"""The grammar of an answer that must call a tool, in the model's syntax. Pure.

Tags that are single tokens stand in it as these tokens, so that no other tokens spell them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, assert_never, cast

from tidemill.cluster.edge.chat.formats import NUMBER, QUOTE, CallForm, Parameters
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.tool_call_parser import (
    TEXT,
    is_text,
    parameters_of,
    resolved,
    types_of,
)
from tidemill.cluster.edge.chat.request.schema import enforced
from tidemill.cluster.edge.chat.request.structured import check_schema
from tidemill.cluster.edge.chat.request.text_grammar import (
    ANY_TEXT,
    DEPTH_MAX,
    count_of,
    definitions_of,
    one_of,
    parts_of,
    quoted,
    terminal_of,
)
from tidemill.cluster.edge.chat.request.tools import Tool
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError

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
    "value": "quote string | scalar | list | object",
    "scalar": '%json {"type": ["number", "boolean", "null"]}',
    "list": '"[" (value ("," value)*)? "]"',
    "object": '"{" (member ("," member)*)? "}"',
    "member": '/[A-Za-z_][A-Za-z0-9_.-]*/ ":" value',
}
"""Any value as Gemma writes it."""

GEMMA_WORD = re.compile(r"[^\s:,<>{}\[\]\"]+")
PYTHON_WORD = re.compile(r"[^\W\d]\w*")
"""The names that a keyword may have."""

ANYTHING: dict[str, Any] = {"anyOf": [{}]}
"""A schema of any JSON, where one without a type stands for a text."""


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
        "body": one_of(bodies),
    }
    for number, function in enumerate(functions):
        rules |= _arguments(f"f{number}", function.parameters or {}, form, added)
    if form.parameters is not None:
        rules |= {"TEXT": ANY_TEXT} | _text("string", "TEXT", form.parameters, added)
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
            return _keywords(name, schema, form, added)
        case _:
            assert_never(form.body)


def _xml_arguments(
    name: str, schema: Mapping[str, Any], marks: Parameters, added: Mapping[str, int]
) -> Rules:
    """Return the parameters in their order; optional ones may be left out."""
    needed = _needed(schema)
    parameters = list(parameters_of(schema).items())
    rules: Rules = {}
    found: list[str] = []
    for position, (parameter, wanted) in enumerate(parameters):
        rule, schema_of_it = f"{name}p{position}", {**wanted, **definitions_of(schema)}
        texts = is_text(wanted, schema)
        before = literal_of(marks.before.format(name=parameter, is_text=json.dumps(texts)), added)
        if texts:
            value = _text_of(f"{rule}v", schema_of_it, rules, marks, added)
        else:
            value = _in_order(_json(schema_of_it), literal_of(marks.behind, added))
        rules[rule] = _in_order(before, value)
        found.append(rule if parameter in needed else f"{rule}?")
    return rules | {name: _in_order(*found)}


def _text_of(
    name: str, wanted: Mapping[str, Any], rules: Rules, marks: Parameters, added: Mapping[str, int]
) -> str:
    """Return the rule of a text of this schema with what stands behind it. It is a new one, called `name`,
    unless any text will do."""
    terminal = terminal_of(wanted)
    if not terminal:
        return "string"
    rules |= _text(name, terminal, marks, added)
    return name


def _text(name: str, terminal: str, marks: Parameters, added: Mapping[str, int]) -> Rules:
    """Return the rule of a text that matches a terminal, with what stands behind it. It ends at the first end
    mark, whatever spells it; the mark may begin with a token or have one inside."""
    end, rest = marks.end, marks.behind.removeprefix(marks.end)
    at = min((end.index(tag) for tag in added if tag in end), default=len(end))
    chars = f"({terminal} & ~(TEXT {quoted(end)} TEXT)) {quoted(end[:at])}"
    return {name.upper(): chars, name: _in_order(name.upper(), literal_of(end[at:] + rest, added))}


def _keywords(
    name: str, schema: Mapping[str, Any], form: CallForm, added: Mapping[str, int], depth: int = 0
) -> Rules:
    """Return keyword arguments in their order, those of Gemma by name. Two rules per position say what may
    follow: `first` before any argument, `more` after a comma."""
    gemma = form.body == "gemma"
    word = GEMMA_WORD if gemma else PYTHON_WORD
    parameters = [parameter for parameter in parameters_of(schema).items() if word.fullmatch(parameter[0])]
    if gemma:
        parameters.sort(key=lambda parameter: parameter[0].lower())
    needed, defined = _needed(schema), definitions_of(schema)
    first = [name, *(f"{name}x{position + 1}" for position in range(len(parameters)))]
    more = [f"{name}m{position}" for position in range(len(first))]
    rules = {first[-1]: EMPTY, more[-1]: EMPTY}
    for position, (parameter, wanted) in enumerate(parameters):
        if gemma:
            value = _gemma_value(f"{name}v{position}", {**wanted, **defined}, rules, form, added, depth)
        else:
            value = _json({**wanted, **defined})
        argument = _in_order(quoted(parameter + (":" if gemma else "=")), value, more[position + 1])
        rules[first[position]] = argument
        rules[more[position]] = _in_order(quoted("," if gemma else ", "), argument)
        if parameter not in needed:
            rules[first[position]] = one_of([argument, first[position + 1]])
            rules[more[position]] = one_of([rules[more[position]], more[position + 1]])
    return rules


def _gemma_value(
    name: str, wanted: Mapping[str, Any], rules: Rules, form: CallForm, added: Mapping[str, int], depth: int
) -> str:
    """Return the rule of a value, and add those that it refers to, whose names begin with `name`. Of schemas
    it follows types, alternatives, choices, properties, items and their number, and the limits of texts."""
    wanted = resolved(wanted)
    types = types_of(wanted, wanted)
    alternatives = parts_of(wanted, "anyOf") or parts_of(wanted, "oneOf")
    assert form.parameters is not None

    def inner(mark: str, schema: Mapping[str, Any]) -> str:
        return _gemma_value(name + mark, schema, rules, form, added, depth + 1)

    if alternatives and types != TEXT and "type" not in wanted and depth < DEPTH_MAX:
        return f"({one_of(inner(f'o{index}', part) for index, part in enumerate(alternatives))})"
    if types is None or depth == DEPTH_MAX or not types <= {"string", "array", "object", *SCALARS}:
        return "value"
    found: list[str] = []
    if "string" in types:
        found.append(f"quote {_text_of(f'{name}t', wanted, rules, form.parameters, added)}")
    if "array" in types:
        items: object = wanted.get("items")
        item = cast("dict[str, Any]", items) if isinstance(items, dict) else {}
        rules[f"{name}l"] = inner("i", {**item, **definitions_of(wanted)})
        found.append(_listed(f"{name}l", count_of(wanted, "minItems") or 0, count_of(wanted, "maxItems")))
    if "object" in types and parameters_of(wanted):
        rules |= _keywords(name, wanted, form, added, depth + 1)
        found.append(f'"{{" {name} "}}"')
    elif "object" in types:
        found.append("object")
    if types & SCALARS:
        found.append(_json({**wanted, "type": sorted(types & SCALARS)}))
    return f"({one_of(found)})"


def _listed(item: str, low: int, high: int | None) -> str:
    """Return a list of `low` to `high` items in Lark's syntax."""
    if high == 0:
        return '"[" "]"'
    several = f'{item} ("," {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
    return f'"[" {several if low else f"({several})?"} "]"'


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE}, ensure_ascii=False)}"


def _needed(schema: Mapping[str, Any]) -> list[object]:
    required: object = schema.get("required")
    return cast("list[object]", required) if isinstance(required, list) else []


EMPTY = quoted("")
