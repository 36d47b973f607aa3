"""A router and worker streams that record a span for each call of one traced request, at the edge."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from opentelemetry.trace import Span, SpanKind, Tracer

from tidemill.cluster.edge.flow import RequestRouter, WorkerStreams
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.observability.spans import provenance_attributes, span, traceparent
from tidemill.workers.inbox import Emit, Pause
from tidemill.workers.messages import Delta, Produced, Request, WorkerId


class TracedRouter:
    def __init__(self, router: RequestRouter, tracer: Tracer, trace_parent: str) -> None:
        self._router = router
        self._tracer = tracer
        self._trace_parent = trace_parent

    async def place(self, request: PlacementRequest) -> Route:
        pages = {"tidemill.pages": len(request.keys)}
        with span(self._tracer, SpanKind.CLIENT, "route", self._trace_parent, pages) as routing:
            route = await self._router.place(request)
            routing.set_attribute("tidemill.decode", route.decode)
            routing.set_attribute("tidemill.predicted_s", route.predicted_s)
            if route.prefill is not None:
                routing.set_attribute("tidemill.prefill", route.prefill)
            return route

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        await self._router.report_lost(worker, blamed)


class TracedPeers:
    """Replaces the `trace_parent` of a request, the same for all calls, with the span of the call."""

    def __init__(self, peers: WorkerStreams, tracer: Tracer, page_tokens: int) -> None:
        self._peers = peers
        self._tracer = tracer
        self._page_tokens = page_tokens

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        with self._span("prefill", worker, request) as (producing, sent):
            produced = await self._peers.produce(worker, address, sent)
            producing.set_attribute("tidemill.depth_tokens", produced.depth)
            producing.set_attributes(provenance_attributes(produced.provenance, self._page_tokens))
            return produced

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        with self._span("fetch ahead", worker, request) as (_, sent):
            await self._peers.prefetch(worker, address, sent)

    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None:
        num_tokens = 0
        with self._span("decode", worker, request) as (decoding, sent):
            decoding.set_attribute("tidemill.replayed_answer_tokens", request.drawn)

            def take(delta: Delta) -> Pause | None:
                nonlocal num_tokens
                if delta.provenance is not None:
                    decoding.add_event("first token")
                    decoding.set_attributes(provenance_attributes(delta.provenance, self._page_tokens))
                num_tokens += len(delta.tokens)
                if delta.finish is not None:
                    decoding.set_attributes({"tidemill.finish": delta.finish, "tidemill.tokens": num_tokens})
                return emit(delta)

            await self._peers.stream(worker, address, sent, take)

    @contextmanager
    def _span(self, name: str, worker: WorkerId, request: Request) -> Generator[tuple[Span, Request]]:
        """Yield the span of a call, and the request with that as its parent."""
        about = {"tidemill.worker": worker}
        with span(self._tracer, SpanKind.CLIENT, name, request.trace_parent, about) as calling:
            yield calling, replace(request, trace_parent=traceparent(calling))
