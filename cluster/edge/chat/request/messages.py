"""The messages of a chat, as clients write them and as chat templates read them.

What a client repeats of earlier turns is rendered, not judged: any model may have written it.
"""

import json
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationInfo,
    model_validator,
)

from tidemill.cluster.edge.chat.request.hints import Mark, marks_of
from tidemill.cluster.edge.chat.request.json_text import parse_json
from tidemill.cluster.edge.chat.request.params import absent_if_null, valid_text
from tidemill.cluster.edge.chat.text import Message
from tidemill.workers.messages import RequestError

UNREAD = "[{}: this model reads text alone]"
"""The text of an image or another part in the output of a tool. A refusal would end the conversation, which
repeats it."""

CALLS_MAX = 128
ARGUMENTS_BRACKETS_MAX = 1 << 17
ARGUMENTS_COMMAS_MAX = 1 << 18
"""The most opening brackets and commas in the arguments of all calls of a chat, which hold the interpreter
while they are parsed: each limit alone takes some 10 ms."""


def _content(value: object) -> object:
    """Join a list of text parts to one text; an earlier refusal is text as well."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in cast("list[Any]", value):
        match part:
            case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(
                    'only text is supported: give a string or parts of {"type": "text", "text": ...}'
                )
    return "".join(texts)


Content = Annotated[str, BeforeValidator(_content), AfterValidator(valid_text)]


def _arguments(value: object) -> dict[str, Any] | str:
    """Parse the arguments: clients send a text, templates want an object. Text that is none stays a text: a
    client repeats what a model wrote."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    try:
        parsed = parse_json(text if text.strip() else "{}") if isinstance(value, str) else value
    except (ValueError, RecursionError, RequestError):
        return text
    if parsed is None:
        return {}
    return cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else text


def _items(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _field(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


def bounded_arguments(messages: object) -> object:
    """Return the messages of a chat before they are checked. Raises ValueError."""
    brackets = commas = 0
    for message in _items(messages):
        for call in _items(_field(message, "tool_calls")):
            text = _field(_field(call, "function"), "arguments")
            if isinstance(text, str):
                brackets += text.count("{") + text.count("[")
                commas += text.count(",")
    if brackets > ARGUMENTS_BRACKETS_MAX:
        raise ValueError(
            f"{brackets:,} objects and lists in arguments: send at most {ARGUMENTS_BRACKETS_MAX:,}"
        )
    if commas > ARGUMENTS_COMMAS_MAX:
        raise ValueError(f"{commas:,} commas in arguments: send at most {ARGUMENTS_COMMAS_MAX:,}")
    return messages


class CalledFunction(BaseModel, strict=True, extra="ignore"):
    name: Annotated[str, AfterValidator(valid_text)]
    arguments: Annotated[dict[str, Any] | str, PlainValidator(_arguments)] = {}


class MadeCall(BaseModel, strict=True, extra="ignore"):
    """A call of the assistant in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def shown(self) -> dict[str, Any]:
        """Return it as chat templates want it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**({} if self.id is None else {"id": self.id}), "type": self.type, "function": function}


def _not_none(content: str | None, info: ValidationInfo) -> str | None:
    if content is None and info.data.get("role") not in ("assistant", "tool"):
        raise ValueError("is needed: only an assistant and a tool may leave it out")
    return content


def _today(value: object) -> object:
    """Return the fields of a message, with today's names for older ones. A null field counts as absent."""
    if not isinstance(value, dict):
        return value
    message = cast("dict[str, object]", absent_if_null(cast("dict[str, object]", value)))
    if message.get("role") == "function":
        message["role"] = "tool"
    if isinstance(reasoning := message.get("reasoning"), str):
        message.setdefault("reasoning_content", reasoning)
    if "function_call" in message:
        message.setdefault("tool_calls", [{"function": message["function_call"]}])
    return message


class ChatMessage(BaseModel, strict=True, extra="ignore"):
    """One message of a chat. Other fields that clients send (audio, annotations, ...) are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: Annotated[str, AfterValidator(valid_text)] | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=CALLS_MAX)] | None = None
    tool_call_id: Annotated[str, AfterValidator(valid_text)] | None = None
    reasoning_content: Annotated[str, AfterValidator(valid_text)] | None = None
    content: Annotated[Content | None, AfterValidator(_not_none)] = Field(default=None, validate_default=True)

    marks: ClassVar[tuple[Mark, ...]] = ()
    """The ends of parts with cache_control, which `content` does not show.

    A message that has some has them in place of these, because a private attribute of pydantic takes
    longer than the rest of a short message.
    """

    _names = model_validator(mode="before")(_today)

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, fields: object, check: ModelWrapValidatorHandler[Self]) -> Self:
        message = check(fields)
        if marks := marks_of(_field(fields, "content")):
            vars(message)["marks"] = marks
        return message

    def message(self) -> Message:
        # Arguments are passed as they are: a copy of large ones would take long.
        fields = {
            "name": self.name,
            "tool_calls": [call.shown() for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        more = {field: value for field, value in fields.items() if value is not None}
        return Message("system" if self.role == "developer" else self.role, self.content or "", more)
