"""Clients that are slow or send without end tie up nothing: they are cut, the others are served."""

import asyncio
import itertools
import json
import math
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from tests.support.cluster.fake_service import (
    MODEL,
    FakeService,
    app_over,
    events_of,
    saying,
    serving,
)
from tests.support.sockets import connected, request_of, until_closed
from tidemill.cluster.edge.http.connection import (
    HEAD_BYTES_MAX,
    SLICE_BYTES,
    TAKEN_BYTES_MIN,
    WAITING_MAX,
    with_limits,
)
from tidemill.cluster.edge.requests.limits import EdgeLimits

PATH = "/v1/completions"
CUT_S = 60
"""A bound on waiting for what has to come."""

SHORT = EdgeLimits(headers_s_max=0.2, body_s_max=0.2, send_s_max=0.2)
LONG = 2000
"""Tokens: far more than fit between a server and a client that does not read."""
ENDLESS = {"prompt": "a", "max_tokens": LONG, "stream": True, "ignore_eos": True}


post = partial(request_of, PATH)
SILENT = post({}, **{"content-length": "1000"}).removesuffix(b"{}")


def talkative() -> FakeService:
    return FakeService(lambda _: [5] * LONG, model=replace(MODEL, max_model_len=2 * LONG))


async def answer_to(data: bytes, service: FakeService) -> bytes:
    """Return what a server sends to one that has sent this, before it closes the connection."""
    async with asyncio.timeout(CUT_S), serving(app_over(service)) as url, connected(url) as (reader, writer):
        writer.write(data)
        return await until_closed(reader)


async def dribble(url: str, before: bytes, text: bytes) -> bytes:
    """Send `text` byte by byte, repeatedly, until the server closes. Return all that it has sent."""
    bytes_ = itertools.cycle([bytes([byte]) for byte in text] or [b""])
    async with connected(url) as (reader, writer):
        received = asyncio.create_task(until_closed(reader))
        with suppress(ConnectionError):
            writer.write(before)
            while not received.done():
                writer.write(next(bytes_))
                await asyncio.sleep(0.01)
        return await received


async def test_missing_body_is_answered_and_reaches_no_worker() -> None:
    service = FakeService(saying(" a"))
    limits = EdgeLimits(body_s_max=0.2, requests_max=1)
    app = app_over(service, limits=limits)
    async with (
        serving(app) as url,
        asyncio.timeout(CUT_S),
        httpx.AsyncClient(base_url=url) as client,
    ):
        received = await dribble(url, SILENT, b" ")
        assert (await client.post(PATH, json={"prompt": "a"})).status_code == 200
    assert received.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"body_too_slow"' in received
    assert b"connection: close" in received
    assert len(service.requests) == 1


@pytest.mark.parametrize("half", [b"POST /v1/comple", post({"prompt": "a"})[:-3], post({"prompt": "a"})])
async def test_client_that_closes_its_half_is_let_go(half: bytes) -> None:
    service = FakeService(saying(" a"), stall_at=0)

    async with (
        asyncio.timeout(CUT_S),
        serving(app_over(service)) as url,
        connected(url) as (reader, writer),
    ):
        writer.write(half)
        if half.endswith(b"}"):
            await service.stalled.wait()
        writer.write_eof()
        assert b"200" not in await until_closed(reader)
    assert (service.open_streams, len(service.requests)) == (0, half.endswith(b"}"))


async def test_idle_connections_of_a_client_are_bounded_and_the_others_are_served() -> None:
    limits = EdgeLimits(connections_max=20)
    app = app_over(FakeService(saying(" a")))
    async with (
        asyncio.timeout(CUT_S),
        serving(app, limits=limits) as url,
        httpx.AsyncClient(base_url=url) as client,
        AsyncExitStack() as idle,
    ):
        for _ in range(9):
            await idle.enter_async_context(connected(url))
        assert (await client.get("/health")).status_code == 200
        async with connected(url) as (one_more, _):
            assert await until_closed(one_more) == b""
        assert (await client.get("/health")).status_code == 200
        elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(base_url=url, transport=elsewhere) as other:
            assert (await other.get("/health")).status_code == 200


async def test_bodies_that_do_not_come_take_no_place_of_requests() -> None:
    limits = EdgeLimits(requests_max=2)
    app = app_over(FakeService(saying(" a")), limits=limits)
    async with asyncio.timeout(CUT_S), serving(app) as url, AsyncExitStack() as silent:
        for _ in range(4):
            _, writer = await silent.enter_async_context(connected(url))
            writer.write(SILENT)
        async with httpx.AsyncClient(base_url=url) as client:
            for _ in range(4):
                assert (await client.post(PATH, json={"prompt": "a"})).status_code == 200


async def test_waiting_bodies_of_one_client_leave_room_for_the_others() -> None:
    """One address sends as much of bodies as it may and then nothing; another one is served."""
    limits = EdgeLimits(body_bytes_max=1000)
    app = app_over(FakeService(saying(" a")), limits=limits)
    large = post({}, **{"content-length": "4000"}).removesuffix(b"{}") + b" " * 400

    elsewhere = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with (
        asyncio.timeout(CUT_S),
        serving(app) as url,
        connected(url) as (_, first),
        connected(url) as (reader, second),
        httpx.AsyncClient(base_url=url, transport=elsewhere) as other,
    ):
        first.write(large)
        second.write(large)
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 429 ")
        assert (await other.post(PATH, json={"prompt": "a" * 200})).status_code == 200
        first.transport.abort()


@pytest.mark.parametrize("logprobs", [None, 5])  # None: chunks are written past ASGI
async def test_client_that_does_not_read_is_cut_and_the_others_get_all(logprobs: int | None) -> None:
    """The service is pulled no further than the buffers go."""
    service = talkative()
    body = {**ENDLESS, "logprobs": logprobs}
    async with (
        asyncio.timeout(CUT_S),
        serving(app_over(service), limits=SHORT) as url,
        httpx.AsyncClient(base_url=url, timeout=CUT_S) as client,
        connected(url, receive_bytes=4096) as (reader, writer),
    ):
        writer.write(post(body))
        *_, last, done = events_of(await client.post(PATH, json=body))
        assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
        await service.idle.wait()
        assert service.pieces < 2 * LONG, "one of the two was not read to its end"
        assert not (await until_closed(reader)).endswith(b"0\r\n\r\n")
    assert len(service.requests) == 2
    assert service.open_streams == 0


async def test_stream_waits_for_its_reader_and_is_read_to_its_end() -> None:
    service = talkative()
    async with (
        asyncio.timeout(CUT_S),
        serving(app_over(service)) as url,
        connected(url, receive_bytes=4096) as (reader, writer),
    ):
        writer.write(post(ENDLESS, connection="close"))
        for _ in range(5 * LONG):  # the service makes at most one token in each
            await asyncio.sleep(0)
        assert service.pieces < LONG, "it is made no faster than it is read"
        received = await until_closed(reader)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b'"text":') == LONG


LIMITS = EdgeLimits()
CONFIG = uvicorn.Config(app_over(FakeService(saying(" a"))), log_config=None)


@dataclass(eq=False)
class Timer:
    """Or a task, which never ends."""

    due_s: float
    run: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        del callback


class Scene:
    """The loop and the transport of one connection. The test advances the time, and no request starts."""

    def __init__(self) -> None:
        self.waiting_bytes = 0
        self.aborted = self.closed = self.is_reading = False
        self.written = b""
        self.started = 0
        self._now_s = 0.0
        self._timers: list[Timer] = []
        connection = with_limits(LIMITS)
        self.protocol = connection(CONFIG, ServerState(), {}, cast("asyncio.AbstractEventLoop", self))
        self.protocol.connection_made(cast("asyncio.Transport", self))
        self.is_reading = True

    def pass_time(self, seconds: float) -> None:
        until_s = self._now_s + seconds
        while due := [
            pending for pending in self._timers if pending.due_s <= until_s and not pending.cancelled
        ]:
            first = min(due, key=lambda timer: timer.due_s)
            self._now_s = first.due_s
            first.cancel()
            first.run()
        self._now_s = until_s

    def call_later(self, delay_s: float, run: Callable[..., None], *arguments: int) -> Timer:
        timer = Timer(self._now_s + delay_s, lambda: run(*arguments))
        self._timers.append(timer)
        return timer

    def create_task(self, work: Coroutine[Any, Any, None]) -> Timer:
        work.close()
        self.started += 1
        return Timer(math.inf, lambda: None)

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str) -> None:
        del name

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None:
        self.closed = True

    @property
    def num_timers(self) -> int:
        return sum(not timer.cancelled for timer in self._timers)


GET = b"GET /ping HTTP/1.1\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


def test_tiny_chunks_of_a_body_are_passed_on_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn copies all that waits with each piece: chunks of one byte took a third of a second per read."""
    passed: list[bytes] = []

    def on_body(self: HttpToolsProtocol, body: bytes) -> None:
        del self
        passed.append(body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)
    scene = Scene()
    scene.protocol.data_received(CHUNKED + b"1\r\na\r\n" * 500)
    assert passed == [b"a" * 500]
    scene.protocol.data_received(b"1\r\nb\r\n" * 3 + b"0\r\n\r\n" + CHUNKED + b"1\r\nc\r\n")
    assert passed[1:] == [b"bbb", b"c"], "of another request"


def reading() -> Scene:
    """Return a connection with a request in progress."""
    scene = Scene()
    scene.protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    assert scene.num_timers == 0
    return scene


@given(taken=st.lists(st.integers(0, 3 * TAKEN_BYTES_MIN), max_size=6))
def test_reader_is_cut_when_it_takes_too_little_in_a_period(taken: list[int]) -> None:
    scene = reading()
    scene.waiting_bytes = 1 << 20
    scene.protocol.pause_writing()
    for num_bytes in taken:
        scene.waiting_bytes -= num_bytes
        scene.pass_time(LIMITS.send_s_max)
    assert scene.aborted == any(num_bytes < TAKEN_BYTES_MIN for num_bytes in taken)


@pytest.mark.parametrize("is_lost", [False, True])
def test_reader_that_goes_on_or_is_lost_is_not_watched_any_more(*, is_lost: bool) -> None:
    scene = Scene() if is_lost else reading()
    scene.waiting_bytes = 1 << 20
    scene.protocol.pause_writing()
    assert scene.num_timers == 1 + is_lost
    scene.pass_time(LIMITS.send_s_max - LIMITS.headers_s_max)
    if is_lost:
        scene.protocol.connection_lost(None)
    else:
        scene.protocol.resume_writing()
    assert scene.num_timers == 0


@pytest.mark.parametrize("is_taken", [False, True])
def test_closed_connection_is_not_flushed_forever(*, is_taken: bool) -> None:
    scene = reading()
    scene.waiting_bytes = 100
    scene.protocol.on_response_complete()
    scene.pass_time(LIMITS.send_s_max - 1)
    assert scene.closed
    assert not scene.aborted
    scene.waiting_bytes *= not is_taken
    scene.pass_time(1)
    assert scene.aborted is not is_taken
    assert scene.num_timers == 0


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (b"GET /", b"x"),
        (b"GET / HTTP/1.1\r\nx-a: ", b"b"),
        (b"GET / HTTP/1.1\r\n", b"x-a: b\r\n"),
        (b"", b"\r\n"),
        (CHUNKED + b"0\r\n", b"x-a: b\r\n"),
        (CHUNKED + b"0\r\nx-a: ", b"b"),
        (CHUNKED + b"1;", b"x"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [1000, SLICE_BYTES, 256 << 10])
def test_head_without_end_ends_the_connection(before: bytes, text: bytes, piece_bytes: int) -> None:
    scene = Scene()
    scene.protocol.data_received(before)
    piece = text * (piece_bytes // len(text))
    sent = 0
    while not scene.is_closing():
        scene.protocol.data_received(piece)
        sent += len(piece)
        assert sent <= HEAD_BYTES_MAX + len(piece)
    assert sum(map(len, itertools.chain(*(scene.protocol.headers or ())))) <= HEAD_BYTES_MAX + SLICE_BYTES
    assert scene.aborted is (scene.started > 0)
    assert scene.written.startswith(b"HTTP/1.1 431 ") is (scene.started == 0)


def test_head_as_large_as_allowed_is_served_and_the_next_one_too() -> None:
    scene = Scene()
    head = b"GET / HTTP/1.1\r\nx-a: "
    head += b"b" * (HEAD_BYTES_MAX - len(head) - 4) + b"\r\n\r\n"
    for answered in range(3):
        scene.protocol.data_received(head)
        assert (scene.started, scene.is_closing()) == (answered + 1, False)
        scene.protocol.cycle.response_complete = True
        scene.protocol.on_response_complete()


async def test_too_large_head_is_answered() -> None:
    received = await answer_to(GET[:-2] + b"x: " + b"y" * HEAD_BYTES_MAX, FakeService(saying(" a")))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "headers_too_large"


def http_1_0(**body: object) -> bytes:
    """Such a client may leave out the host, and knows no chunks."""
    return post(body).replace(b" HTTP/1.1\r\nhost: localhost\r\n", b" HTTP/1.0\r\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_to_http_1_0_ends_with_its_connection(*, stream: bool) -> None:
    body = {"model": "keeper", "prompt": "a", "stream": stream, "max_tokens": 9}
    service = FakeService(saying(" a b c d e"))
    head, _, text = (await answer_to(http_1_0(**body), service)).partition(b"\r\n\r\n")
    async with serving(app_over(service)) as url, httpx.AsyncClient(base_url=url) as client:
        assert text == (await client.post(PATH, json=body)).content
    assert head.split(b" ")[1] == b"200"
    assert b"transfer-encoding" not in head.lower()
    assert b" d" in text


async def test_error_in_a_stream_to_http_1_0_is_its_last_event() -> None:
    received = await answer_to(http_1_0(prompt="a", stream=True), FakeService(saying(" a b c"), fail_at=2))
    events = received.partition(b"\r\n\r\n")[2].removesuffix(b"\n\n").split(b"\n\n")
    assert [event.partition(b":")[0] for event in events] == [b"data", b"data", b"event"]


def test_trailers_are_not_taken_for_headers() -> None:
    scene = Scene()
    scene.protocol.data_received(CHUNKED + b"0\r\nauthorization: Bearer other\r\n\r\n")
    assert [name for name, _ in scene.protocol.scope["headers"]] == [b"transfer-encoding"]


@pytest.mark.parametrize("second", [GET * 2, GET + post({}, **{"content-length": str(1 << 30)})])
def test_nothing_is_read_while_a_request_waits_for_an_earlier_answer(second: bytes) -> None:
    scene = Scene()
    scene.protocol.data_received(GET + second)
    assert (scene.started, len(scene.protocol.pipeline), scene.is_reading) == (1, 2, False)
    for waiting in (1, 0):
        scene.protocol.flow.resume_reading()  # as an application does that waits for a disconnect
        assert not scene.is_reading
        scene.protocol.on_response_complete()
        assert len(scene.protocol.pipeline) == waiting
    assert (scene.started, scene.is_reading) == (3, True)


@pytest.mark.parametrize(("count", "is_cut"), [(WAITING_MAX + 1, False), (100_000, True)])
def test_more_than_a_few_waiting_requests_end_the_connection(count: int, *, is_cut: bool) -> None:
    scene = Scene()
    scene.protocol.data_received(GET * count)
    assert scene.aborted is is_cut
    assert len(scene.protocol.pipeline) <= SLICE_BYTES // len(GET)


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (b"GET", b""),
        (b"GET /health", b"x"),
        (b"GET /health HTTP/1.1\r\nx-a: ", b"b"),
        (b"GET /health HTTP/1.1\r\n", b"x-a: b\r\n"),
        (b"", b"\r\n"),
    ],
)
@pytest.mark.parametrize("is_second", [False, True])
def test_headers_that_do_not_come_end_the_connection(before: bytes, text: bytes, *, is_second: bool) -> None:
    scene = reading() if is_second else Scene()
    if is_second:
        scene.protocol.cycle.response_complete = True
        scene.protocol.on_response_complete()
    scene.protocol.data_received(before)
    for _ in range(int(LIMITS.headers_s_max) - 1):
        scene.pass_time(1)
        scene.protocol.data_received(text)
        assert not scene.is_closing()
    scene.pass_time(1)
    assert (scene.aborted, scene.started, scene.written) == (True, is_second, b"")


def test_head_behind_an_open_answer_has_to_come_too_once_it_is_read() -> None:
    scene = reading()
    scene.pass_time(10 * LIMITS.headers_s_max)
    scene.protocol.data_received(GET[:5])
    scene.pass_time(LIMITS.headers_s_max - 1)
    assert not scene.aborted
    scene.pass_time(1)
    assert scene.aborted
    scene = Scene()
    scene.protocol.data_received(GET * 2 + GET[:5])
    scene.pass_time(10 * LIMITS.headers_s_max)
    assert not scene.aborted, "it is not read"
