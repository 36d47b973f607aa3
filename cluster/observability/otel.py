"""Spans as OpenTelemetry has them, sent to an OTLP collector over gRPC or HTTP by a thread of their own."""

from collections.abc import Iterable
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tidemill import __version__
from tidemill.cluster.observability.spans import Attributes, NoTracing

SEND_EVERY_MS = 1000
SEND_S_MAX = 5
NS_PER_S = 1_000_000_000

PROPAGATOR = TraceContextTextMapPropagator()


def open_tracer(url: str, process: str) -> "OtelTracer":
    """As cluster/observability/spans.py says."""
    resource = Resource.create(
        {"service.name": "tidemill", "service.version": __version__, "service.instance.id": process}
    )
    provider = TracerProvider(resource=resource, sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(url), schedule_delay_millis=SEND_EVERY_MS))
    return OtelTracer(provider)


def _exporter(url: str) -> SpanExporter:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.path not in ("", "/"):
        return HttpExporter(endpoint=url, timeout=SEND_S_MAX)
    if parts.scheme in ("grpc", "grpcs", "http", "https") and parts.hostname:
        return GrpcExporter(
            endpoint=parts.netloc, insecure=parts.scheme in ("grpc", "http"), timeout=SEND_S_MAX
        )
    raise NoTracing(
        f"--otlp-traces-endpoint {url}: give grpc://host:4317, or http://host:4318/v1/traces for HTTP"
    )


class OtelTracer:
    """`provider` is of this process alone: nothing is installed for the whole process."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tidemill", __version__)

    def start(self, name: str, trace_parent: str, attributes: Attributes) -> "OtelSpan":
        context = PROPAGATOR.extract({"traceparent": trace_parent})
        return OtelSpan(self._tracer, self._tracer.start_span(name, context, attributes=dict(attributes)))

    def close(self) -> None:
        self._provider.shutdown()


class OtelSpan:
    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._start_ns = getattr(span, "start_time", 0)  # one that is not sampled has none

    @property
    def trace_parent(self) -> str:
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return carrier["traceparent"]

    def set_attributes(self, attributes: Attributes) -> None:
        if self._span.is_recording():  # not after its end, nor when it is not sampled
            self._span.set_attributes(dict(attributes))

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def parts(self, parts: Iterable[tuple[str, float]]) -> None:
        start_ns = self._start_ns
        for name, seconds in parts:
            end_ns = start_ns + int(seconds * NS_PER_S)
            if end_ns > start_ns:
                self._part(name, start_ns).end(end_ns)
            start_ns = end_ns

    def part_since(self, name: str, seconds: float) -> None:
        self._part(name, self._start_ns + int(seconds * NS_PER_S)).end()

    def end(self, error: str | None = None) -> None:
        if not self._span.is_recording():
            return
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _part(self, name: str, start_ns: int) -> trace.Span:
        return self._tracer.start_span(name, trace.set_span_in_context(self._span), start_time=start_ns)
