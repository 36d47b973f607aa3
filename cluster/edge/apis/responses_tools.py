"""The tools of a response: functions, functions in a namespace, and tools with a free text.

A chat knows functions alone. A function of a namespace is offered by both names, a custom tool as a function
of one text, and calls of them have their own names and forms again. Tools that run on other servers, like
`web_search`, are left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, model_validator

from tidemill.cluster.edge.chat.request.hints import CacheControl
from tidemill.cluster.edge.chat.request.tools import FunctionName

SEPARATOR = "__"


class FlatTool(BaseModel, strict=True, extra="ignore"):
    """A tool without a nested object: a function, a `custom` tool, or a `namespace` of them."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: dict[str, Any] | None = None
    tools: list["FlatTool"] | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _named(self) -> "FlatTool":
        if self.type in ("function", "custom", "namespace") and self.name is None:
            raise ValueError(f"a {self.type} needs a name")
        return self


@dataclass(frozen=True, slots=True)
class ToolName:
    """The name of a tool as the client has it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def own_tools(tools: Sequence[FlatTool], space: str | None = None) -> Iterator[tuple[ToolName, FlatTool]]:
    """Yield the tools that the client runs."""
    for tool in tools:
        match tool:
            case FlatTool(type="namespace", name=str(name), tools=inner):
                yield from own_tools(inner or (), name)
            case FlatTool(type="function" | "custom" as kind, name=str(name)):
                yield ToolName(name, space, kind == "custom"), tool
            case _:
                pass


def hosted(tools: Sequence[FlatTool]) -> Iterator[str]:
    """Yield the types of tools that run on other servers."""
    for tool in tools:
        if tool.type == "namespace":
            yield from hosted(tool.tools or ())
        elif tool.type not in ("function", "custom"):
            yield tool.type


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function as a chat has it."""
    return name if namespace is None else f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"


def names_of(tools: Sequence[FlatTool]) -> Mapping[str, ToolName]:
    """Return the names of the client's tools by those of a chat."""
    return {flat_name(name.name, name.namespace): name for name, _ in own_tools(tools)}


def chat_tool(name: ToolName, tool: FlatTool) -> dict[str, object]:
    """Return a tool in the form of a chat."""
    function: dict[str, object] = {
        "name": flat_name(name.name, name.namespace),
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    if name.is_custom:
        function |= _free_text(tool)
    given = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": given, "cache_control": tool.cache_control}


def _free_text(tool: FlatTool) -> dict[str, object]:
    match tool.format:
        case {"type": "grammar", "syntax": str(syntax), "definition": str(definition)}:
            rule = f"\n\nThe input follows this {syntax} grammar:\n{definition}"
        case _:
            rule = ""
    return {
        "description": f"{tool.description or ''}{rule}".strip() or None,
        "parameters": {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        },
    }
