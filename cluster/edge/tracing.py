"""The router and the workers as one traced request sees them: a span for each call, on the frontend."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from tidemill.cluster.edge.flow import RequestRouter, WorkerStreams
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.observability.spans import Tracer, found, span
from tidemill.workers.messages import Delta, Produced, Request, WorkerId


class TracedRouter:
    def __init__(self, router: RequestRouter, tracer: Tracer, trace_parent: str) -> None:
        self._router = router
        self._tracer = tracer
        self._trace_parent = trace_parent

    async def place(self, request: PlacementRequest) -> Route:
        with span(
            self._tracer, "route", self._trace_parent, **{"tidemill.pages": len(request.keys)}
        ) as routing:
            route = await self._router.place(request)
            routing.set_attributes(
                {"tidemill.decode": route.decode, "tidemill.predicted_s": route.predicted_s}
            )
            if route.prefill is not None:
                routing.set_attributes({"tidemill.prefill": route.prefill})
            return route

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        await self._router.report_lost(worker, blamed)


class TracedPeers:
    """Requests arrive with the parent of all calls, and go on with the span of their call."""

    def __init__(self, peers: WorkerStreams, tracer: Tracer, page_tokens: int) -> None:
        self._peers = peers
        self._tracer = tracer
        self._page_tokens = page_tokens

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        at = {"tidemill.worker": worker}
        with span(self._tracer, "prefill", request.trace_parent, **at) as producing:
            sent = replace(request, trace_parent=producing.trace_parent)
            produced = await self._peers.produce(worker, address, sent)
            producing.set_attributes(
                {"tidemill.depth_tokens": produced.depth, **found(produced.provenance, self._page_tokens)}
            )
            return produced

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        at = {"tidemill.worker": worker}
        with span(self._tracer, "fetch ahead", request.trace_parent, **at) as fetching:
            await self._peers.prefetch(worker, address, replace(request, trace_parent=fetching.trace_parent))

    async def generate(self, worker: WorkerId, address: str, request: Request) -> AsyncGenerator[Delta]:
        at = {"tidemill.worker": worker, "tidemill.replayed_answer_tokens": request.drawn}
        num_tokens = 0
        with span(self._tracer, "decode", request.trace_parent, **at) as decoding:
            sent = replace(request, trace_parent=decoding.trace_parent)
            async with aclosing(self._peers.generate(worker, address, sent)) as deltas:
                async for delta in deltas:
                    if delta.provenance is not None:
                        decoding.event("first token")
                        decoding.set_attributes(found(delta.provenance, self._page_tokens))
                    num_tokens += len(delta.tokens)
                    if delta.finish is not None:
                        decoding.set_attributes(
                            {"tidemill.finish": delta.finish, "tidemill.tokens": num_tokens}
                        )
                        decoding.end()  # the reader will not ask for more
                    yield delta
