"""Spans of a request, by the OpenTelemetry API. The SDK is in otel.py, which is loaded on demand.

    edge       request |------------------------------------------------------------------------|
    edge         route |-|
    edge                  prefill |-----------------------|   decode |--------------------------|
    prefill-0               produce |-wait-|-compute-|-publish-|
    decode-0                fetch ahead |------------------|    generate |-wait-|-fetch-|-tail-|-stream-|

The W3C traceparent of the parent span travels in `Request.trace_parent`.
"""

import asyncio
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import cast

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.inbox import Enough
from tidemill.workers.messages import Provenance

TRACE_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
PROPAGATOR = TraceContextTextMapPropagator()
BACKEND = "tidemill.cluster.observability.otel:open_tracer"
NS_PER_S = 1_000_000_000

Backend = Callable[[str, str], tuple[Tracer, Callable[[], None]]]


class NoTracing(TidemillError):
    """The configured traces cannot be sent."""


def open_tracer(telemetry: Telemetry, process: str) -> tuple[Tracer | None, Callable[[], None]]:
    """Return the tracer of this process, None if tracing is off, and a function that sends the remaining
    spans, which may take seconds. `process` is `frontend` or a worker's name. Raises NoTracing."""
    if telemetry.traces_url is None:
        return None, lambda: None
    try:
        backend = cast("Backend", resolve_name(BACKEND))
    except ImportError as error:
        raise NoTracing(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'tidemill[otel]'"
        ) from error
    return backend(telemetry.traces_url, process)


@contextmanager
def tracing(telemetry: Telemetry, process: str) -> Generator[Tracer | None]:
    """Open the tracer of this process, and send its remaining spans at the end. Raises NoTracing."""
    tracer, close = open_tracer(telemetry, process)
    try:
        yield tracer
    finally:
        close()


def parent_of(text: str | None) -> str:
    """Return a client's traceparent, or an empty text if it is invalid."""
    return text if text is not None and TRACE_PARENT.fullmatch(text) else ""


def traceparent(span: Span) -> str:
    """Return the W3C traceparent of `span`, for spans inside it in any process."""
    carrier: dict[str, str] = {}
    PROPAGATOR.inject(carrier, set_span_in_context(span))
    return carrier["traceparent"]


@contextmanager
def span(
    tracer: Tracer, kind: SpanKind, name: str, trace_parent: str, attributes: Mapping[str, str | float]
) -> Generator[Span]:
    """Start a span that ends with the block: CLIENT where a process calls another one, SERVER where it
    answers. The span records an exception of the block by its type, and a cancellation as an attribute."""
    context = PROPAGATOR.extract({"traceparent": trace_parent})
    started = tracer.start_span(name, context, kind, attributes)
    try:
        yield started
    except (Enough, asyncio.CancelledError):
        if started.is_recording():
            started.set_attribute("tidemill.cancelled", value=True)
        raise
    except BaseException as error:
        if started.is_recording():
            started.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    finally:
        if started.is_recording():
            started.end()


def add_part(tracer: Tracer, whole: Span, name: str, start_ns: int, end_ns: int | None = None) -> None:
    """Add a span inside `whole`, which ends at `end_ns` (default: now). Times are in Unix nanoseconds."""
    tracer.start_span(name, set_span_in_context(whole), start_time=start_ns).end(end_ns)


def add_parts(tracer: Tracer, whole: Span, start_ns: int, parts: Iterable[tuple[str, float]]) -> int:
    """Add consecutive spans inside `whole` by their names and seconds, without those of no length. Return the
    end of the last one in Unix nanoseconds."""
    for name, seconds in parts:
        end_ns = start_ns + int(seconds * NS_PER_S)
        if end_ns > start_ns:
            add_part(tracer, whole, name, start_ns, end_ns)
        start_ns = end_ns
    return start_ns


def provenance_attributes(provenance: Provenance, page_tokens: int) -> dict[str, int]:
    """Return attributes with the sources of a prompt's tokens."""
    hit_tokens = provenance.reused_tokens + provenance.fetched_tokens
    return {
        "tidemill.hit_depth_tokens": hit_tokens,
        "tidemill.reused_tokens": provenance.reused_tokens,
        "tidemill.fetched_tokens": provenance.fetched_tokens,
        "tidemill.computed_tokens": provenance.computed_tokens,
        "tidemill.hit_pages": hit_tokens // page_tokens,
        "tidemill.fetched_pages": provenance.fetched_tokens // page_tokens,
    }
