"""The grammar of an answer that must call a tool, in the model's syntax. Pure.

Tags that are single tokens stand in it as these tokens, so that no other tokens spell them.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, assert_never, cast

from tidemill.cluster.edge.chat.formats import FINAL, Body
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.tool_call_parser import choices_of, is_text, parameters_of
from tidemill.cluster.edge.chat.request.schema import enforced
from tidemill.cluster.edge.chat.request.structured import check_schema
from tidemill.cluster.edge.chat.request.tools import Tool
from tidemill.workers.messages import BLANKS, GRAMMAR_BYTES_MAX, Grammar, RequestError

BREAK = "\n\n"
LINE = "\n"
END = "</parameter>"
ONE_LINE = {
    "coerce_one_of": True,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""One line, because a model could continue with blanks forever."""

Rules = dict[str, str]
"""The definition of each rule by its name, in Lark's syntax."""


def forced(tools: Sequence[Tool], output_format: OutputFormat, added: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer that calls one of the tools, or one of them several times.

    Reasoning in which the prompt ends is cut short. `added` has the texts that are single tokens.
    Raises RequestError.
    """
    form, reasoning = output_format.form, output_format.reasoning
    assert form is not None, "an answer that may call nothing"
    functions = [tool.function for tool in tools]
    written = form.written
    literal = partial(_literal, added=added)
    thinking = reasoning if output_format.thinking else None
    close = literal(thinking.close + BREAK) if thinking else ""
    several = output_format.calls_max is None and written.between is not None
    more = f"({literal(written.between or '')} call)*" if several else ""
    bodies = [
        f"{literal(function.name + written.arguments)} f{number}" for number, function in enumerate(functions)
    ]
    rules = {
        "start": _in_order(close, literal(written.before), "call", more, literal(written.behind)),
        "call": _in_order(literal(written.name), "body", literal(written.end)),
        "body": _one_of(bodies),
    }
    for number, function in enumerate(functions):
        rules |= _arguments(f"f{number}", function.parameters or {}, form.body)
    if form.body == "xml":
        rules[f"text[suffix={json.dumps(END)}]"] = "/(?s:.*)/"
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


def answer_or_calls(
    answer: Grammar, tools: Sequence[Tool], output_format: OutputFormat, added: Mapping[str, int]
) -> Grammar:
    """Return the grammar of an answer that is JSON or calls tools. Their arguments are free, as they are
    without a grammar: many tools would take long to compile."""
    form = output_format.form
    assert form is not None, "an answer that may call nothing"
    if form.bare == "{":  # a call begins as an answer does
        return answer
    free = [_with_parameters(tool, _names_alone(tool, form.body)) for tool in tools]
    calls = forced(free, replace(output_format, thinking=False), added).text
    schema: dict[str, Any] = {"type": "object"} if answer.kind == "json_object" else json.loads(answer.text)
    options = {"whitespace_pattern": BLANKS, "coerce_one_of": True}
    words = _literal(FINAL, added) if form.body == "channels" else ""
    rule = _in_order(words, f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}")
    text = f"start: answer | calls\nanswer: {rule}\ncalls:{calls.removeprefix('start:')}"
    return Grammar(kind="lark", text=text) if len(text.encode()) <= GRAMMAR_BYTES_MAX else answer


def _names_alone(tool: Tool, body: Body) -> dict[str, Any]:
    if body in ("json", "channels"):
        return {}
    return {"properties": {name: {} for name in parameters_of(tool.function.parameters or {})}}


def _with_parameters(tool: Tool, parameters: dict[str, Any] | None) -> Tool:
    function = tool.function.model_copy(update={"parameters": parameters})
    return tool.model_copy(update={"function": function})


def _in_order(*parts: str) -> str:
    return " ".join(part for part in parts if part) or EMPTY


def _one_of(alternatives: Sequence[str]) -> str:
    return " | ".join(alternatives)


def _literal(text: str, added: Mapping[str, int]) -> str:
    """Return a text as a grammar literal, with single tokens where parts of it are some."""
    there = sorted((tag for tag in added if tag in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, there))})", text) if there else [text]
    return " ".join(f"<[{added[part]}]>" if part in there else _quoted(part) for part in parts if part)


def _arguments(name: str, schema: Mapping[str, Any], body: Body) -> Rules:
    """Return the rule `name` of a function's arguments, and the rules that it refers to."""
    match body:
        case "json" | "channels":
            return {name: _json({**schema, "type": "object"})}
        case "xml":
            return _xml_arguments(name, schema)
        case "python":
            return _python_arguments(name, schema)
        case _:
            assert_never(body)


def _xml_arguments(name: str, schema: Mapping[str, Any]) -> Rules:
    """Return the parameters in their order; optional ones may be left out."""
    needed = _needed(schema)
    parameters = list(parameters_of(schema).items())
    rules = {
        f"{name}p{position}": _in_order(_quoted(f"<parameter={parameter}>{LINE}"), _xml_value(wanted, schema))
        for position, (parameter, wanted) in enumerate(parameters)
    }
    marks = ["" if parameter in needed else "?" for parameter, _ in parameters]
    return rules | {name: _in_order(*(rule + mark for rule, mark in zip(rules, marks, strict=True)))}


def _xml_value(wanted: dict[str, Any], schema: Mapping[str, Any]) -> str:
    end = _quoted(LINE + END + LINE)
    if not is_text(wanted, schema):
        return _in_order(_json({**wanted, **_defined(schema)}), end)
    choices = choices_of(wanted)
    if choices is not None:
        return _in_order(f"({_one_of([_quoted(choice) for choice in choices])})", end)
    return _in_order("text", _quoted(LINE))


def _python_arguments(name: str, schema: Mapping[str, Any]) -> Rules:
    """Return keyword arguments in their order. Two rules per position say what may follow: `first` before any
    argument, `more` after a comma."""
    parameters = [parameter for parameter in parameters_of(schema).items() if parameter[0].isidentifier()]
    needed, defined = _needed(schema), _defined(schema)
    first = [name, *(f"{name}x{position + 1}" for position in range(len(parameters)))]
    more = [f"{name}m{position}" for position in range(len(first))]
    rules = {first[-1]: EMPTY, more[-1]: EMPTY}
    for position, (parameter, wanted) in enumerate(parameters):
        argument = _in_order(_quoted(f"{parameter}="), _json({**wanted, **defined}), more[position + 1])
        rules[first[position]] = argument
        rules[more[position]] = _in_order(_quoted(", "), argument)
        if parameter not in needed:
            rules[first[position]] = _one_of([argument, first[position + 1]])
            rules[more[position]] = _one_of([rules[more[position]], more[position + 1]])
    return rules


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE}, ensure_ascii=False)}"


def _needed(schema: Mapping[str, Any]) -> list[object]:
    required: object = schema.get("required")
    return cast("list[object]", required) if isinstance(required, list) else []


def _defined(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


EMPTY = _quoted("")
