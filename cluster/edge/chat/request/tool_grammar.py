"""The grammar of an answer that must call a tool, in the model's syntax. Pure.

Tags that are single tokens stand in it as these tokens, so that no other tokens spell them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never, cast

from tidemill.cluster.edge.chat.formats import Body
from tidemill.cluster.edge.chat.output.output_parser import OutputFormat
from tidemill.cluster.edge.chat.output.tool_call_parser import choices_of, is_text, parameters_of
from tidemill.cluster.edge.chat.request.structured import check_schema
from tidemill.cluster.edge.chat.request.tools import Function, Tool
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError

BREAK = "\n\n"
LINE = "\n"
END = "</parameter>"
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, because a model could continue with blanks forever."""


def forced(tools: Sequence[Tool], output_format: OutputFormat, added: Mapping[str, int]) -> Grammar:
    """Return the grammar of an answer that calls one of the tools, or one of them several times.
    Reasoning in which the prompt ends is cut short. `added` has the texts that are single tokens.
    Raises RequestError.
    """
    form, reasoning = output_format.form, output_format.reasoning
    assert form is not None, "an answer that may call nothing"
    functions = [tool.function for tool in tools]
    for function in functions:
        check_schema(function.parameters or {}, "tools")
    written = form.written
    close = (
        _literal(reasoning.close + BREAK, added) if reasoning is not None and output_format.thinking else ""
    )
    several = output_format.calls_max is None and written.between is not None
    more = f"({_literal(written.between or '', added)} call)*" if several else ""
    rules = [
        rule for number, function in enumerate(functions) for rule in _rules(function, number, form.body)
    ]
    text = "\n".join(
        (
            f"start: {close} {_literal(written.before, added)} call {more} {_literal(written.behind, added)}",
            f"call: {_literal(written.name, added)} body {_literal(written.end, added)}",
            "body: "
            + "\n    | ".join(
                f"{_literal(function.name + written.arguments, added)} f{number}"
                for number, function in enumerate(functions)
            ),
            *rules,
            *((f"text[suffix={json.dumps(END)}]: /(?s:.*)/",) if form.body == "xml" else ()),
        )
    )
    if len(text.encode(errors="replace")) > GRAMMAR_BYTES_MAX:
        raise RequestError(
            f"tools: their schemas have more than {GRAMMAR_BYTES_MAX:,} bytes, too many to force a call: "
            "shorten them, or use tool_choice auto",
            param="tools",
        )
    return Grammar(kind="lark", text=text)


def _literal(text: str, added: Mapping[str, int]) -> str:
    """Return a text as a grammar literal, with single tokens where parts of it are some."""
    there = sorted((tag for tag in added if tag in text), key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, there))})", text) if there else [text]
    return " ".join(f"<[{added[part]}]>" if part in there else _quoted(part) for part in parts if part)


def _rules(function: Function, number: int, body: Body) -> Iterator[str]:
    """Yield `f<number>`: the rules of a function's arguments."""
    schema = function.parameters or {}
    match body:
        case "json" | "channels":
            yield f"f{number}: {_json({'type': 'object', **schema})}"
        case "xml":
            yield from _xml_rules(schema, number)
        case "python":
            yield from _python_rules(schema, number)
        case _:
            assert_never(body)


def _xml_rules(schema: Mapping[str, Any], number: int) -> Iterator[str]:
    """Yield the parameters in their order; optional ones may be left out."""
    needed, defined = _needed(schema), _defined(schema)
    whole = [_quoted("")]
    for position, (name, wanted) in enumerate(parameters_of(schema).items()):
        rule = f"f{number}p{position}"
        whole.append(rule if name in needed else f"{rule}?")
        yield f"{rule}: {_quoted(f'<parameter={name}>' + LINE)} {_xml_value(wanted, defined)}"
    yield f"f{number}: {' '.join(whole)}"


def _xml_value(wanted: dict[str, Any], defined: dict[str, Any]) -> str:
    end = _quoted(LINE + END + LINE)
    if not is_text(wanted):
        return f"{_json({**wanted, **defined})} {end}"
    choices = choices_of(wanted)
    if choices is not None:
        return f"({' | '.join(map(_quoted, choices))}) {end}"
    return f"text {_quoted(LINE)}"


def _python_rules(schema: Mapping[str, Any], number: int) -> Iterator[str]:
    """Yield keyword arguments in their order. A rule per position says what may follow: `first` before any
    argument, `more` behind a comma.
    """
    parameters = [parameter for parameter in parameters_of(schema).items() if parameter[0].isidentifier()]
    needed, defined = _needed(schema), _defined(schema)
    first = [f"f{number}", *(f"f{number}x{position + 1}" for position in range(len(parameters)))]
    more = [f"f{number}m{position}" for position in range(len(first))]
    for position, (name, wanted) in enumerate(parameters):
        here = f"{_quoted(name + '=')} {_json({**wanted, **defined})} {more[position + 1]}"
        may_skip = name not in needed
        yield f"{first[position]}: {here}" + (f" | {first[position + 1]}" if may_skip else "")
        yield f"{more[position]}: {_quoted(', ')} {here}" + (f" | {more[position + 1]}" if may_skip else "")
    yield f"{first[-1]}: {_quoted('')}"
    yield f"{more[-1]}: {_quoted('')}"


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': ONE_LINE}, ensure_ascii=False)}"


def _needed(schema: Mapping[str, Any]) -> list[object]:
    required: object = schema.get("required")
    return cast("list[object]", required) if isinstance(required, list) else []


def _defined(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
