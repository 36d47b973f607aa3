"""POST /v1/responses: OpenAI's Responses API, over the same requests as chats."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

from tidemill.cluster.edge.apis.json_bytes import event, json_bytes
from tidemill.cluster.edge.apis.reply import Reply, Writer
from tidemill.cluster.edge.apis.responses_body import ResponsesBody, renamed
from tidemill.cluster.edge.apis.responses_events import Output, Status
from tidemill.cluster.edge.apis.responses_storage import Storage, with_context
from tidemill.cluster.edge.apis.responses_tools import hosted, names_of
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.caller import Caller
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.workers.messages import FinishReason, RequestError


async def responses(edge: EdgeContext, model: EdgeModel, body: ResponsesBody, caller: Caller) -> Reply:
    """Answer with items (reasoning, message, function_call), streamed or whole. With a database it is stored,
    unless `store` is false, and may continue what is stored."""
    unserved = edge.limits.left_out(list(hosted(body.tools)))
    body, storage = await with_context(edge.records, body, caller.tenant, edge.sources.new_id)
    is_stored = storage is not None and storage.keeps_body
    try:
        job = await model.intake.chat(body.chat(), caller)
    except RequestError as error:
        raise renamed(error) from None
    job = replace(job, ignored=(*job.ignored, *body.ignored(is_stored=is_stored), *unserved))
    name = edge.sources.new_id()
    output = Output(name, names_of(body.tools))
    created_s = int(edge.sources.unix_time_s())
    writer = _Items(model.name, f"resp_{name}", body, created_s, output, job, storage)
    return Reply(model=model, job=job, kind="responses", id=writer.id, writer=writer, streams=body.stream)


class _Items(Writer):
    """Writes one response: numbered events, or the whole."""

    def __init__(
        self,
        model: str,
        reply_id: str,
        body: ResponsesBody,
        created_s: int,
        output: Output,
        job: PreparedRequest,
        storage: Storage | None,
    ) -> None:
        super().__init__(UsageCounter(job))
        self._storage = storage
        self._sampling = job.requests[0].sampling
        self.id = reply_id
        self._model = model
        self._body = body
        self._created_s = created_s
        self._output = output
        self._finish: FinishReason | None = None
        self._reasoning_tokens = 0
        self._sent = 0  # events

    def opening(self) -> Iterable[bytes]:
        if not self._body.stream:
            return ()
        begun = self._response("in_progress")
        kinds = ("created", "in_progress")
        return [self._event({"type": f"response.{kind}", "response": begun}) for kind in kinds]

    def grow(self, increment: Increment) -> Iterable[bytes]:
        events = list(self._output.add(increment.parts))
        if self._output.reasons:
            self._reasoning_tokens += increment.growth.num_tokens
        if increment.growth.finish is not None:
            self._finish = increment.growth.finish
            events += self._output.end(self._status())
        return [self._event(body) for body in events] if self._body.stream else ()

    def error(self, body: Mapping[str, object]) -> Iterable[bytes]:
        failed = self._response("failed", _error(body))
        return (self._event({"type": "response.failed", "response": failed}),)

    async def close(self) -> Iterable[bytes]:
        status = self._status()
        whole = self._response(status)
        if self._storage is not None:
            await self._storage.keep(self.id, whole)
        if not self._body.stream:
            return (json_bytes(whole),)
        return (self._event({"type": f"response.{status}", "response": whole}),)

    def _event(self, body: Json) -> bytes:
        numbered = event({**body, "sequence_number": self._sent}, str(body["type"]))
        self._sent += 1
        return numbered

    def _status(self) -> Status:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str, error: object = None) -> Json:
        body = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._model,
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "conversation": body.conversation and {"id": body.conversation},
            "background": False,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": self._storage is not None and self._storage.keeps_body,
            "temperature": self._sampling.temperature,
            "text": {"format": body.text.format},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools],
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> Json:
        usage = self.tally.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _error(body: Mapping[str, object]) -> Json:
    """Return the error object of a response."""
    error = cast("dict[str, object]", body["error"])
    return {"code": error["code"] or "server_error", "message": error["message"]}


def _choice(body: ResponsesBody) -> object:
    """Return the tool choice as the client wrote it."""
    match body.tool_choice:
        case {"function": {"name": name}}:
            return {"type": "function", "name": name}
        case word:
            return word
