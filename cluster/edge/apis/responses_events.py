"""The growing output of a response: items of reasoning, text and calls, and their events.

    item added, part added, delta, delta, ..., text done, part done, item done        reasoning and text
    item added, delta, delta, ..., arguments done, item done                          calls

One item is open at a time. The streamed deltas add up to the whole response.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from tidemill.cluster.edge.apis.json_bytes import object_of
from tidemill.cluster.edge.apis.responses_tools import ToolName
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.cluster.edge.requests.usage import Json

Kind = Literal["reasoning", "message"]
Status = Literal["completed", "incomplete"]

PREFIX: dict[Kind, str] = {"reasoning": "rs", "message": "msg"}
TEXT: dict[Kind, str] = {"reasoning": "reasoning_text", "message": "output_text"}
ARGUMENTS = "response.function_call_arguments"
INPUT = "response.custom_tool_call_input"


@dataclass(slots=True)
class Open:
    """The open item, which is the last one of the output."""

    kind: Kind
    item_id: str
    texts: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class OpenCall:
    """The open call. That of a custom tool has one text, which is known at its end."""

    item: Json  # without its arguments
    is_custom: bool
    arguments: list[str] = field(default_factory=list[str])


class Output:
    """The output; `name` is the common part of the items' ids. `tools` has the client's names of tools."""

    def __init__(self, name: str, tools: Mapping[str, ToolName] = MappingProxyType({})) -> None:
        self.items: list[Json] = []  # closed ones
        self._name = name
        self._tools = tools
        self._open: Open | OpenCall | None = None

    @property
    def reasons(self) -> bool:
        """Return whether the next text is reasoning, as far as is known."""
        return isinstance(self._open, Open) and self._open.kind == "reasoning"

    def add(self, parts: Sequence[Part]) -> Iterator[Json]:
        """Yield the events of more of the answer."""
        for part in parts:
            match part:
                case ReasoningText(text):
                    yield from self._grow("reasoning", text)
                case Text(text):
                    yield from self._grow("message", text)
                case Call():
                    yield from self._call(part)

    def end(self, status: Status) -> Iterator[Json]:
        """Yield the last events; an answer without text gets an empty message."""
        if not self.items and self._open is None:
            yield from self._grow("message", "")
        yield from self._close(status)

    def _grow(self, kind: Kind, text: str) -> Iterator[Json]:
        if not isinstance(self._open, Open) or self._open.kind != kind:
            yield from self._close("completed")
            self._open = Open(kind, self._id(PREFIX[kind]))
            yield self._of_item("response.output_item.added", _item(self._open, [], "in_progress"))
            yield self._of_text("response.content_part.added", self._open, part=_part(kind, ""))
        if text:
            self._open.texts.append(text)
            more = {"logprobs": list[object]()} if kind == "message" else {}
            yield self._of_text(f"response.{TEXT[kind]}.delta", self._open, delta=text, **more)

    def _close(self, status: Status) -> Iterator[Json]:
        match self._open:
            case None:
                return
            case Open() as opened:
                text = "".join(opened.texts)
                more = {"logprobs": list[object]()} if opened.kind == "message" else {}
                yield self._of_text(f"response.{TEXT[opened.kind]}.done", opened, text=text, **more)
                yield self._of_text("response.content_part.done", opened, part=_part(opened.kind, text))
                item = _item(opened, [_part(opened.kind, text)], status)
            case OpenCall(is_custom=True) as opened:
                text = _input("".join(opened.arguments))
                yield self._of_call(f"{INPUT}.delta", opened, {"delta": text})
                yield self._of_call(f"{INPUT}.done", opened, {"input": text})
                item = {**opened.item, "input": text, "status": status}
            case OpenCall() as opened:
                arguments: Json = {"arguments": "".join(opened.arguments)}
                yield self._of_call(f"{ARGUMENTS}.done", opened, {"name": opened.item["name"], **arguments})
                item = {**opened.item, **arguments, "status": status}
        yield self._of_item("response.output_item.done", item)
        self.items.append(item)
        self._open = None

    def _call(self, call: Call) -> Iterator[Json]:
        if call.name is not None:
            yield from self._close("completed")
            tool = self._tools.get(call.name, ToolName(call.name))
            item: Json = {
                "id": self._id("ctc" if tool.is_custom else "fc"),
                "type": "custom_tool_call" if tool.is_custom else "function_call",
                "call_id": f"call_{self._name}_{call.index}",
                "name": tool.name,
                **({} if tool.namespace is None else {"namespace": tool.namespace}),
            }
            self._open = OpenCall(item, tool.is_custom)
            empty = "input" if tool.is_custom else "arguments"
            yield self._of_item("response.output_item.added", {**item, "status": "in_progress", empty: ""})
        assert isinstance(self._open, OpenCall), "pieces of a call come opened after another"
        if call.arguments:
            self._open.arguments.append(call.arguments)
            if self._open.is_custom:
                return
            yield self._of_call(f"{ARGUMENTS}.delta", self._open, {"delta": call.arguments})

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self.items)}"

    def _of_item(self, kind: str, item: Json) -> Json:
        return {"type": kind, "output_index": len(self.items), "item": item}

    def _of_call(self, kind: str, opened: OpenCall, more: Json) -> Json:
        return {"type": kind, "item_id": opened.item["id"], "output_index": len(self.items), **more}

    def _of_text(self, kind: str, opened: Open, **more: object) -> Json:
        position: Json = {"item_id": opened.item_id, "output_index": len(self.items), "content_index": 0}
        return {"type": kind, **position, **more}


def _input(arguments: str) -> str:
    """Return the text of a call of a custom tool; all that the model wrote if there is none."""
    text = (object_of(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


def _item(opened: Open, content: Iterable[Json], status: str) -> Json:
    match opened.kind:
        case "reasoning":
            more: Json = {"summary": []}
        case "message":
            more = {"role": "assistant"}
    return {"id": opened.item_id, "type": opened.kind, "status": status, "content": list(content), **more}


def _part(kind: Kind, text: str) -> Json:
    more: Json = {"annotations": [], "logprobs": []} if kind == "message" else {}
    return {"type": TEXT[kind], "text": text, **more}
