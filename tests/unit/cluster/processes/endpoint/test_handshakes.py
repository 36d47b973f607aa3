"""TLS handshakes count from the start of a connection, and those that do not end delay no other."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from struct import pack
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import trustme
import uvloop

from tests.support.cluster.fake_service import FakeService, app_over, saying, serving
from tests.support.waits import WAIT_S_MAX
from tests.unit.cluster.rpc.test_mutual_tls import issue
from tidemill.cluster import listener as security
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import Tls
from tidemill.cluster.listener import InFlightLimit
from tidemill.cluster.processes.endpoint import handshakes

HALF = b"\x16\x03\x01\x02\x00\x01"
PING = b"GET /ping HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]

Loops = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, ssl.SSLContext]:
    folder: Path = tmp_path_factory.mktemp("tls")
    issued = issue(folder / "files", trustme.CA(), "localhost", "127.0.0.1")
    return Tls(certificate=issued.certificate, key=issued.key), ssl.create_default_context(cafile=issued.ca)


async def half(url: str, source: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("https://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    writer.write(HALF)
    return reader, writer


async def is_cut(reader: asyncio.StreamReader) -> bool:
    with suppress(ConnectionError):
        return await reader.read() == b""
    return True


@pytest.mark.parametrize("loop", LOOPS)
def test_handshakes_that_do_not_end_are_cut_and_leave_room(
    loop: Loops, files: tuple[Tls, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, known = files
    monkeypatch.setattr(security, "HANDSHAKE_S_MAX", 1.0)
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 4)

    async def main() -> None:
        async with serving(app_over(FakeService(saying(" a"))), tls) as url, asyncio.timeout(WAIT_S_MAX):
            opened = [await half(url, "127.0.0.2") for _ in range(20)]
            async with httpx.AsyncClient(verify=known) as client:
                assert (await client.get(f"{url}/ping")).status_code == 200
            assert not opened[0][0].at_eof(), "the answer came after the others were cut"
            assert all(await asyncio.gather(*(is_cut(reader) for reader, _ in opened)))
            for _, writer in opened:
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_connections_count_before_their_handshake_and_once(
    loop: Loops, files: tuple[Tls, ssl.SSLContext]
) -> None:
    tls, known = files
    limits = EdgeLimits(connections_max=8)

    async def main() -> None:
        async with (
            serving(app_over(FakeService(saying(" a"))), tls, limits) as url,
            asyncio.timeout(WAIT_S_MAX),
            httpx.AsyncClient(verify=known) as client,
        ):
            opened = [await half(url, "127.0.0.2") for _ in range(4)]
            opened.append(await half(url, "127.0.0.2"))  # beyond half of all
            assert await is_cut(opened[-1][0])
            for _ in range(3):  # two fit, and each gives its place back
                answers = await asyncio.gather(*(client.get(f"{url}/ping") for _ in range(2)))
                assert [answer.status_code for answer in answers] == [200, 200]
            for _, writer in opened:
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


@pytest.mark.parametrize("loop", LOOPS)
def test_more_clients_than_handshakes_in_progress_are_all_served(
    loop: Loops, files: tuple[Tls, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request comes with the last bytes of the handshake."""
    tls, known = files
    monkeypatch.setattr(handshakes, "HANDSHAKES_MAX", 4)

    async def ping(url: str) -> bytes:
        host, _, port = url.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(
            host, int(port), ssl=known, server_hostname="localhost"
        )
        writer.write(PING)
        answer = await reader.read()
        writer.close()
        return answer

    async def main() -> None:
        async with serving(app_over(FakeService(saying(" a"))), tls) as url, asyncio.timeout(WAIT_S_MAX):
            answers = await asyncio.gather(*(ping(url) for _ in range(30)))
        assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answers)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


def test_an_address_that_waits_delays_no_other() -> None:
    async def main() -> list[str]:
        shared, begun = security.Handshakes(8), list[str]()

        async def begin(client: str) -> None:
            await shared.begin(client)
            begun.append(client)

        tasks = [asyncio.create_task(begin(client)) for client in "aaaaaaaab"]
        await asyncio.sleep(0)
        assert "".join(begun) == "aaaab"
        tasks[4].cancel()  # it waits
        shared.end("b")
        for _ in range(2):
            shared.end("a")
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        return begun

    assert "".join(asyncio.run(main())) == "aaaabaa"


async def test_a_handshake_that_is_given_up_as_it_begins_counts_no_longer() -> None:
    shared = security.Handshakes(2)
    await shared.begin("a")
    second = asyncio.create_task(shared.begin("a"))
    await asyncio.sleep(0)
    shared.end("a")  # lets the second one begin
    second.cancel()
    await asyncio.wait([second])
    await asyncio.wait_for(shared.begin("a"), WAIT_S_MAX)


async def test_a_connection_that_was_just_accepted_ends_with_its_listener() -> None:
    places = InFlightLimit(8, "connections")
    protocol = cast("security.Accepted", SimpleNamespace(transport=None, place=None))
    with (
        socket.create_server(("127.0.0.1", 0)) as opened,
        socket.create_connection(opened.getsockname()) as client,
    ):
        listener = security.Listener(opened, None, lambda: protocol, places, security.Handshakes(8))
        while places.held == 0:  # noqa: ASYNC110 - afterwards its task has not run yet
            await asyncio.sleep(0)
        listener.close()
        await listener.wait_closed()
        assert places.held == 0
        assert client.recv(1) == b""


def test_many_connections_are_accepted_at_a_time_without_those_that_have_closed() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as opened, ExitStack() as clients:
        opened.setblocking(False)  # noqa: FBT003 - its only argument
        for index in range(80):
            client = clients.enter_context(socket.create_connection(opened.getsockname()))
            if index % 4 == 1:
                client.sendall(PING)
            if index % 2:  # resets
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))
                client.close()
        counts = [len([accepted.close() for accepted, _ in security.accept_some(opened)]) for _ in range(2)]
    assert counts == [32, 8]
