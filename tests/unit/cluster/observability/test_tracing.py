"""Spans: who is whose parent, what is said of failures and of what nobody waited for, and no cost without."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from tests.support.cluster.fake_service import TRACE, FakeService, call, saying, sources, tokenizer
from tidemill.cluster.edge.http.app import build_app
from tidemill.cluster.edge.requests.models import ServedBackend
from tidemill.cluster.edge.tracing import TracedPeers
from tidemill.cluster.observability.spans import Attributes, NoTracing, parent_of, span, tracer_of
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.cluster.worker.tracing import TracedEngine
from tidemill.workers.messages import (
    Delta,
    PagesMissing,
    Produced,
    Provenance,
    Request,
    Times,
    WorkerId,
)
from tidemill.workers.scheduling.isolation import Tell

CLIENTS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass
class FakeSpan:
    name: str
    parent: str
    trace_parent: str
    attributes: dict[str, object]
    inner: list[str] = field(default_factory=list[str])
    ended: bool = False
    error: str | None = None

    def set_attributes(self, attributes: Attributes) -> None:
        if not self.ended:
            self.attributes |= attributes

    def event(self, name: str) -> None:
        self.inner.append(f"! {name}")

    def parts(self, parts: Iterable[tuple[str, float]]) -> None:
        self.inner += [f"{name} {seconds:g}" for name, seconds in parts if seconds]

    def part_since(self, name: str, seconds: float) -> None:
        self.inner.append(f"{name} from {seconds:g}")

    def end(self, error: str | None = None) -> None:
        if not self.ended:
            self.ended, self.error = True, error


@dataclass
class FakeTracer:
    spans: list[FakeSpan] = field(default_factory=list[FakeSpan])

    def start(self, name: str, trace_parent: str, attributes: Attributes) -> FakeSpan:
        self.spans.append(FakeSpan(name, trace_parent, f"inside {name}", dict(attributes)))
        return self.spans[-1]

    def close(self) -> None:
        pass


PROVENANCE = Provenance(
    fetched_tokens=32, computed_tokens=8, times=Times(waited_s=1.0, fetched_s=2.0, computed_s=4.0)
)
REQUEST = Request(request_id="r", tokens=(5,) * 40, max_new_tokens=4, trace_parent=CLIENTS)


class FakeEngine:
    """An engine, and the peers of one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.parents: list[str] = []

    async def produce(self, request: Request, tell: Tell | None = None) -> Produced:
        del tell
        self.parents.append(request.trace_parent)
        if self.error:
            raise self.error
        return Produced(depth=32, provenance=PROVENANCE)

    async def prefetch(self, request: Request) -> Produced:
        self.parents.append(request.trace_parent)
        await asyncio.Event().wait()
        raise AssertionError

    async def generate(self, request: Request, tell: Tell | None = None) -> AsyncGenerator[Delta]:
        del tell
        self.parents.append(request.trace_parent)
        yield Delta(tokens=(1,), provenance=PROVENANCE)
        if self.error:
            raise self.error
        yield Delta(tokens=(1, 2), finish="stop")


class FakePeers:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        del worker, address
        return await self._engine.produce(request)

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        del worker, address
        await self._engine.prefetch(request)

    def generate(self, worker: WorkerId, address: str, request: Request) -> AsyncGenerator[Delta]:
        del worker, address
        return self._engine.generate(request)


async def read(deltas: AsyncGenerator[Delta], count: int = 9) -> list[Delta]:
    """As its readers do: they close it when they have what they want."""
    got: list[Delta] = []
    async with aclosing(deltas):
        async for delta in deltas:
            got.append(delta)
            if delta.finish is not None or len(got) == count:
                break
    return got


def generated(request: Request, error: Exception | None = None, count: int = 9) -> list[FakeSpan]:
    tracer = FakeTracer()
    engine = TracedEngine(FakeEngine(error), tracer, page_tokens=16)
    asyncio.run(read(engine.generate(request), count))
    return tracer.spans


def test_a_worker_tells_the_parts_of_a_stream() -> None:
    (one,) = generated(REQUEST)
    assert (one.name, one.parent) == ("generate", CLIENTS)
    assert one.inner[:4] == ["wait 1", "fetch 2", "tail 4", "! first token"]
    assert one.inner[4].startswith("stream from ")
    assert one.ended
    assert one.error is None
    assert one.attributes["tidemill.hit_pages"] == one.attributes["tidemill.fetched_pages"] == 2
    assert one.attributes["tidemill.tokens"] == 3
    assert "tidemill.cancelled" not in one.attributes


def test_what_is_not_traced_leaves_nothing() -> None:
    assert generated(replace(REQUEST, trace_parent="")) == []
    tracer = FakeTracer()
    engine = TracedEngine(FakeEngine(), tracer, page_tokens=16)
    asyncio.run(engine.produce(replace(REQUEST, trace_parent="")))
    assert tracer.spans == []


def test_a_stream_that_is_not_read_on_was_cancelled() -> None:
    (one,) = generated(REQUEST, count=1)
    assert (one.ended, one.error, one.attributes["tidemill.cancelled"]) == (True, None, True)


def test_a_stream_that_breaks_has_its_error() -> None:
    with pytest.raises(PagesMissing):
        generated(REQUEST, PagesMissing("gone"))
    tracer = FakeTracer()
    peers = TracedPeers(FakePeers(FakeEngine(PagesMissing("gone"))), tracer, page_tokens=16)
    with pytest.raises(PagesMissing):
        asyncio.run(peers.produce(WorkerId("prefill-0.a"), "here:1", REQUEST))
    (one,) = tracer.spans
    assert (one.name, one.ended, one.error) == ("prefill", True, "PagesMissing")


def test_a_worker_tells_the_parts_of_a_prompt() -> None:
    tracer = FakeTracer()
    asyncio.run(TracedEngine(FakeEngine(), tracer, page_tokens=16).produce(REQUEST))
    (one,) = tracer.spans
    assert one.inner == ["wait 1", "fetch 2", "compute 4", "publish from 7"]
    assert one.attributes["tidemill.depth_tokens"] == 32


def test_the_calls_of_a_frontend_are_the_parents_of_the_workers_spans() -> None:
    tracer, engine = FakeTracer(), FakeEngine()
    peers = TracedPeers(FakePeers(engine), tracer, page_tokens=16)
    at = WorkerId("decode-0.a"), "here:1"

    async def main() -> None:
        await peers.produce(*at, REQUEST)
        ahead = asyncio.create_task(peers.prefetch(*at, REQUEST))
        await asyncio.sleep(0)
        ahead.cancel()
        await asyncio.wait([ahead])
        await read(peers.generate(*at, REQUEST))

    asyncio.run(main())
    assert [recorded.name for recorded in tracer.spans] == ["prefill", "fetch ahead", "decode"]
    assert {recorded.parent for recorded in tracer.spans} == {CLIENTS}
    assert engine.parents == ["inside prefill", "inside fetch ahead", "inside decode"]
    assert all(recorded.ended and recorded.error is None for recorded in tracer.spans)
    assert [recorded.attributes.get("tidemill.cancelled", False) for recorded in tracer.spans] == [
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("header", "parent"), [(CLIENTS, CLIENTS), (None, ""), ("00-zz", ""), (CLIENTS + "-more", "")]
)
def test_a_request_of_a_client_is_the_root_of_what_is_done_for_it(header: str | None, parent: str) -> None:
    tracer, service = FakeTracer(), FakeService(saying(" ok"))
    source = replace(sources(), tracer=tracer)
    app = build_app([ServedBackend(service, tokenizer())], source)
    headers = {"x-request-id": "mine"} | ({} if header is None else {"traceparent": header})
    body = {"prompt": "Hello", "n": 2}
    assert call(app, "POST", "/v1/completions", json=body, headers=headers).status_code == 200
    (one,) = tracer.spans
    assert one.parent == parent
    assert one.ended
    assert one.attributes["gen_ai.request.id"] == "mine"
    assert one.attributes["tidemill.choices"] == 2
    assert one.attributes["gen_ai.response.finish_reasons"] == "stop"
    assert one.attributes["tidemill.decode"] == TRACE.decode
    assert {request.trace_parent for request in service.requests} == {one.trace_parent}


def test_parents_are_checked() -> None:
    assert parent_of(CLIENTS) == CLIENTS
    for text in (None, "", CLIENTS.upper(), CLIENTS.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)):
        assert not parent_of(text)


def test_a_span_that_ends_by_itself_has_no_error() -> None:
    tracer = FakeTracer()
    with span(tracer, "a", "", number=1):
        pass
    assert tracer.spans == [FakeSpan("a", "", "inside a", {"number": 1}, ended=True)]


def test_without_the_option_nothing_is_opened_or_imported() -> None:
    assert tracer_of(QUIET, "frontend") is None
    check = (
        "import sys, tidemill.cluster.worker.worker_process, tidemill.cluster.server.server\n"
        "assert 'tidemill.cluster.observability.otel' not in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.exporter.otlp')]"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("url", ["collector:4317", "udp://collector:1", "grpc://"])
def test_a_url_that_names_no_collector_is_refused(url: str) -> None:
    with pytest.raises(NoTracing, match="grpc://host:4317"):
        tracer_of(Telemetry(traces_url=url), "frontend")
