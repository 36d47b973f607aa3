# pyright: basic
# ruff: noqa: ANN401 - the messages of OpenTelemetry's protocol are made at run time
"""An OTLP collector over gRPC that keeps the spans it gets."""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    process: str
    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    events: tuple[str, ...]
    failed: bool
    attributes: dict[str, Any]


@dataclass(slots=True)
class Collector(service.TraceServiceServicer):
    spans: list[Span] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def Export(self, request: Any, context: Any) -> Any:
        del context
        with self.lock:
            for resource in request.resource_spans:
                process = _values(resource.resource.attributes)["service.instance.id"]
                for scope in resource.scope_spans:
                    self.spans += [_span(process, span) for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def of(self, trace: str) -> list[Span]:
        with self.lock:
            return [span for span in self.spans if span.trace == trace]


@contextmanager
def collecting() -> Generator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(collector, server)
    collector.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _span(process: str, one: Any) -> Span:
    return Span(
        process=process,
        name=one.name,
        trace=one.trace_id.hex(),
        span=one.span_id.hex(),
        parent=one.parent_span_id.hex(),
        start_ns=one.start_time_unix_nano,
        end_ns=one.end_time_unix_nano,
        events=tuple(event.name for event in one.events),
        failed=one.status.code == one.status.STATUS_CODE_ERROR,
        attributes=_values(one.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value"))
        for attribute in attributes
    }
