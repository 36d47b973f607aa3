"""The HTTP application: which path does what. Knows the cluster as a Service only.

body --intake--> Job --answers--> Increments --replies--> chunks or one JSON object
"""

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from random import Random

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from tidemill import __version__
from tidemill.cluster.http.answers import Increment, answers
from tidemill.cluster.http.asker import asker_of
from tidemill.cluster.http.boundary import Boundary
from tidemill.cluster.http.bounds import Bound, EdgeLimits
from tidemill.cluster.http.errors import add_error_replies, error_of
from tidemill.cluster.http.intake import Intake, Job
from tidemill.cluster.http.memory import BudgetBody, memory_of
from tidemill.cluster.http.metrics import Metrics, exposition
from tidemill.cluster.http.protocol import ChatBody, CompletionBody, StreamOptions
from tidemill.cluster.http.replies import Head, Json, Kind, Tally, chunk_choice, opening_choice, whole_choice
from tidemill.cluster.http.stream import DONE, EventStream, event, while_connected
from tidemill.cluster.http.workers import add_worker_routes
from tidemill.cluster.service import Service
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.api.answer import Growth
from tidemill.workers.api.text import Tokenizer
from tidemill.workers.messages import Unserved

CLIENT_CLOSED_REQUEST = 499
"""Never sent: the client is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the edge takes from outside: time, ids, and seeds for the requests that bring none."""

    clock_s: Callable[[], float]  # monotonic
    unix_time_s: Callable[[], float]
    new_id: Callable[[], str]
    rng: Random


def build_app(
    service: Service,
    tokenizer: Tokenizer,
    sources: Sources,
    *,
    metrics: Metrics | None = None,
    limits: EdgeLimits | None = None,
) -> FastAPI:
    """The OpenAI API over `service`, with /health, /metrics, /cluster, /version and /docs."""
    metrics = Metrics(sources.clock_s) if metrics is None else metrics
    limits = EdgeLimits() if limits is None else limits
    edge = Edge(service, tokenizer, sources, metrics, Bound(limits.answers_max, "answers"))
    app = FastAPI(title="Tidemill", version=__version__, redoc_url=None)
    app.add_middleware(Boundary, new_id=sources.new_id, count=metrics.count_error, limits=limits)
    add_error_replies(app, metrics.count_error)
    app.add_api_route("/v1/chat/completions", edge.chat, methods=["POST"])
    app.add_api_route("/v1/completions", edge.completions, methods=["POST"])
    app.add_api_route("/v1/models", edge.models)
    app.add_api_route("/v1/models/{name:path}", edge.model)
    app.add_api_route("/health", edge.health)
    app.add_api_route("/cluster", edge.cluster)
    app.add_api_route("/cluster/memory", edge.memory)
    app.add_api_route("/cluster/memory", edge.set_budget, methods=["POST"])
    add_worker_routes(app, service)
    app.add_api_route("/version", edge.version)
    app.add_api_route("/metrics", edge.metrics)
    app.add_api_route("/metrics", edge.metrics, methods=["HEAD"], include_in_schema=False)
    return app


class Edge:
    """The endpoints."""

    def __init__(
        self, service: Service, tokenizer: Tokenizer, sources: Sources, metrics: Metrics, answers: Bound
    ) -> None:
        self._service = service
        self._open_answers = answers
        self._tokenizer = tokenizer
        self._sources = sources
        self._metrics = metrics
        self._intake = Intake(service.model, tokenizer, sources.new_id, sources.rng)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """A chat: the answer of the assistant, streamed or whole."""
        job = await self._intake.chat(body, asker_of(request.headers))
        return await self._reply(
            request, job, self._head("chat"), body.stream_options if body.stream else None
        )

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        """The continuation of one prompt or of several, streamed or whole."""
        job = await self._intake.completion(body, asker_of(request.headers))
        return await self._reply(
            request, job, self._head("text"), body.stream_options if body.stream else None
        )

    async def models(self) -> Json:
        """The models that can be asked for."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> Json:
        """One model."""
        self._intake.check_model(name)
        return self._model()

    async def health(self) -> Json:
        """200 when some worker can answer."""
        status = await self._service.status()
        if not any(one.state == "ready" and one.info.role != "prefill" for one in status.workers):
            raise Unserved("no decode worker is ready")
        return {"status": "ok"}

    async def cluster(self) -> Json:
        """Every worker: what it is, what it has to do, what its memory holds."""
        return {
            "model": self._model(),
            "frontend": {"pid": os.getpid(), "version": __version__},
            **asdict(await self._service.status()),
        }

    async def memory(self) -> Json:
        """The memory of every worker: its budget, who set it, and what it holds."""
        return memory_of(await self._service.status())

    async def set_budget(self, body: BudgetBody) -> Json:
        """Give a worker another memory budget, or leave it to the broker. It takes effect within seconds: the
        answer is the memory of every worker now."""
        await self._service.set_budget(body.worker, body.budget)
        return memory_of(await self._service.status())

    async def version(self) -> Json:
        """The version of the server."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Measurements in the text format of Prometheus."""
        try:
            fleet = await self._service.status()
        except TidemillError:
            fleet = None  # the edge's own figures are wanted most when the router does not answer
        return Response(exposition(self._metrics, fleet), media_type=CONTENT_TYPE_LATEST)

    def _head(self, kind: Kind) -> Head:
        return Head(
            kind=kind,
            reply_id=f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{self._sources.new_id()}",
            created_s=int(self._sources.unix_time_s()),
            model=self._service.model.name,
            piece=self._tokenizer.piece,
        )

    def _model(self) -> Json:
        model = self._service.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "tidemill",
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }

    async def _reply(self, request: Request, job: Job, head: Head, stream: StreamOptions | None) -> Response:
        if stream is not None:
            return EventStream(self._chunks(job, head, stream))
        whole = await while_connected(request.receive, self._whole(job, head))
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else JSONResponse(whole)

    async def _answers(self, job: Job) -> AsyncGenerator[Increment]:
        with self._open_answers.holding(len(job.requests)), self._metrics.watch(job.requests) as watch:
            async with aclosing(answers(self._service, self._tokenizer, job)) as increments:
                async for increment in increments:
                    watch.saw(increment)
                    yield increment

    async def _whole(self, job: Job, head: Head) -> Json:
        tally = Tally(job)
        growths: list[list[Growth]] = [[] for _ in job.requests]
        async with aclosing(self._answers(job)) as increments:
            async for increment in increments:
                tally.saw(increment)
                growths[increment.choice].append(increment.growth)
        choices = [whole_choice(head, index, one, logprobs=job.logprobs) for index, one in enumerate(growths)]
        return {**head.whole(choices), "usage": tally.usage()}

    async def _chunks(self, job: Job, head: Head, options: StreamOptions) -> AsyncGenerator[bytes]:
        """Server-sent events. After the first one an error is an event too: the status line has been sent."""
        tally = Tally(job)
        started = False
        try:
            async with aclosing(self._answers(job)) as increments:
                async for increment in increments:
                    if head.kind == "chat" and not started:
                        for index in range(len(job.requests)):  # in order: the openai SDK counts on it
                            yield event(head.chunk([opening_choice(index)]))
                            started = True
                    tally.saw(increment)
                    chunk = head.chunk([chunk_choice(head, increment)])
                    if options.continuous_usage_stats:
                        chunk["usage"] = tally.usage()
                    elif options.include_usage:
                        chunk["usage"] = None
                    yield event(chunk)
                    started = True
        except Exception as error:
            if not started:
                raise
            status, body = error_of(error)
            self._metrics.count_error(status)
            yield event(body, "error")
            if not isinstance(error, TidemillError):
                raise
            return
        if options.include_usage:
            yield event({**head.chunk([]), "usage": tally.usage()})
        yield DONE
