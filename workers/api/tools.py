"""The tools of a chat: what a client offers, what the model must call, and the grammar of a forced call."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from tidemill.workers.api.calls import FUNCTION, choices_of, is_text, parameters_of
from tidemill.workers.api.speech import CALL, CALLED, THOUGHT, Manner
from tidemill.workers.api.structured import check_schema
from tidemill.workers.messages import GRAMMAR_BYTES_MAX, Grammar, RequestError

TOOLS_MAX = 128
BREAK = "\n\n"
LINE = "\n"
END = "</parameter>"
CHOICE_FORMS = 'give none, auto, required, or {"type": "function", "function": {"name": ...}}'


class Function(BaseModel):
    """What the model may call; `parameters` is a JSON schema of an object."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """As chat templates want it."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_none=True, exclude={"strict"}),
        }


@dataclass(frozen=True, slots=True)
class Named:
    """The function of this name shall be called."""

    name: str


def _choice(value: object) -> str | Named:
    match value:
        case "none" | "auto" | "required" as word:
            return str(word)
        case {"type": "function", "function": {"name": str(name)}}:
            return Named(name)
        case _:
            raise ValueError(CHOICE_FORMS)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Named,
    PlainValidator(_choice),
    WithJsonSchema({"description": CHOICE_FORMS, "type": ["string", "object"]}),
]


def offered(tools: Sequence[Tool], choice: Literal["none", "auto", "required"] | Named) -> list[Tool]:
    """Those that may be called. Raises RequestError."""
    if choice == "none":
        return []
    if not tools and choice != "auto":
        raise RequestError("tool_choice needs tools: send them, or leave it out", param="tool_choice")
    if isinstance(choice, Named):
        found = [tool for tool in tools if tool.function.name == choice.name]
        if not found:
            raise RequestError(
                f"tool_choice: there is no function {choice.name[:64]!r} among the tools", param="tool_choice"
            )
        return found
    return list(tools)


def forced(tools: Sequence[Tool], manner: Manner) -> Grammar:
    """An answer that calls one of the tools, or several times one of them. Reasoning in which the prompt ends
    is cut short. Raises RequestError."""
    end = f"{json.dumps(THOUGHT + BREAK)} " if manner.thinking else ""
    functions = [tool.function for tool in tools]
    for function in functions:
        check_schema(function.parameters or {}, "tools")
    if manner.schemas is None:
        bodies, rules = [f"%json {_schema_of(function)}" for function in functions], list[str]()
    else:
        bodies = [f"f{number}" for number in range(len(functions))]
        rules = [rule for number, function in enumerate(functions) for rule in _xml_rules(function, number)]
        rules.append(f"text[suffix={json.dumps(END)}]: /(?s:.*)/")
    text = "\n".join(
        (
            f"start: {end}call" + (' ("\\n" call)*' if manner.calls_max is None else ""),
            f'call: {json.dumps(CALL)} "\\n" body "\\n" {json.dumps(CALLED)}',
            "body: " + "\n    | ".join(bodies),
            *rules,
        )
    )
    if len(text.encode(errors="replace")) > GRAMMAR_BYTES_MAX:
        raise RequestError(
            f"tools: their schemas have more than {GRAMMAR_BYTES_MAX:,} bytes, too many to force a call: "
            "shorten them, or use tool_choice auto",
            param="tools",
        )
    return Grammar(kind="lark", text=text)


def _xml_rules(function: Function, number: int) -> list[str]:
    """What the model writes to call it: its parameters in their order, those aside that it may leave out."""
    schema = function.parameters or {}
    required: object = schema.get("required")
    needed = cast("list[object]", required) if isinstance(required, list) else []
    defined = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules: list[str] = []
    body = [_quoted(f"{FUNCTION}{function.name}>\n")]
    for place, (name, wanted) in enumerate(parameters_of(schema).items()):
        rule = f"f{number}p{place}"
        body.append(rule if name in needed else f"{rule}?")
        rules.append(f"{rule}: {_quoted(f'<parameter={name}>' + LINE)} {_xml_value(wanted, defined)}")
    body.append(_quoted("</function>"))
    return [f"f{number}: {' '.join(body)}", *rules]


def _xml_value(wanted: dict[str, Any], defined: dict[str, Any]) -> str:
    end = _quoted(LINE + END + LINE)
    if not is_text(wanted):
        return f"%json {json.dumps({**wanted, **defined}, ensure_ascii=False)} {end}"
    choices = choices_of(wanted)
    if choices is not None:
        return f"({' | '.join(map(_quoted, choices))}) {end}"
    return f"text {_quoted(LINE)}"


def _quoted(text: str) -> str:
    """As grammars write it."""
    return json.dumps(text, ensure_ascii=False)


def _schema_of(function: Function) -> str:
    """Of what the model writes to call it: on one line, since a model could go on with blanks for ever."""
    schema = {
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": function.parameters or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return json.dumps(schema, ensure_ascii=False)
