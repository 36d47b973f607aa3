"""The messages of a chat, as clients write them and as chat templates read them."""

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationInfo,
    model_validator,
)

from tidemill.cluster.edge.chat.request.hints import Mark, marks_of
from tidemill.cluster.edge.chat.request.json_text import parse_json
from tidemill.cluster.edge.chat.request.params import absent_if_null, valid_text
from tidemill.cluster.edge.chat.text import Message

CALLS_MAX = 128
ARGUMENTS_BRACKETS_MAX = 1 << 17
ARGUMENTS_COMMAS_MAX = 1 << 18
"""The most opening brackets and commas in the arguments of all calls of a chat, which hold the interpreter
while they are parsed: each limit alone takes some 10 ms."""


def _content(value: object) -> object:
    """Join a list of text parts to one text."""
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for part in cast("list[object]", value):
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(
                    'only text is supported: give a string or parts of {"type": "text", "text": ...}'
                )
    return "".join(texts)


Content = Annotated[str, BeforeValidator(_content), AfterValidator(valid_text)]


def _arguments(value: object) -> dict[str, Any]:
    """Parse the arguments: clients send a text, templates want an object."""
    if isinstance(value, str):
        try:
            value = parse_json(value or "{}")
        except (ValueError, RecursionError):
            raise ValueError("give the text of a JSON object, as it came") from None
    if not isinstance(value, dict):
        raise ValueError("give the text of a JSON object, as it came")  # noqa: TRY004 - pydantic's
    return cast("dict[str, Any]", value)


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


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: Annotated[str, AfterValidator(valid_text)]
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)] = {}


class MadeCall(BaseModel):
    """A call of the assistant in an earlier turn."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def shown(self) -> dict[str, Any]:
        """Return it as chat templates want it."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**({} if self.id is None else {"id": self.id}), "type": self.type, "function": function}


def _not_none(content: str | None, info: ValidationInfo) -> str | None:
    calls = info.data.get("role") == "assistant" and info.data.get("tool_calls")
    if content is None and not calls:
        raise ValueError("is needed: only an assistant that calls tools may leave it out")
    return content


class ChatMessage(BaseModel):
    """One message of a chat. Other fields that clients send (refusal, audio, ...) are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

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

    _nulls = model_validator(mode="before")(absent_if_null)

    @model_validator(mode="wrap")
    @classmethod
    def _marked(cls, fields: object, check: ModelWrapValidatorHandler["ChatMessage"]) -> "ChatMessage":
        message = check(fields)
        if marks := marks_of(_field(fields, "content")):
            vars(message)["marks"] = marks
        return message

    def message(self) -> Message:
        # Arguments are passed as they are: a copy of large ones would take long.
        fields = {
            "name": self.name,
            "tool_calls": None if self.tool_calls is None else [call.shown() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        more = {field: value for field, value in fields.items() if value is not None}
        return Message("system" if self.role == "developer" else self.role, self.content or "", more)
