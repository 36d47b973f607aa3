"""POST /v1/messages: Anthropic's Messages API, over the same requests as chats.

message_start  (content_block_start  content_block_delta ...  content_block_stop) ...
message_delta  message_stop
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from tidemill.cluster.edge.apis.json_bytes import event, json_bytes, object_of
from tidemill.cluster.edge.apis.messages_body import MessagesBody
from tidemill.cluster.edge.apis.reply import Reply, Writer
from tidemill.cluster.edge.chat.output.parts import Call, Part, ReasoningText, Text
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.bodies import TokenizeBody
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter

PATH = "/v1/messages"
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""The types of errors by status; others are invalid requests."""


async def messages(edge: EdgeContext, model: EdgeModel, body: MessagesBody, caller: Caller) -> Reply:
    """Answer with blocks (thinking, text, tool_use), streamed or whole, as Anthropic's API does."""
    hosted = edge.limits.left_out(body.hosted())
    job = await model.intake.chat(body.chat(), caller)
    job = replace(job, ignored=(*job.ignored, *body.ignored(), *hosted))
    writer = _Message(model.name, edge.sources.new_id(), job, streams=body.stream)
    return Reply(model=model, job=job, kind="messages", id=writer.id, writer=writer, streams=body.stream)


async def count_tokens(model: EdgeModel, body: MessagesBody) -> bytes:
    """Count the tokens of the prompt that a message would be answered to."""
    tokens = await model.intake.prompt_of(cast("TokenizeBody", body.chat(TokenizeBody)))
    return json_bytes({"input_tokens": len(tokens)})


def error_reply(status: int, body: Mapping[str, object]) -> dict[str, object]:
    """Return an error in the shape of Anthropic, from one in OpenAI's."""
    error = cast("Mapping[str, object]", body["error"])
    kind = ERROR_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


class _Message(Writer):
    """Writes one message. `_content` holds its blocks so far, of which the last one is open."""

    def __init__(self, model: str, name: str, job: PreparedRequest, *, streams: bool) -> None:
        super().__init__(UsageCounter(job))
        self.id = f"msg_{name}"
        self._name = name
        self._model = model
        self._streams = streams
        self._content: list[dict[str, Any]] = []
        self._call: int | None = None  # of the open block
        self._last: Increment | None = None

    def opening(self) -> Iterable[bytes]:
        return (_event({"type": "message_start", "message": self._message()}),) if self._streams else ()

    def grow(self, increment: Increment) -> Iterable[bytes]:
        self._last = increment
        events = [event for part in increment.parts for event in self._add(part)]
        return map(_event, events) if self._streams else ()

    def error(self, body: Mapping[str, object]) -> Iterable[bytes]:
        error = cast("Mapping[str, object]", body["error"])
        kind = "overloaded_error" if error["code"] == "unserved" else error["type"]
        status = next((status for status, name in ERROR_TYPES.items() if name == kind), 500)
        return (event(error_reply(status, body), "error"),)

    async def close(self) -> Iterable[bytes]:
        reason, sequence = self._stop()
        if not self._streams:
            content = [_whole(block) for block in self._content]
            ended = {"content": content, "stop_reason": reason, "stop_sequence": sequence}
            return (json_bytes({**self._message(), **ended}),)
        ends: list[Json] = [
            *self._end(),
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": self._usage(),
            },
            {"type": "message_stop"},
        ]
        return map(_event, ends)

    def _add(self, part: Part) -> Iterable[Json]:
        """Add a part, and yield its events."""
        match part:
            case ReasoningText(text):
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                self._content[-1]["thinking"] += text
                yield self._delta({"type": "thinking_delta", "thinking": text})
            case Text(text):
                if not text:
                    return
                yield from self._begin("text", {"text": ""})
                self._content[-1]["text"] += text
                yield self._delta({"type": "text_delta", "text": text})
            case Call(index, name, arguments):
                if index != self._call:
                    block: dict[str, Any] = {"id": f"toolu_{self._name}_{index}", "name": name, "input": {}}
                    yield from self._begin("tool_use", block, index)
                    self._content[-1]["arguments"] = ""
                self._content[-1]["arguments"] += arguments
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _begin(self, kind: str, fields: dict[str, Any], call: int | None = None) -> Iterable[Json]:
        """Open a block of this kind, unless the open one is it."""
        if call is None and self._content and self._content[-1]["type"] == kind:
            return
        yield from self._end()
        self._call = call
        block = {"type": kind, **fields}
        self._content.append(dict(block))
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _end(self) -> Iterable[Json]:
        if self._content:
            yield {"type": "content_block_stop", "index": len(self._content) - 1}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _stop(self) -> tuple[str, str | None]:
        """Return the reason for the end, and the stop sequence that it was."""
        assert self._last is not None
        growth = self._last.growth
        if growth.finish == "length":
            return "max_tokens", None
        if isinstance(growth.stop, str):
            return "stop_sequence", growth.stop
        return ("tool_use" if self._last.calls else "end_turn"), None

    def _message(self) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        cached = self.tally.cached_tokens()
        return {
            "input_tokens": self.tally.num_prompt_tokens() - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.tally.num_generated,
            **self.tally.diagnostics(),
        }


def _event(body: Json) -> bytes:
    return event(body, str(body["type"]))


def _whole(block: dict[str, Any]) -> dict[str, Any]:
    """Return a block of a whole message. Arguments that are no object become the only member of one, as they
    will be in the history."""
    if block["type"] != "tool_use":
        return block
    written = block["arguments"]
    found = object_of(written)
    return {
        **{name: block[name] for name in ("type", "id", "name")},
        "input": {"arguments": written} if found is None else found,
    }
