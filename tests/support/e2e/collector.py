# ruff: noqa: ANN401 - the messages of OpenTelemetry's protocol are made at run time
"""An OTLP collector over gRPC that keeps the spans it gets, as messages of the protocol."""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


@dataclass(slots=True)
class Collector(service.TraceServiceServicer):
    spans: list[tuple[str, Any]] = field(default_factory=list)  # with the names of their processes
    url: str = ""

    def Export(self, request: Any, context: Any) -> Any:
        del context
        for resource in request.resource_spans:
            process = attributes_of(resource.resource)["service.instance.id"]
            self.spans += [(process, span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def of(self, trace: str) -> dict[tuple[str, str], Any]:
        """Return the spans of a trace by process and name, which must differ."""
        found = [(process, span) for process, span in self.spans.copy() if span.trace_id.hex() == trace]
        named = {(process, span.name): span for process, span in found}
        assert len(named) == len(found)
        return named


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


def attributes_of(message: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in message.attributes}
