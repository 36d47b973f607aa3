"""The tools of a chat: those that a client offers, and those that the model must call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, PlainValidator, WithJsonSchema

from tidemill.cluster.edge.chat.request.hints import CacheControl
from tidemill.workers.messages import RequestError

TOOLS_MAX = 128
CHOICE_FORMS = (
    'give none, auto, required, {"type": "function", "function": {"name": ...}}, or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
)


FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(BaseModel, strict=True, extra="ignore"):
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel, strict=True, extra="ignore"):
    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None

    def shown(self) -> dict[str, Any]:
        """Return it as chat templates want it."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_none=True, exclude={"strict"}),
        }


@dataclass(frozen=True, slots=True)
class Named:
    """The function of this name must be called."""

    name: str


@dataclass(frozen=True, slots=True)
class Allowed:
    """The functions of these names may, or one of them must be called."""

    mode: Literal["auto", "required"]
    names: frozenset[str]


def _choice(value: object) -> str | Named | Allowed:
    match cast("Any", value):
        case "none" | "auto" | "required" as word:
            return str(word)
        case {"type": "function", "function": {"name": str(name)}}:
            return Named(name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}:
            if mode not in ("auto", "required"):
                raise ValueError(CHOICE_FORMS)
            return Allowed(mode, frozenset(map(_name_of, tools)))
        case _:
            raise ValueError(CHOICE_FORMS)


def _name_of(tool: object) -> str:
    match cast("Any", tool):
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise ValueError(CHOICE_FORMS)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Named | Allowed,
    PlainValidator(_choice),
    WithJsonSchema({"description": CHOICE_FORMS, "type": ["string", "object"]}),
]


def offered(
    tools: Sequence[Tool], choice: Literal["none", "auto", "required"] | Named | Allowed
) -> list[Tool]:
    """Return the tools that may be called. Raises RequestError."""
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
