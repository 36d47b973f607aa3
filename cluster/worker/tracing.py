"""An engine that records spans for its calls, from the times that the step loop measures for every
request."""

from contextlib import AbstractContextManager, nullcontext
from time import time_ns

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer

from tidemill.cluster.observability.spans import add_part, add_parts, provenance_attributes, span
from tidemill.workers.contract.engine import StreamingEngine
from tidemill.workers.inbox import Emit, Pause
from tidemill.workers.messages import Delta, Produced, Provenance, Request
from tidemill.workers.scheduling.isolation import Notify


class TracedEngine:
    def __init__(self, engine: StreamingEngine, tracer: Tracer, page_tokens: int) -> None:
        self._engine = engine
        self._tracer = tracer
        self._page_tokens = page_tokens

    def _span(self, name: str, request: Request) -> AbstractContextManager[Span]:
        """Return a span of a request that has a traceparent, else one that records nothing."""
        if not request.trace_parent:
            return nullcontext(INVALID_SPAN)
        attributes = {"gen_ai.request.id": request.request_id, "tidemill.known_tokens": len(request.tokens)}
        return span(self._tracer, SpanKind.SERVER, name, request.trace_parent, attributes)

    async def produce(self, request: Request, notify: Notify | None = None) -> Produced:
        with self._span("produce", request) as producing:
            start_ns = time_ns()
            produced = await self._engine.produce(request, notify)
            if producing.is_recording():
                provenance = produced.provenance
                parts = *_waits(provenance), ("compute", provenance.times.computed_s)
                computed_ns = add_parts(self._tracer, producing, start_ns, parts)
                add_part(self._tracer, producing, "publish", computed_ns)
                producing.set_attribute("tidemill.depth_tokens", produced.depth)
                producing.set_attributes(provenance_attributes(provenance, self._page_tokens))
            return produced

    async def prefetch(self, request: Request) -> Produced:
        with self._span("fetch ahead", request) as fetching:
            produced = await self._engine.prefetch(request)
            fetching.set_attribute("tidemill.fetched_tokens", produced.depth)
            return produced

    async def stream(self, request: Request, emit: Emit[Delta], notify: Notify | None = None) -> None:
        with self._span("generate", request) as generating:
            start_ns = first_ns = time_ns()
            num_tokens = 0

            def take(delta: Delta) -> Pause | None:
                nonlocal num_tokens, first_ns
                if (provenance := delta.provenance) is not None:
                    first_ns = time_ns()
                    parts = *_waits(provenance), ("tail", provenance.times.computed_s)
                    add_parts(self._tracer, generating, start_ns, parts)
                    generating.add_event("first token")
                    generating.set_attributes(provenance_attributes(provenance, self._page_tokens))
                num_tokens += len(delta.tokens)
                if delta.finish is not None:
                    add_part(self._tracer, generating, "stream", first_ns)
                    ended = {"tidemill.tokens": num_tokens, "tidemill.finish": delta.finish}
                    generating.set_attributes(ended)
                return emit(delta)

            await self._engine.stream(request, take if generating.is_recording() else emit, notify)

    def release(self, tenant: str, name: str) -> None:
        self._engine.release(tenant, name)


def _waits(provenance: Provenance) -> tuple[tuple[str, float], ...]:
    return ("wait", provenance.times.waited_s), ("fetch", provenance.times.fetched_s)
