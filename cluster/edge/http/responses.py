"""POST /v1/responses: the stateless core of OpenAI's Responses API, over the same requests as chats."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from tidemill.cluster.edge.http.responses_body import ResponsesBody, renamed
from tidemill.cluster.edge.http.responses_events import Output, Status
from tidemill.cluster.edge.http.stream import CLIENT_CLOSED_REQUEST, EventStream, event, while_connected
from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.caller import caller_of
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.errors import error_of
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.recent_requests import RequestIdentity
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import FinishReason, RequestError


def add_responses_routes(app: FastAPI, context: EdgeContext) -> None:
    """Add POST /v1/responses."""

    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer with items (reasoning, message, function_call), streamed or whole. Nothing is stored."""
        model = context.models.find(body.model)
        try:
            job = await model.intake.chat(body.chat(), caller_of(request.headers, context.keys))
        except RequestError as error:
            raise renamed(error) from None
        request.state.ignored = (*job.ignored, *body.ignored())
        name = context.sources.new_id()
        identity = RequestIdentity(
            request_id=request.state.request_id,
            reply_id=f"resp_{name}",
            model=model.name,
            kind="responses",
            client=request.state.client,
            key=request.state.key,
        )
        created_s = int(context.sources.unix_time_s())
        reply = _ResponseReply(
            context, model, job, identity, body, created_s, Output(name), UsageCounter(job)
        )
        if body.stream:
            return EventStream(reply.events())
        whole = await while_connected(request.receive, reply.whole())
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else JSONResponse(whole)

    app.add_api_route("/v1/responses", responses, methods=["POST"])


@dataclass(slots=True)
class _ResponseReply:
    """One response, from its request to its end."""

    context: EdgeContext
    model: EdgeModel
    job: PreparedRequest
    identity: RequestIdentity
    body: ResponsesBody
    created_s: int
    output: Output
    tally: UsageCounter
    finish: FinishReason | None = None
    reasoning_tokens: int = 0

    async def whole(self) -> Json:
        async with aclosing(self._answer()) as increments:
            async for increment in increments:
                self._add(increment)
        return self._response(self._status())

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield numbered server-sent events. After the first, an error is an event too."""
        sent = 0
        try:
            async with aclosing(self._answer()) as increments:
                async for increment in increments:
                    opening = [] if sent else self._opening()  # before its first item
                    for body in (*opening, *self._add(increment)):
                        yield event({**body, "sequence_number": sent}, str(body["type"]))
                        sent += 1
            status = self._status()
            last: Json = {
                "type": f"response.{status}",
                "response": self._response(status),
                "sequence_number": sent,
            }
        except Exception as error:
            if not sent:
                raise
            status_code, body = error_of(error)
            self.context.metrics.count_error(status_code)
            failed = self._response("failed", _error(body))
            last = {"type": "response.failed", "response": failed, "sequence_number": sent}
            yield event(last, "response.failed")
            if not isinstance(error, TidemillError):
                raise
            return
        yield event(last, str(last["type"]))

    def _answer(self) -> AsyncGenerator[Increment]:
        return self.context.answers(self.model, self.job, self.identity)

    def _opening(self) -> list[Json]:
        begun = self._response("in_progress")
        return [{"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")]

    def _add(self, increment: Increment) -> list[Json]:
        """Add an increment to the response, and return the events of a stream for it."""
        self.tally.record(increment)
        events = list(self.output.add(increment.parts))
        if self.output.reasons:
            self.reasoning_tokens += increment.growth.num_tokens
        if increment.growth.finish is not None:
            self.finish = increment.growth.finish
            events += self.output.end(self._status())
        return events

    def _status(self) -> Status:
        return "incomplete" if self.finish == "length" else "completed"

    def _response(self, status: str, error: object = None) -> Json:
        body = self.body
        return {
            "id": self.identity.reply_id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.model.name,
            "output": list(self.output.items),
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.text.format},
            "tool_choice": _choice(body),
            "tools": [tool.model_dump() for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> Json:
        usage = self.tally.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
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
