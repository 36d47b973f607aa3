"""Several edge processes behind one port: any may be killed, and they count and answer as one."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.support.e2e.server import (
    EVENTUALLY_S_MAX,
    NO_TLS,
    Server,
    command_of,
    eventually,
    sessions_of,
)
from tests.support.e2e.streams import Stream, client_of
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import scraped

pytestmark = pytest.mark.slow

EDGES = 3
SIZES = ["--prefill", "1", "--decode", "1", "--memory", "64MiB", "--page-size", "16"]
OPTIONS = ["keeper", "--port", "0", "--frontends", str(EDGES), *SIZES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(OPTIONS, tmp_path_factory.mktemp("edges") / "log")
    try:
        yield server
        assert server.stop(signal.SIGINT) == 0
    finally:
        server.kill_everything()


def edges(server: Server) -> set[int]:
    return {process.pid for process in server.processes() if "--inherited" in command_of(process)}


def get(server: Server, path: str) -> httpx.Response:
    """The answer over a new connection, so that any edge may give it."""
    answer = httpx.get(f"{server.url}{path}", timeout=EVENTUALLY_S_MAX, verify=NO_TLS)
    assert answer.is_success, answer.text
    return answer


def edge_of(server: Server) -> int:
    return get(server, "/cluster").json()["frontend"]["pid"]


def tokens(server: Server) -> float:
    return scraped(get(server, "/metrics").text).value(specs.GENERATION_TOKENS, "keeper")


def body(seed: int, max_tokens: int) -> dict[str, Any]:
    rng = Random(seed)
    return {
        "model": "keeper",
        "prompt": [rng.randrange(5, 800) for _ in range(200)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def run_all(server: Server, streams: list[Stream]) -> list[Stream]:
    async with client_of(server.url) as opened:
        await asyncio.gather(*(stream.run(opened) for stream in streams))
    return streams


async def connected_to(server: Server, wanted: set[int]) -> httpx.AsyncClient:
    """A client whose one connection is to one of these edges."""
    while True:
        opened = client_of(server.url)
        if (await opened.get("/cluster")).json()["frontend"]["pid"] in wanted:
            return opened
        await opened.aclose()


def test_edges_answer_as_one(server: Server) -> None:
    asyncio.run(run_all(server, [Stream(body(seed, max_tokens=8)) for seed in range(12)]))
    for _ in range(20):
        asyncio.run(run_all(server, [Stream(body(99, max_tokens=8))]))
    rows = get(server, "/cluster/requests").json()["requests"]
    assert len(rows) == 32
    assert [row["started_unix_s"] for row in rows] == sorted(row["started_unix_s"] for row in rows)[::-1]
    assert tokens(server) == 32 * 8
    assert get(server, "/load").json() == {"server_load": 0}
    logs = get(server, "/cluster/support/logs").json()["logs"]
    assert sum(name.startswith("edge-") for name in logs) == EDGES
    assert get(server, "/cluster/support/config").json()["config"]["endpoint"]["port"] == 0
    url = f"{server.url}/cluster/workers/decode-0/drain"
    for drain in (True, False):
        assert httpx.post(url, json={"drain": drain, "force": True}, timeout=60, verify=NO_TLS).is_success
        state = "draining" if drain else "ready"
        eventually(lambda: {row["state"] for row in server.workers("decode")} == {state})  # noqa: B023
    for _ in range(2 * EDGES):
        [cached] = asyncio.run(run_all(server, [Stream(body(99, max_tokens=8))]))
        assert cached.usage["prompt_tokens_details"]["cached_tokens"]
    assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=60, verify=NO_TLS).is_success
    [fresh] = asyncio.run(run_all(server, [Stream(body(99, max_tokens=8))]))
    assert not fresh.usage["prompt_tokens_details"]["cached_tokens"], "every edge knows of the reset"


def test_connections_spread_over_edges(server: Server) -> None:
    async def pids() -> Counter[int]:
        clients = [client_of(server.url) for _ in range(48)]
        answers = await asyncio.gather(*(opened.get("/cluster") for opened in clients))
        for opened in clients:
            await opened.aclose()
        return Counter(answer.json()["frontend"]["pid"] for answer in answers)

    counted = asyncio.run(pids())
    assert counted == dict.fromkeys(edges(server), 48 // EDGES)


def test_port_in_use_is_one_line(server: Server, tmp_path: Path) -> None:
    port = server.url.rpartition(":")[2]
    with pytest.raises(AssertionError, match="--port"):
        Server(["keeper", "--port", port, "--frontends", "2", *SIZES], tmp_path / "second")


def test_edges_share_the_cores_with_workers_and_get_no_ctrl_c(server: Server) -> None:
    assert sessions_of(server.processes()) == {os.getsid(server.pid)}
    assert {os.getpgid(edge) for edge in edges(server)}.isdisjoint({os.getpgid(server.pid)})


def test_killed_edge_breaks_its_own_streams_and_returns(server: Server) -> None:
    before = edges(server)
    assert len(before) == EDGES
    lost, kept = Stream(body(1, max_tokens=1500)), Stream(body(2, max_tokens=1500))

    async def run() -> None:
        victim = edge_of(server)
        dying, living = await connected_to(server, {victim}), await connected_to(server, before - {victim})
        try:
            ended = asyncio.create_task(lost.run(dying))
            other = asyncio.create_task(kept.run(living))
            for stream in (lost, kept):
                await stream.under_way.wait()
            seen = await asyncio.to_thread(tokens, server)
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                await ended
            for _ in range(2 * EDGES):  # the port answers all the time, and no counter falls
                now = await asyncio.to_thread(tokens, server)
                assert now >= seen
                seen = now
            await other
        finally:
            await dying.aclose()
            await living.aclose()

    asyncio.run(run())
    eventually(lambda: len(edges(server)) == EDGES)
    assert len(edges(server) & before) == EDGES - 1
    assert "is started again" in server.log()
    again = asyncio.run(run_all(server, [Stream(lost.body), Stream(kept.body)]))
    assert again[0].text.startswith(lost.text)
    assert again[1].outcome == kept.outcome
    assert again[0].usage["prompt_tokens_details"]["cached_tokens"]
    eventually(lambda: len({edge_of(server) for _ in range(4 * EDGES)}) == EDGES)


def test_edge_that_stands_still_is_replaced(server: Server) -> None:
    """SIGSTOP: its client gets a reset instead of waiting, and others notice nothing."""
    before = edges(server)
    lost, kept = Stream(body(3, max_tokens=2500)), Stream(body(4, max_tokens=2500))

    async def run() -> None:
        victim = edge_of(server)
        frozen, living = await connected_to(server, {victim}), await connected_to(server, before - {victim})
        try:
            ended = asyncio.create_task(lost.run(frozen))
            other = asyncio.create_task(kept.run(living))
            for stream in (lost, kept):
                await stream.under_way.wait()
            os.kill(victim, signal.SIGSTOP)
            assert not lost.finish_reason, "too late: make the stream longer"
            with pytest.raises(httpx.TransportError):
                await ended
            await other
        finally:
            await frozen.aclose()
            await living.aclose()

    asyncio.run(run())
    assert "does not answer and is killed" in server.log()
    eventually(lambda: len(edges(server)) == EDGES)
    assert len(edges(server) & before) == EDGES - 1
    again = asyncio.run(run_all(server, [Stream(lost.body), Stream(kept.body)]))
    assert again[0].text.startswith(lost.text)
    assert again[1].outcome == kept.outcome


def test_killed_server_takes_its_edges_with_it(tmp_path: Path) -> None:
    server = Server(OPTIONS, tmp_path / "log")
    try:
        processes = server.processes()
        os.kill(server.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not [process for process in alive if "--inherited" in command_of(process)]
    finally:
        server.kill_everything()
