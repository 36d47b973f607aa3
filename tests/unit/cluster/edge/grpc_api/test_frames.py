"""The bounds of HTTP/2 frames in front of the gRPC library."""

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from benchmarks.serving.grpc_attacks import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    HEADLESS,
    OPENING,
    PING,
    RST,
    SETTINGS,
    WINDOW,
    frame,
    opened,
)

from tests.support.cluster.grpc_edge import HELLO, serving
from tests.support.grpc_loop import IN_GRPC_LOOP
from tests.support.sockets import until_closed
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster.edge.grpc_api import frames, server
from tidemill.cluster.edge.grpc_api.frames import (
    BLOCK_BYTES_MAX,
    BLOCK_FRAMES_MAX,
    CALLS_PER_S,
    FRAMES_BURST,
    FRAMES_PER_S,
    PREFACE,
    WINDOW_BYTES,
    WINDOWS_BURST,
    FrameBounds,
    FrameGate,
    Unbounded,
    client_at,
)
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import Tls

pytestmark = IN_GRPC_LOOP

EMPTY = frame(CONTINUATION, 0, 1)


def pieces(data: bytes, cuts: int) -> list[bytes]:
    """Cut the data at random places."""
    rng = Random(cuts)
    at = [0, *sorted(rng.randrange(len(data)) for _ in range(cuts)), len(data)]
    return [data[start:end] for start, end in pairwise(at)]


def calls_in(bounds: FrameBounds, *parts: bytes) -> int:
    """Return how many calls begin in it. Raises Unbounded."""
    calls = 0
    for part in parts:
        end = 0
        while end < len(part):
            end, begins_call = bounds.admit(part, end)
            calls += begins_call
    return calls


def is_admitted(bounds: FrameBounds, *parts: bytes) -> bool:
    with suppress(Unbounded):
        calls_in(bounds, *parts)
        return True
    return False


def admits(data: bytes, cuts: int = 0) -> bool:
    return is_admitted(FrameBounds(lambda: 0.0), *pieces(data, cuts))


@pytest.mark.parametrize("cuts", [0, 5, 500])
def test_frames_and_calls_are_counted_wherever_they_are_cut(cuts: int) -> None:
    call = opened(1) + frame(DATA, 0, 1, bytes(16384)) * 20 + frame(WINDOW, 0, 0, bytes(4)) * WINDOWS_BURST
    assert admits(OPENING + call, cuts)
    rest = frame(CONTINUATION, 0, 1, bytes(8000))
    assert admits(OPENING + frame(HEADERS, 0, 1, bytes(8000)) + rest * 3, cuts)
    assert not admits(OPENING + frame(HEADERS, 0, 1, bytes(8000)) + rest * 4, cuts)
    calls = b"".join(opened(at) + frame(DATA, END_STREAM, at, bytes(9)) for at in range(1, 200, 2))
    assert calls_in(FrameBounds(lambda: 0.0), *pieces(OPENING + calls, cuts)) == 100
    assert admits(OPENING + frame(DATA, END_STREAM, 1) * 2 * FRAMES_BURST), "ends of calls are data"


def test_a_block_of_headers_has_bounds_of_bytes_and_of_frames() -> None:
    last = frame(CONTINUATION, END_HEADERS, 1)
    assert not admits(OPENING + frame(HEADERS, 0, 1, bytes(BLOCK_BYTES_MAX + 1)))
    assert not admits(HEADLESS + EMPTY * BLOCK_FRAMES_MAX)
    assert admits(OPENING + (frame(HEADERS, 0, 1) + EMPTY * (BLOCK_FRAMES_MAX - 2) + last) * 9)


@pytest.mark.parametrize(
    "idle",
    [
        frame(PING, 0, 0, bytes(8)),
        frame(SETTINGS, 0, 0),
        frame(SETTINGS, ACK, 0),
        frame(RST, 0, 1, bytes(4)),
        frame(DATA, 0, 1),
        frame(99, 0, 1),
    ],
)
def test_frames_without_data_have_a_rate(idle: bytes) -> None:
    now_s = 0.0
    bounds = FrameBounds(lambda: now_s)
    assert is_admitted(bounds, OPENING + idle * (FRAMES_BURST - 1))
    now_s = 1.0
    assert is_admitted(bounds, idle * FRAMES_PER_S)
    assert not is_admitted(bounds, idle)


def test_windows_are_for_what_the_library_has_sent() -> None:
    bounds, window = FrameBounds(lambda: 0.0), frame(WINDOW, 0, 0, bytes(4))
    assert is_admitted(bounds, OPENING + window * WINDOWS_BURST)
    bounds.count_sent(1000 * WINDOW_BYTES)
    assert is_admitted(bounds, window * 1000)
    assert not is_admitted(bounds, window)


async def test_calls_of_a_client_have_a_rate_and_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "CALLS_BURST", 4)
    gate = FrameGate(8, None)
    waits_s = [gate.begin_call("a") for _ in range(8)]
    assert waits_s[:4] == [0.0] * 4
    assert 0 < waits_s[4] < waits_s[7] < 5 / CALLS_PER_S
    assert gate.begin_call("b") == 0.0


async def test_calls_that_wait_for_their_turn_are_all_answered(
    way: tuple[Tls, bytes] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "CALLS_BURST", 1)
    monkeypatch.setattr(frames, "CALLS_PER_S", 200)
    async with serving(**secure(way)) as client:
        answers = await asyncio.gather(*(client.generate(HELLO) for _ in range(40)))
        assert [answer.choices[0].text for answer in answers] == ["a"] * 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, bytes]:
    """The files of a server, and the authority that signed its certificate."""
    issued = issue(tmp_path_factory.mktemp("tls") / "files", trustme.CA(), "127.0.0.1")
    return Tls(certificate=issued.certificate, key=issued.key), issued.ca.read_bytes()


def secure(files: tuple[Tls, bytes] | None) -> dict[str, Any]:
    """The options of `serving` with these files."""
    return {} if files is None else {"tls": files[0], "credentials": grpc.ssl_channel_credentials(files[1])}


@asynccontextmanager
async def connected(
    address: str,
    files: tuple[Tls, bytes] | None,
    *,
    protocols: Sequence[str] = ("h2",),
    source: str = "127.0.0.1",
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of a client that writes its own frames."""
    host, port = address.split(":")
    context = None
    if files is not None:
        context = ssl.create_default_context(cadata=files[1].decode())
        context.set_alpn_protocols(protocols)
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context, local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@pytest.fixture(params=["plain", "TLS"])
def way(request: pytest.FixtureRequest, files: tuple[Tls, bytes]) -> tuple[Tls, bytes] | None:
    return files if request.param == "TLS" else None


@pytest.mark.parametrize(
    "data", [HEADLESS + EMPTY * BLOCK_FRAMES_MAX, b"GET / HTTP/1.1\r\n", frame(PING, 0, 0) * FRAMES_BURST]
)
async def test_client_beyond_the_bounds_is_cut_and_others_are_served(
    data: bytes, way: tuple[Tls, bytes] | None
) -> None:
    async with (
        serving(**secure(way)) as client,
        connected(client.address, way) as (reader, writer),
    ):
        writer.write(data)
        await until_closed(reader)
        assert (await client.generate(HELLO)).choices[0].text == "a"


async def test_connection_without_a_preface_is_cut(
    way: tuple[Tls, bytes] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "OPEN_S_MAX", 0.2)
    async with (
        serving(**secure(way)) as client,
        connected(client.address, way) as (silent, _),
        connected(client.address, way) as (slow, writer),
    ):
        writer.write(PREFACE[:-1])
        assert await until_closed(silent) == await until_closed(slow) == b""
        assert (await client.generate(HELLO)).choices


async def test_client_of_tls_that_does_not_ask_for_http_2_is_cut(files: tuple[Tls, bytes]) -> None:
    async with (
        serving(**secure(files)) as client,
        connected(client.address, files, protocols=["http/1.1"]) as (reader, writer),
    ):
        writer.write(OPENING)
        assert await until_closed(reader) == b""


@pytest.mark.parametrize(("of_edge", "of_grpc"), [(8, 2048), (8192, 8)])
async def test_addresses_share_connections_and_calls(
    way: tuple[Tls, bytes] | None, of_edge: int, of_grpc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = EdgeLimits(connections_max=of_edge, requests_max=8)
    monkeypatch.setattr(server, "CONNECTIONS_MAX", of_grpc)
    async with (
        serving(limits=limits, **secure(way)) as client,
        AsyncExitStack() as opened_connections,
    ):
        for _ in range(4):  # half of all, each with a call, which is half of all calls
            connection = connected(client.address, way, source="127.0.0.2")
            reader, writer = await opened_connections.enter_async_context(connection)
            writer.write(OPENING + opened(1))
            await reader.readexactly(9)  # the settings of the library
        with suppress(ConnectionError):
            async with connected(client.address, way, source="127.0.0.2") as (reader, writer):
                writer.write(OPENING)
                assert await reader.read(1) == b"", "the library answers"
        assert (await client.generate(HELLO)).choices


@pytest.mark.parametrize("address", ["127.0.0.1", "2001:db8::/64", "fe80::1%eth0-1"])
async def test_library_knows_the_client_of_a_connection(address: str) -> None:
    peers: list[str] = []

    async def answer(request: bytes, context: Any) -> bytes:  # noqa: ANN401 - generic in the stubs only
        peers.append(context.peer())
        return request

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": handler}),))
    gate = FrameGate(8, None)
    gate.bind(server)
    await server.start()
    with socket.socket(socket.AF_UNIX) as inner:
        inner.setblocking(False)  # noqa: FBT003 - its only argument
        await gate.connect(inner, address)
        reader, writer = await asyncio.open_unix_connection(sock=inner)
        path = HEAD.replace(b"/tidemill.v1.Generation/GenerateStream", b"/a.B/C")
        path = path.replace(b"\x05:path\x26", b"\x05:path\x06")
        writer.write(OPENING + frame(HEADERS, END_HEADERS, 1, path) + frame(DATA, END_STREAM, 1, bytes(5)))
        while not peers:
            await reader.read(1 << 16)
        writer.close()
    await server.stop(None)
    await gate.close()
    assert [client_at(peer) for peer in peers] == [address]


async def test_no_other_process_can_connect_to_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[Tls, bytes]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with serving(**secure(files)) as client:
        assert (await client.generate(HELLO)).choices
        assert not os.listdir(tmp_path)  # noqa: PTH208 - pathlib is not for coroutines
