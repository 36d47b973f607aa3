"""An engine whose calls leave spans: made of the times that it takes for every request, off its step loop."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tidemill.cluster.observability.spans import Tracer, found, span
from tidemill.cluster.worker.server import StreamingEngine
from tidemill.workers.messages import Delta, Produced, Provenance, Request
from tidemill.workers.scheduling.isolation import Tell


class TracedEngine:
    """Requests without a traceparent are not traced: nobody asked for it."""

    def __init__(self, engine: StreamingEngine, tracer: Tracer, page_tokens: int) -> None:
        self._engine = engine
        self._tracer = tracer
        self._page_tokens = page_tokens

    async def produce(self, request: Request, tell: Tell | None = None) -> Produced:
        if not request.trace_parent:
            return await self._engine.produce(request, tell)
        with span(self._tracer, "produce", request.trace_parent, **_named(request)) as producing:
            produced = await self._engine.produce(request, tell)
            times = produced.provenance.times
            producing.parts((*_before(produced.provenance), ("compute", times.computed_s)))
            producing.part_since("publish", times.waited_s + times.fetched_s + times.computed_s)
            producing.set_attributes(
                {"tidemill.depth_tokens": produced.depth, **found(produced.provenance, self._page_tokens)}
            )
            return produced

    async def prefetch(self, request: Request) -> Produced:
        if not request.trace_parent:
            return await self._engine.prefetch(request)
        with span(self._tracer, "fetch ahead", request.trace_parent, **_named(request)) as fetching:
            produced = await self._engine.prefetch(request)
            fetching.set_attributes({"tidemill.fetched_tokens": produced.depth})
            return produced

    async def generate(self, request: Request, tell: Tell | None = None) -> AsyncGenerator[Delta]:
        async with aclosing(self._engine.generate(request, tell)) as deltas:
            if not request.trace_parent:
                async for delta in deltas:
                    yield delta
                return
            with span(self._tracer, "generate", request.trace_parent, **_named(request)) as generating:
                began_s = asyncio.get_running_loop().time()
                first_s, num_tokens = 0.0, 0
                async for delta in deltas:
                    if delta.provenance is not None:
                        first_s = asyncio.get_running_loop().time() - began_s
                        tail_s = delta.provenance.times.computed_s
                        generating.parts((*_before(delta.provenance), ("tail", tail_s)))
                        generating.event("first token")
                        generating.set_attributes(found(delta.provenance, self._page_tokens))
                    num_tokens += len(delta.tokens)
                    if delta.finish is not None:
                        generating.part_since("stream", first_s)
                        generating.set_attributes(
                            {"tidemill.tokens": num_tokens, "tidemill.finish": delta.finish}
                        )
                        generating.end()  # the reader will not ask for more
                    yield delta


def _named(request: Request) -> dict[str, str | float]:
    return {"gen_ai.request.id": request.request_id, "tidemill.known_tokens": len(request.tokens)}


def _before(provenance: Provenance) -> tuple[tuple[str, float], ...]:
    return ("wait", provenance.times.waited_s), ("fetch", provenance.times.fetched_s)
