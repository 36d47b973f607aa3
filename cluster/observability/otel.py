"""The OpenTelemetry SDK: a thread sends spans to an OTLP collector over gRPC or HTTP."""

from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Tracer

from tidemill import __version__
from tidemill.cluster.observability.spans import NoTracing

SEND_EVERY_MS = 1000
SEND_S_MAX = 5


def open_tracer(url: str, process: str) -> tuple[Tracer, Callable[[], None]]:
    """Return a tracer that is not global, and the function that closes it. Raises NoTracing."""
    resource = Resource.create(
        {"service.name": "tidemill", "service.version": __version__, "service.instance.id": process}
    )
    provider = TracerProvider(resource=resource, sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(url), schedule_delay_millis=SEND_EVERY_MS))
    return provider.get_tracer("tidemill", __version__), provider.shutdown


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
