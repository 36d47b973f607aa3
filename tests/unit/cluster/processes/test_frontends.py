"""The link of a server and its edge processes, and the connections that it hands on."""

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.cluster.fake_service import sources
from tidemill.cluster.cli import main as cli
from tidemill.cluster.edge.records.database import DatabaseSettings
from tidemill.cluster.edge.requests.context import PATIENT_S_MAX, open_context
from tidemill.cluster.edge.requests.security import Security, Tls
from tidemill.cluster.metrics.edge_samples import EdgeSamples
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.processes import frontends
from tidemill.cluster.processes.endpoint import edge_group
from tidemill.cluster.processes.endpoint import link as module
from tidemill.cluster.processes.endpoint.edge_group import LinkedGroup
from tidemill.cluster.processes.endpoint.endpoint import Endpoint, HandedSocket, Sockets
from tidemill.cluster.processes.endpoint.link import Functions, Link
from tidemill.cluster.processes.frontends import MISSES_MAX, Frontends, _Edge, edge_arguments
from tidemill.workers.messages import Unserved

LONG = "c" * 300_000


@asynccontextmanager
async def linked() -> AsyncGenerator[tuple[Link, Link]]:
    """Run both ends of a link; each adds its name to what it is asked."""

    def functions(name: str) -> Functions:
        async def add(word: str) -> str:
            await asyncio.sleep(0.05 if word == "slow" else 0)
            return word + name

        return {"add": add, "never": lambda _: asyncio.Event().wait()}

    ends = zip(socket.socketpair(), "12", strict=True)
    first, second = [await Link.open(end, functions(name)) for end, name in ends]
    runs = [asyncio.create_task(link.run()) for link in (first, second)]
    yield first, second
    runs[0].cancel()
    await asyncio.wait(runs)
    assert not runs[1].cancelled(), "it ends with the other end"


async def test_both_ends_call_and_answers_find_their_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    async with linked() as (first, second):
        calls = [first.call("add", str, "slow"), first.call("add", str, "b"), second.call("add", str, LONG)]
        assert await asyncio.gather(*calls) == ["slow2", "b2", f"{LONG}1"]
        call = asyncio.create_task(first.call("never", str))
        await asyncio.sleep(0.05)
        second._writer.close()
        with pytest.raises(Unserved, match="has ended"):
            await call
        with pytest.raises(Unserved, match="has ended"):
            await first.call("add", str, "")
    monkeypatch.setattr(module, "ANSWER_S_MAX", 0.1)
    async with linked() as (first, _):
        with pytest.raises(Unserved, match="never"):
            await first.call("never", str)


def test_handed_connection_is_that_of_the_client() -> None:
    ours, theirs = socket.socketpair()
    with (
        ours,
        HandedSocket(fileno=theirs.detach()) as handed,
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        accepted, _ = listener.accept()
        with accepted:
            socket.send_fds(ours, [b"."], [accepted.fileno()])
        connection, address = handed.accept()
        with connection:
            assert address == client.getsockname()
            connection.sendall(b"hello")
            assert client.recv(5) == b"hello"
        handed.setblocking(False)  # noqa: FBT003 - its only argument
        with pytest.raises(BlockingIOError):
            handed.accept()
        ours.close()
        with pytest.raises(OSError, match="has ended"):
            handed.accept()


def test_arguments_of_an_edge_process_are_those_of_the_server() -> None:
    """The parser of the command reads them, and its endpoint is that of the server."""
    c, k, a = map(Path, ("/c", "/k", "/a"))
    endpoint = Endpoint(
        host="::1",
        port=0,
        grpc_port=8001,
        security=Security(tls=Tls(certificate=c, key=k, client_ca=a)),
        telemetry=Telemetry(log_level="debug", log_json=True),
        database=DatabaseSettings("postgresql://me:hunter2@host/name", None, 60.0),
    )
    tls = MutualTls(certificate=a, key=c, ca=k)
    arguments = edge_arguments(endpoint, 8000, ["10.0.0.1:1", "10.0.0.2:1"], tls)
    assert "hunter2" not in str(arguments), "lists of processes show them"
    options = vars(cli.parser().parse_args(["edge", *arguments]))
    assert options["join"] == "10.0.0.1:1,10.0.0.2:1"
    files = {"ssl-certfile": "/c", "ssl-keyfile": "/k", "ssl-ca-certs": "/a"}
    own = {"cluster-ssl-certfile": "/a", "cluster-ssl-keyfile": "/c", "cluster-ssl-ca-certs": "/k"}
    more = {"host": "::1", "port": 8000, "grpc-port": 8001, "log-level": "debug", "log-json": True}
    more |= {"database": None, "database-ttl": 60.0}
    given = {
        name.removeprefix("flag --"): value for name, value in options.items() if name.startswith("flag")
    }
    assert given == files | own | more
    assert not any("ssl" in word for word in edge_arguments(Endpoint(host="a", port=1), 1, ["b:1"], None))


@pytest.mark.parametrize("is_killed", [True, False])
async def test_answers_of_an_edge_have_any_time_if_its_server_is_killed(
    monkeypatch: pytest.MonkeyPatch,
    is_killed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A running server closes the link when it stops, and its signal follows."""
    monkeypatch.setattr(edge_group, "ENDING_S_MAX", 0.2)
    context = open_context([], sources())
    ours, theirs = socket.socketpair()
    running = asyncio.create_task(LinkedGroup(theirs).run(context, []))
    await asyncio.sleep(0.05)
    assert context.shutdown_s_max() == context.limits.shutdown_s_max
    ours.close()
    if is_killed:
        monkeypatch.setattr(os, "getppid", lambda: -1)
    await running
    assert (context.shutdown_s_max() == PATIENT_S_MAX) is is_killed


class ScriptedEdge:
    """An edge process and its link: it answers, misses or never answers each poll, by a script that begins
    again."""

    def __init__(self, answers: str) -> None:
        self.answers = answers
        self.polls = self.tokens = 0
        self.killed_at: list[int] = []

    def kill(self) -> None:
        self.killed_at.append(self.polls)

    async def call(self, name: str, kind: type[EdgeSamples]) -> EdgeSamples:
        assert name == "samples"
        self.polls += 1
        match self.answers[(self.polls - 1) % len(self.answers)]:
            case "-":
                raise Unserved("the other process does not answer samples")
            case ".":
                await asyncio.Event().wait()
            case _:
                pass
        self.tokens += 5
        return kind({"tokens": [("tokens_total", (), float(self.tokens))]})


@contextmanager
def served_by(*edges: ScriptedEdge, frontends: int = 1, has_served: bool = False) -> Generator[Frontends]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = Endpoint(host="127.0.0.1", port=0, frontends=frontends)
        served = Frontends(endpoint, Sockets(listener), [], {}, detached=False)
        for index, edge in enumerate(edges):
            run = _Edge(cast("Any", edge), cast("Any", edge), [], has_served=has_served)
            served._edges[index] = run
        yield served


async def test_scrape_has_the_last_counts_of_an_edge_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frontends, "SCRAPE_S_MAX", 0.2)
    with served_by(ScriptedEdge("+"), ScriptedEdge("+.+"), frontends=3) as served:
        scrapes = [await served.samples() for _ in range(3)]
    up = [found.up for found in scrapes]
    assert up == [{"0": True, "1": is_up, "2": False} for is_up in (True, False, True)]
    assert [found.families["tokens"][0][2] for found in scrapes] == [10, 15, 25]


async def test_edge_answers_with_the_last_sums_while_its_server_does_not() -> None:
    ours, theirs = socket.socketpair()
    group = LinkedGroup(theirs)
    sums = EdgeSamples({"tokens": [("tokens_total", (), 7.0)]}, up={"0": True, "1": True})

    server = await Link.open(ours, {"samples": lambda _: sums, "ready": lambda _: None})
    runs = [asyncio.create_task(run) for run in (server.run(), group.run(open_context([], sources()), []))]
    await asyncio.sleep(0.05)
    assert await group.samples() == sums
    runs[0].cancel()
    await asyncio.wait(runs)
    assert await group.samples() == replace(sums, up={"0": False, "1": False})


@pytest.mark.parametrize(
    ("answers", "has_served", "killed_at"),
    [
        ("-", True, [MISSES_MAX]),
        ("-", False, []),
        ("+-", True, []),
        ("+--", True, [3, 6]),
    ],
    ids=["frozen", "starting", "slow", "frozen later"],
)
async def test_edge_that_misses_polls_in_a_row_is_killed(
    answers: str,
    has_served: bool,  # noqa: FBT001 - a parameter of the test
    killed_at: list[int],
) -> None:
    """Once, and not while it starts."""
    edge = ScriptedEdge(answers)
    with served_by(edge, has_served=has_served) as served:
        for _ in range(7):
            await served._poll()
    assert edge.killed_at == killed_at
