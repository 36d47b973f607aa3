"""The body of POST /v1/responses, and the chat that it asks for.

An item of `input` is a message, a call that the model made, the output of one, or a reference to a stored
item. Prompts that a server keeps, and answers in the background, are refused.
"""

import json
import re
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from tidemill.cluster.edge.apis.responses_tools import FlatTool, chat_tool, flat_name, own_tools
from tidemill.cluster.edge.chat.request.hints import Mark, marked_parts, marks_of
from tidemill.cluster.edge.chat.request.messages import UNREAD
from tidemill.cluster.edge.chat.request.params import Fields, TokenCount
from tidemill.cluster.edge.chat.request.tools import TOOLS_MAX
from tidemill.cluster.edge.chat.request.validation import checked
from tidemill.cluster.edge.requests.bodies import MESSAGES_MAX, AgentChat, ChatBody
from tidemill.workers.messages import RequestError

METADATA_MAX = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=METADATA_MAX),
]
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
CHOICE_FORMS = 'give none, auto, required, or {"type": "function", "name": ...}'

ID = re.compile(r"^[A-Za-z0-9_.:-]{1,128}$")
"""The form of ids of responses, conversations and items."""

REFUSED = {
    "background": "background: answers are made while a client waits: leave it out, and stream",
    "prompt": "prompt: this server keeps no prompts: send the text in instructions and input",
}
NOT_PASSED_ON = frozenset(
    (
        *("messages", "n", "logprobs", "top_logprobs", "max_tokens", "prompt_logprobs", "response_format"),
        "return_token_ids",
    )
)
"""Chat fields that a response has in another form, or not at all."""

CHAT_NAMES = {
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
}
"""The names of chat fields in a response."""


def _text(value: object) -> object:
    """Join a list of text parts to one text."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in cast("list[Any]", value):
        match part:
            case {"type": str(kind), "text": str(text)} if kind in TEXT_PARTS:
                texts.append(text)
            case {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(
                    'only text is supported: give a string or parts of {"type": "input_text", "text": ...}'
                )
    return "".join(texts)


def _items(value: object) -> object:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _choice(value: object) -> str | dict[str, Any]:
    """Return the tool choice in the form of a chat."""
    match cast("Any", value):
        case "none" | "auto" | "required" as word:
            return str(word)
        case {"type": "function" | "custom", "name": str(name), **more}:
            return {"type": "function", "function": {"name": flat_name(name, more.get("namespace"))}}
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            nested = [_choice(tool) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": nested}}
        case _:
            raise ValueError(CHOICE_FORMS)


def _conversation(value: object) -> object:
    match cast("Any", value):
        case {"id": str(name)}:
            return name
        case _:
            return value


Text = Annotated[str, BeforeValidator(_text)]
Id = Annotated[str, Field(pattern=ID.pattern)]
Choice = Annotated[
    str | dict[str, Any],
    PlainValidator(_choice),
    WithJsonSchema({"description": CHOICE_FORMS, "type": ["string", "object"]}),
]


def _output(value: object) -> object:
    """Return the output of a call as text: that of an object is its JSON, an image is named."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, list):
        return value
    parts = cast("list[object]", value)
    return _text([_read(part) for part in parts])


def _read(part: object) -> object:
    """Return a part of an output; a note for what is no text."""
    match cast("Any", part):
        case {"type": str(kind)} if kind not in TEXT_PARTS:
            return {"type": "text", "text": UNREAD.format(kind.removeprefix("input_")[:32])}
        case _:
            return part


class InputItem(Fields, extra="ignore"):
    """One item of the input. Its type determines which fields it needs. Calls of any kind that have a
    `call_id`, and their outputs, are rendered; reasoning and calls of other servers are left out."""

    type: Annotated[
        str, Field(pattern=r"^(message|reasoning|compaction|item_reference|\w+_call|\w+_call_output)$")
    ] = "message"
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Text | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    output: Annotated[str, BeforeValidator(_output)] | None = None

    _marks: tuple[Mark, ...] = ()
    _given: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, fields: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        item = check(fields)
        return item.with_given(cast("dict[str, Any]", fields)) if isinstance(fields, dict) else item

    def with_given(self, given: dict[str, Any]) -> Self:
        """Set the item as the client sent it: with fields that are stored, and the ends of its parts with
        cache_control, which its text does not show."""
        self._given = given
        self._marks = marks_of(given.get("content" if self.type == "message" else "output"))
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The item as the client sent it."""
        return self._given

    def parts(self) -> str | list[dict[str, object]]:
        """Return the text of a message or of a call's output, in parts that end where it is marked."""
        text = (self.content if self.type == "message" else self.output) or ""
        return marked_parts(text, self._marks) if self._marks else text

    def called(self) -> dict[str, Any]:
        """Return the function that a call of any kind stands for in a chat."""
        name = flat_name(self.name or self.type.removesuffix("_call"), self.namespace)
        if self.input is not None:
            return {"name": name, "arguments": {"input": self.input}}
        return {"name": name, "arguments": self.action if self.arguments is None else self.arguments}

    @model_validator(mode="after")
    def _whole(self) -> Self:
        needed = NEEDED.get(self.type, ())
        if self.type == "message" and self.role != "assistant":
            needed = ("role", "content")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"a {self.type} needs {' and '.join(missing)}")
        return self


NEEDED = {
    "message": ("role",),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id",),
    "item_reference": ("id",),
}


class TextConfig(Fields, extra="ignore"):
    """A text format: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "schema": ...}."""

    format: dict[str, Any] = Field(default={"type": "text"})


class ReasoningOptions(BaseModel, strict=True, extra="ignore"):
    """The reasoning options. `effort` is for the chat template; "none" asks for an answer without
    reasoning."""

    effort: Annotated[str, Field(max_length=32)] | None = None


class ResponsesBody(Fields, extra="allow", allow_inf_nan=False):
    """The body of POST /v1/responses. Chat fields that it does not name are passed on (seed, top_k,
    cache_salt)."""

    model: Annotated[str, Field(max_length=256)] | None = None
    input: Annotated[
        list[InputItem],
        FailFast(),
        Field(min_length=1, max_length=MESSAGES_MAX, description="a text, or items"),
        BeforeValidator(_items),
    ]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stream: bool = False
    tools: Annotated[list[FlatTool], FailFast(), Field(max_length=TOOLS_MAX)] = Field(default=[])
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = TextConfig()
    reasoning: ReasoningOptions = ReasoningOptions()
    store: Annotated[bool | None, Field(description="whether a server with a database keeps it (true)")] = (
        None
    )
    previous_response_id: Id | None = None
    conversation: Annotated[Id | None, BeforeValidator(_conversation)] = None
    metadata: Metadata = Field(default={})
    include: list[str] = Field(default=[])

    def chat(self) -> ChatBody:
        """Return the chat that is asked for. Raises RequestError."""
        extra = self.model_extra or {}
        refused = next((name for name in REFUSED if extra.get(name)), None)
        if refused is not None:
            raise RequestError(REFUSED[refused], param=refused, code="unsupported_parameter")
        if extra.get("top_logprobs") or "message.output_text.logprobs" in self.include:
            raise RequestError(
                "responses have no logprobs here: ask /v1/chat/completions for them",
                param="top_logprobs" if extra.get("top_logprobs") else "include",
                code="unsupported_parameter",
            )
        passed_on = {name: value for name, value in extra.items() if name not in NOT_PASSED_ON}
        fields = {
            **passed_on,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            **{
                name: getattr(self, name)
                for name in ("temperature", "top_p")
                if name in self.model_fields_set
            },
            "tools": [chat_tool(*own) for own in own_tools(self.tools)],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format(),
            "reasoning_effort": self.reasoning.effort,
        }
        return checked(AgentChat, fields)

    def ignored(self, *, is_stored: bool) -> tuple[str, ...]:
        """Return the fields without an effect that the chat does not know of."""
        names = [name for name in self.model_extra or {} if name in NOT_PASSED_ON]
        names += ["include"] if self.include else []
        names += ["store"] if self.store and not is_stored else []
        return tuple(names)

    def _response_format(self) -> dict[str, Any]:
        wanted = self.text.format
        if wanted.get("type") != "json_schema":
            return wanted
        return {"type": "json_schema", "json_schema": {key: wanted[key] for key in wanted if key != "type"}}

    def _messages(self) -> list[dict[str, Any]]:
        """Return the messages; calls join the assistant's text that they follow, and each other."""
        turns: list[dict[str, Any]] = []
        if self.instructions is not None:
            turns.append({"role": "system", "content": self.instructions})
        for item in self.input:
            match item.type:
                case "message":
                    turns.append({"role": item.role, "content": item.parts()})
                case kind if kind.endswith("_output"):
                    turns.append({"role": "tool", "tool_call_id": item.call_id, "content": item.parts()})
                case kind if kind.endswith("_call") and item.call_id is not None:
                    if not turns or turns[-1]["role"] != "assistant":
                        turns.append({"role": "assistant"})
                    made = {"id": item.call_id, "function": item.called()}
                    turns[-1].setdefault("tool_calls", []).append(made)
                case _:
                    pass
        return turns


def renamed(error: RequestError) -> RequestError:
    """Return an error of the chat in the field names of the response."""
    param = error.param or ""
    name = next((name for name in CHAT_NAMES if param.startswith(name)), None)
    if name is None:
        return error
    message = str(error).replace(name, CHAT_NAMES[name])
    there = CHAT_NAMES[name] + param.removeprefix(name) if name != "messages" else CHAT_NAMES[name]
    return RequestError(message, param=there, status=error.status, code=error.code)
