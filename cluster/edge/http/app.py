"""The HTTP application: its paths. It knows a cluster only through the Services of its models.

body --intake--> PreparedRequest --answers--> Increments --replies--> chunks or one JSON object
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi import Path as InPath
from starlette.responses import JSONResponse, Response

from tidemill import __version__
from tidemill.cluster.edge.chat.request.hints import SALT_FORM
from tidemill.cluster.edge.chat.request.params import session_of
from tidemill.cluster.edge.http.connection import BodyWriter, body_writer_of
from tidemill.cluster.edge.http.dashboard import add_page_routes
from tidemill.cluster.edge.http.errors import add_error_replies
from tidemill.cluster.edge.http.memory import BudgetBody, memory_of
from tidemill.cluster.edge.http.middleware import EdgeMiddleware, JsonRoute
from tidemill.cluster.edge.http.openapi import describe
from tidemill.cluster.edge.http.replies import (
    ChunkEvents,
    Kind,
    ReplyHead,
    large_json,
    opening_chunk,
    whole_reply,
)
from tidemill.cluster.edge.http.responses import add_responses_routes
from tidemill.cluster.edge.http.stream import CLIENT_CLOSED_REQUEST, DONE, EventStream, event, while_connected
from tidemill.cluster.edge.http.support import add_support_routes
from tidemill.cluster.edge.http.tokenize import add_token_routes
from tidemill.cluster.edge.http.workers import add_member_routes, add_worker_routes
from tidemill.cluster.edge.requests.answers import Increment, IncrementSink
from tidemill.cluster.edge.requests.bodies import ChatBody, CompletionBody, PrefixBody, StreamOptions
from tidemill.cluster.edge.requests.caller import caller_of
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.errors import error_of
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.recent_requests import RequestIdentity, add_recent_routes
from tidemill.cluster.edge.requests.usage import Json, UsageCounter
from tidemill.cluster.metrics.exposition import CONTENT_TYPE, exposition
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved


def app_of(context: EdgeContext) -> FastAPI:
    """Return the OpenAI API over the models of a context, with /tokenize, /health, /metrics, /cluster,
    /version and /docs."""
    edge = Edge(context)
    app = FastAPI(title="Tidemill", version=__version__, docs_url=None, redoc_url=None)
    app.router.route_class = JsonRoute
    app.add_middleware(
        EdgeMiddleware,
        new_id=context.sources.new_id,
        count=context.metrics.count_error,
        limits=context.limits,
        keys=context.keys,
        stop_reason=context.stop_reason,
    )
    add_error_replies(app, context.metrics.count_error)
    app.add_api_route("/v1/chat/completions", edge.chat, methods=["POST"])
    app.add_api_route("/v1/completions", edge.completions, methods=["POST"])
    app.add_api_route("/v1/prefixes", edge.retain_prefix, methods=["POST"])
    app.add_api_route("/v1/prefixes/{name}", edge.release_prefix, methods=["DELETE"])
    app.add_api_route("/v1/models", edge.models)
    app.add_api_route("/v1/models/{name:path}", edge.model)
    add_responses_routes(app, context)
    add_token_routes(app, context.models)
    for path in ("/reset_prefix_cache", "/flush_cache"):
        app.add_api_route(path, edge.reset_prefix_cache, methods=["POST"])
    for path in ("/health", "/health/ready"):
        app.add_api_route(path, edge.health)
    for path in ("/health/live", "/ping"):
        app.add_api_route(path, edge.alive)
    app.add_api_route("/load", edge.load)
    app.add_api_route("/cluster", edge.cluster)
    app.add_api_route("/cluster/history", edge.history)
    app.add_api_route("/cluster/memory", edge.memory)
    app.add_api_route("/cluster/memory", edge.set_budget, methods=["POST"])
    add_worker_routes(app, context.models)
    add_member_routes(app, context.models)
    add_recent_routes(app, context.recent.rows if context.group is None else context.group.rows)
    add_support_routes(app, context)
    add_page_routes(app)
    app.add_api_route("/version", edge.version)
    app.add_api_route("/metrics", edge.metrics)
    app.add_api_route("/metrics", edge.metrics, methods=["HEAD"], include_in_schema=False)
    describe(app)
    return app


PrefixName = Annotated[str, InPath(max_length=64)]
Salt = Annotated[str | None, Query(pattern=SALT_FORM)]


@dataclass(frozen=True, slots=True)
class _CompletionReply:
    """The answer to one HTTP request."""

    model: EdgeModel
    job: PreparedRequest
    head: ReplyHead
    identity: RequestIdentity


class Edge:
    """The endpoints."""

    def __init__(self, context: EdgeContext) -> None:
        self._context = context
        self._models = context.models

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a chat as the assistant, streamed or whole."""
        model = self._models.find(body.model)
        job = await model.intake.chat(body, caller_of(request.headers, self._context.keys))
        return await self._reply(request, model, job, "chat", body.stream_options if body.stream else None)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several, streamed or whole."""
        model = self._models.find(body.model)
        job = await model.intake.completion(body, caller_of(request.headers, self._context.keys))
        return await self._reply(request, model, job, "text", body.stream_options if body.stream else None)

    async def retain_prefix(self, body: PrefixBody, request: Request) -> Response:
        """Compute a prompt for later requests that begin with it, and retain it. Repeat it to renew it."""
        model, sources = self._models.find(body.model), self._context.sources
        job, prefix_id = await model.intake.prefix(body, caller_of(request.headers, self._context.keys))
        request.state.ignored = job.ignored
        identity = RequestIdentity(
            request_id=request.state.request_id,
            reply_id=prefix_id,
            model=model.name,
            kind="prefix",
            client=request.state.client,
            key=request.state.key,
        )
        tally = UsageCounter(job)

        async def compute() -> Response:
            async with aclosing(self._context.answers(model, job, identity)) as increments:
                async for increment in increments:
                    tally.record(increment)
            return JSONResponse(
                {
                    "id": prefix_id,
                    "object": "prefix",
                    "model": model.name,
                    "tokens": len(job.requests[0].tokens),
                    "cached_tokens": tally.cached_tokens(),
                    "retain": body.retained_s,
                    "expires_at": int(sources.unix_time_s() + body.retained_s),
                }
            )

        whole = await while_connected(request.receive, compute())
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else whole

    async def release_prefix(self, name: PrefixName, request: Request, cache_salt: Salt = None) -> Json:
        """Retain a prefix no longer. `cache_salt` is that of its request."""
        tenant = caller_of(request.headers, self._context.keys).tenant_with(cache_salt)
        session = session_of(tenant, "prefix", name)
        await asyncio.gather(*(model.service.release(tenant, session) for model in self._models))
        return {"id": name, "object": "prefix", "deleted": True}

    async def models(self) -> Json:
        """List the models."""
        return {"object": "list", "data": self._models.listed()}

    async def model(self, name: str) -> Json:
        """Describe one model."""
        return self._models.find(name).json(name)

    async def health(self) -> Json:
        """Return 200 when some worker can answer."""
        if not await self._models.can_answer():
            raise Unserved("no decode worker is ready")
        return {"status": "ok"}

    async def alive(self) -> Json:
        """Return 200 as long as the edge answers at all."""
        return {"status": "ok"}

    async def load(self) -> Json:
        """Return the number of answers in progress at this port."""
        group = self._context.group
        return {
            "server_load": self._context.open_answers.held if group is None else await group.open_answers()
        }

    async def cluster(self) -> Json:
        """Return every worker: its facts, its load, its memory."""
        fleets = await self._models.fleets()
        return {
            "models": [model.json() for model in self._models],
            "frontend": {"pid": os.getpid(), "version": __version__},
            "workers": [
                {"model": name, **asdict(worker)}
                for name, status in fleets.items()
                for worker in status.workers
            ],
        }

    async def history(self) -> Json:
        """Return the last fifteen minutes of each model, and of all of them under the empty name: tokens per
        second, hit ratio, percentiles of latencies, memory by class, starts and ends of workers."""
        return self._context.history.json()

    async def memory(self) -> Json:
        """Return the memory of every worker: its budget, who set it, and its use."""
        return memory_of(await self._models.fleets())

    async def set_budget(self, body: BudgetBody) -> Json:
        """Give a worker another memory budget, or return it to the broker. It takes effect within seconds;
        the reply is the memory of every worker now."""
        await self._models.order(lambda service: service.set_budget(body.worker, body.budget))
        return memory_of(await self._models.fleets())

    async def reset_prefix_cache(self) -> Json:
        """Make new requests find no cached prefix of any model, for measurements."""
        await asyncio.gather(*(model.service.reset_prefix_cache() for model in self._models))
        return {"status": "ok"}

    async def version(self) -> Json:
        """Return the version of the server."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Return metrics in the text format of Prometheus."""
        try:
            fleets = await self._models.fleets()
        except TidemillError:
            fleets = {}  # the edge's own metrics matter most when no router answers
        group = self._context.group
        summed = None if group is None else await group.samples()
        return Response(exposition(self._context.metrics, fleets, summed), media_type=CONTENT_TYPE)

    async def _reply(
        self,
        request: Request,
        model: EdgeModel,
        job: PreparedRequest,
        kind: Kind,
        stream: StreamOptions | None,
    ) -> Response:
        request.state.ignored = job.ignored
        sources = self._context.sources
        head = ReplyHead(
            kind=kind,
            reply_id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{sources.new_id()}",
            created_s=int(sources.unix_time_s()),
            model=model.name,
            piece=model.tokenizer.piece,
            prompts=[sent.tokens for sent in job.requests] if job.token_ids else None,
        )
        identity = RequestIdentity(
            request_id=request.state.request_id,
            reply_id=head.reply_id,
            model=model.name,
            kind=kind,
            client=request.state.client,
            key=request.state.key,
        )
        reply = _CompletionReply(model, job, head, identity)
        if stream is not None:
            return EventStream(self._chunks(reply, stream, body_writer_of(request.scope)))
        whole = await while_connected(request.receive, self._whole(reply))
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else whole

    def _answers(
        self, reply: _CompletionReply, sink: IncrementSink | None = None
    ) -> AsyncGenerator[Increment]:
        return self._context.answers(reply.model, reply.job, reply.identity, sink)

    async def _whole(self, reply: _CompletionReply) -> Response:
        job, head = reply.job, reply.head
        tally = UsageCounter(job)
        choices: list[list[Increment]] = [[] for _ in job.requests]
        async with aclosing(self._answers(reply)) as increments:
            async for increment in increments:
                tally.record(increment)
                choices[increment.choice].append(increment)
        if not (job.logprobs or job.prompt_logprobs or job.token_ids):
            return JSONResponse(whole_reply(head, job, choices, tally.usage()))
        return await large_json(await asyncio.to_thread(whole_reply, head, job, choices, tally.usage()))

    async def _chunks(
        self, reply: _CompletionReply, options: StreamOptions, writer: BodyWriter | None
    ) -> AsyncGenerator[bytes]:
        """Yield server-sent events but those that `writer` writes itself. After the first, an error is an
        event too, because the status line has been sent."""
        job, head = reply.job, reply.head
        tally = UsageCounter(job)
        chunks = ChunkEvents(head, options, tally)
        started = False

        def write(increment: Increment) -> bool:
            if writer is None or not writer.can_write():
                return False
            tally.record(increment)
            writer.write(chunks.event(increment))
            return True

        try:
            async with aclosing(self._answers(reply, None if writer is None else write)) as increments:
                async for increment in increments:
                    if head.kind == "chat" and not started:
                        for index in range(len(job.requests)):  # in order, which the openai SDK relies on
                            yield event(opening_chunk(head, index))
                            started = True
                    tally.record(increment)
                    yield chunks.event(increment)
                    started = True
        except Exception as error:
            if not started:
                raise
            status, body = error_of(error)
            self._context.metrics.count_error(status)
            yield event(body, "error")
            if not isinstance(error, TidemillError):
                raise
            return
        if options.include_usage:
            yield event({**head.chunk([]), "usage": tally.usage()})
        yield DONE
