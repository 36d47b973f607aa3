"""Spans of the edge and of workers: parents, times, attributes, failures, and no cost without tracing."""

import asyncio
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, Tracer

from tests.support.cluster.fake_service import TRACE, FakeService, app_over, call, saying, sources
from tidemill.cluster.edge.tracing import TracedPeers
from tidemill.cluster.observability.spans import NoTracing, open_tracer
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.cluster.worker.tracing import TracedEngine
from tidemill.workers.inbox import Emit, Enough
from tidemill.workers.messages import (
    Delta,
    PagesMissing,
    Produced,
    Provenance,
    Request,
    Times,
    WorkerId,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NO_TRACE = f"00-{'0' * 32}-b7ad6b7169203331-01"
NS_PER_S = 1_000_000_000


class Recorded:
    """A tracer, and its ended spans in the order of their starts."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("test")

    @property
    def spans(self) -> list[ReadableSpan]:
        return sorted(self._exporter.get_finished_spans(), key=start_ns)

    def root(self) -> ReadableSpan:
        """Return the only span whose parent is remote, or which has none."""
        (root,) = (span for span in self.spans if span.parent is None or span.parent.is_remote)
        return root

    def parts(self) -> list[tuple[str, float, float]]:
        """Return the names of the spans inside the only root, and their start and end after its start."""
        root = self.root()
        inner = [span for span in self.spans if span is not root]
        assert {traceparent(span.parent) for span in inner} <= {traceparent(root.context)}

        def seconds(at_ns: int | None) -> float:
            return round(((at_ns or 0) - start_ns(root)) / NS_PER_S, 1)

        return [(span.name, seconds(span.start_time), seconds(span.end_time)) for span in inner]


def start_ns(span: ReadableSpan) -> int:
    assert span.start_time is not None
    return span.start_time


def traceparent(context: SpanContext | None) -> str:
    """Return a span, or the parent of one, as a traceparent, empty if there is none."""
    if context is None:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


PROVENANCE = Provenance(
    fetched_tokens=32, computed_tokens=8, times=Times(waited_s=1.0, fetched_s=2.0, computed_s=4.0)
)
REQUEST = Request(request_id="r", tokens=(5,) * 40, max_new_tokens=4, trace_parent=PARENT)


class FakeEngine:
    """An engine, also behind the streams to its worker, whose calls begin with the worker and its address."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.parents: list[str] = []

    def release(self, tenant: str, name: str) -> None: ...

    def _take(self, given: tuple[Any, ...]) -> None:
        (request,) = (part for part in given if isinstance(part, Request))
        self.parents.append(request.trace_parent)

    async def produce(self, *given: Any, **_: Any) -> Produced:  # noqa: ANN401 - of both
        self._take(given)
        if self.error:
            raise self.error
        return Produced(depth=32, provenance=PROVENANCE)

    async def prefetch(self, *given: Any, **_: Any) -> Any:  # noqa: ANN401 - of both
        self._take(given)
        await asyncio.Event().wait()

    async def stream(self, *given: Any, **_: Any) -> None:  # noqa: ANN401 - of both
        self._take(given)
        emit = next(part for part in given if callable(part))
        emit(Delta(tokens=(1,), provenance=PROVENANCE))
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        emit(Delta(tokens=(1, 2), finish="stop"))


def reading(count: int = 9) -> Emit[Delta]:
    """Return a reader of `count` deltas, which then needs no more."""
    got: list[Delta] = []

    def take(delta: Delta) -> None:
        got.append(delta)
        if len(got) == count:
            raise Enough

    return take


async def generated(request: Request, error: Exception | None = None, count: int = 9) -> Recorded:
    recorded = Recorded()
    engine = TracedEngine(FakeEngine(error), recorded.tracer, page_tokens=16)
    with suppress(Enough):
        await engine.stream(request, reading(count))
    return recorded


async def test_traced_engine_records_parts_of_stream() -> None:
    recorded = await generated(REQUEST)
    root, parts = recorded.root(), recorded.parts()
    assert (root.name, root.kind, traceparent(root.parent)) == ("generate", SpanKind.SERVER, PARENT)
    assert sorted(parts) == [("fetch", 1, 3), ("stream", 0, 0), ("tail", 3, 7), ("wait", 0, 1)]
    assert [event.name for event in root.events] == ["first token"]
    assert root.end_time is not None
    assert root.status.status_code is StatusCode.UNSET
    attributes = attributes_of(root)
    assert attributes["tidemill.hit_pages"] == attributes["tidemill.fetched_pages"] == 2
    assert attributes["tidemill.tokens"] == 3
    assert "tidemill.cancelled" not in attributes
    unread = (await generated(REQUEST, count=1)).root()
    assert unread.status.status_code is StatusCode.UNSET
    assert attributes_of(unread)["tidemill.cancelled"] is True


async def test_span_records_error_of_broken_call() -> None:
    with pytest.raises(PagesMissing):
        await generated(REQUEST, PagesMissing("gone"))
    recorded = Recorded()
    peers = TracedPeers(FakeEngine(PagesMissing("gone")), recorded.tracer, page_tokens=16)
    with pytest.raises(PagesMissing):
        await peers.produce(WorkerId("prefill-0.a"), "here:1", REQUEST)
    root = recorded.root()
    assert (root.name, root.status.status_code) == ("prefill", StatusCode.ERROR)
    assert root.status.description == "PagesMissing"


async def test_traced_engine_records_parts_of_prompt_unless_it_is_untraced() -> None:
    recorded = Recorded()
    engine = TracedEngine(FakeEngine(), recorded.tracer, page_tokens=16)
    untraced = replace(REQUEST, trace_parent="")
    await engine.produce(untraced)
    assert recorded.spans == (await generated(untraced)).spans == []
    await engine.produce(REQUEST)
    assert recorded.parts() == [("wait", 0, 1), ("fetch", 1, 3), ("compute", 3, 7), ("publish", 7, 0)]
    assert attributes_of(recorded.root())["tidemill.depth_tokens"] == 32


async def test_traced_peers_send_their_spans_as_parents() -> None:
    recorded, engine = Recorded(), FakeEngine()
    peers = TracedPeers(engine, recorded.tracer, page_tokens=16)
    at = WorkerId("decode-0.a"), "here:1"

    await peers.produce(*at, REQUEST)
    ahead = asyncio.create_task(peers.prefetch(*at, REQUEST))
    await asyncio.sleep(0)
    ahead.cancel()
    await asyncio.wait([ahead])
    await peers.stream(*at, REQUEST, reading())
    assert [span.name for span in recorded.spans] == ["prefill", "fetch ahead", "decode"]
    assert {(span.kind, traceparent(span.parent)) for span in recorded.spans} == {(SpanKind.CLIENT, PARENT)}
    assert engine.parents == [traceparent(span.context) for span in recorded.spans]
    assert all(span.status.status_code is StatusCode.UNSET for span in recorded.spans)
    cancelled = [attributes_of(span).get("tidemill.cancelled", False) for span in recorded.spans]
    assert cancelled == [False, True, False]


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (PARENT, PARENT),
        *((other, "") for other in (None, "", "00-zz", PARENT.upper(), NO_TRACE, f"{PARENT}-more")),
    ],
)
def test_edge_records_root_span_of_request(header: str | None, parent: str) -> None:
    recorded, service = Recorded(), FakeService(saying(" ok"))
    source = replace(sources(), tracer=recorded.tracer)
    app = app_over(service, source=source)
    headers = {"x-request-id": "mine"} | ({} if header is None else {"traceparent": header})
    body = {"prompt": "Hello", "n": 2}
    assert call(app, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    root = recorded.root()
    assert (root.kind, traceparent(root.parent)) == (SpanKind.SERVER, parent)
    attributes = attributes_of(root)
    assert attributes["gen_ai.request.id"] == "mine"
    assert attributes["tidemill.choices"] == 2
    assert attributes["gen_ai.response.finish_reasons"] == "stop"
    assert attributes["tidemill.decode"] == TRACE.decode
    assert {request.trace_parent for request in service.requests} == {traceparent(root.context)}


def test_root_span_of_failed_request_has_its_end() -> None:
    recorded = Recorded()
    source = replace(sources(), tracer=recorded.tracer)
    app = app_over(FakeService(saying(" ok"), fail_at=0), source=source)
    assert call(app, "POST", "/v1/completions", json={"prompt": "Hello"}).status_code == 503
    root = recorded.root()
    assert root.status.status_code is StatusCode.ERROR
    assert attributes_of(root)["gen_ai.response.finish_reasons"] == "error"


async def test_unsampled_parent_travels_on_without_spans() -> None:
    recorded, engine = Recorded(), FakeEngine()
    peers = TracedPeers(engine, recorded.tracer, page_tokens=16)
    request = replace(REQUEST, trace_parent=PARENT.removesuffix("01") + "00")
    await peers.stream(WorkerId("w"), "here:1", request, reading())
    assert recorded.spans == []
    (parent,) = engine.parents
    assert parent.startswith(PARENT[:36])
    assert parent.endswith("-00")


def test_tracing_off_opens_and_imports_nothing() -> None:
    assert open_tracer(QUIET, "frontend")[0] is None
    check = (
        "import sys, tidemill.cluster.worker.worker_process, tidemill.cluster.processes.server\n"
        "assert 'tidemill.cluster.observability.otel' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry.exporter.otlp', "
        "'opentelemetry.sdk.trace'))]"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("url", ["collector:4317", "udp://collector:1", "grpc://"])
def test_open_tracer_refuses_url_without_collector(url: str) -> None:
    with pytest.raises(NoTracing, match="grpc://host:4317"):
        open_tracer(Telemetry(traces_url=url), "frontend")
