"""Many streams on one frontend: no token is lost, memory stays bounded, and who does not read is cut off."""

import asyncio
import json
from collections.abc import Generator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from tests.e2e.load import Client, Outcome, PacedServer, in_turns, paced_server
from tests.e2e.paced import answer
from tests.e2e.server import eventually
from tests.sockets import connected
from tidemill.workers.api.tokenizer import load_tokenizer
from tidemill.workers.models.bundled import bundled

RUNNING = 200
WAITING = 1000
CONNECTIONS = 1000
ANSWER_TOKENS = 20
LONG_TOKENS = 3000
DEAF = 10
CHOICES = 8
PROMPT = tuple(range(100, 164))
GROWTH_MIB_MAX = 128
ABORTED = 'tidemill:request_success_total{finished_reason="abort"'


@pytest.fixture(scope="module")
def server() -> Generator[PacedServer]:
    """Prompts cost nothing; RUNNING rows, and what is beyond them waits."""
    workers = {"mixed-0": "mixed", "mixed-1": "mixed"}
    with paced_server(workers, 10**8, RUNNING // 2, send_s_max=2.0) as server:
        yield server


def body(max_tokens: int, **more: object) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, **more}


def check(outcomes: list[Outcome], num_tokens: int) -> None:
    decoder = load_tokenizer(bundled()["keeper"]).decoder()
    expected = "".join(decoder.push(answer(PROMPT, index)) for index in range(num_tokens))
    for outcome in outcomes:
        assert outcome.status == 200
        assert outcome.text == expected


def edge_mib(server: PacedServer) -> float:
    return server.memory_bytes()["edge"] / 2**20


def nothing_runs(server: PacedServer) -> bool:
    load = httpx.get(f"{server.url}/load", timeout=300).json()["server_load"]
    workers = httpx.get(f"{server.url}/cluster", timeout=300).json()["workers"]
    return load == 0 and not any(
        row["load"]["running_rows"] or row["load"]["waiting_rows"] for row in workers
    )


def aborted(server: PacedServer) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=300).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if ABORTED in line)


def test_many_streams_beside_more_that_wait_and_idle_connections(server: PacedServer) -> None:
    async def main() -> tuple[list[Outcome], float]:
        async with Client(server.url) as client, AsyncExitStack() as idle:
            await in_turns(client, 50, 50, body(2))
            before_mib = edge_mib(server)
            for _ in range(CONNECTIONS):
                await idle.enter_async_context(connected(server.url))
            outcomes = await in_turns(client, RUNNING + WAITING, RUNNING + WAITING, body(ANSWER_TOKENS))
            return outcomes, edge_mib(server) - before_mib

    outcomes, growth_mib = asyncio.run(main())
    check(outcomes, ANSWER_TOKENS)
    eventually(lambda: nothing_runs(server))
    assert growth_mib < GROWTH_MIB_MAX


def test_clients_that_do_not_read_are_cut_and_the_others_get_all(server: PacedServer) -> None:
    deaf = body(LONG_TOKENS, n=CHOICES, stream_options={"continuous_usage_stats": True})
    data = json.dumps(deaf).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    before_mib = edge_mib(server)

    async def main() -> list[Outcome]:
        async with Client(server.url) as client, AsyncExitStack() as listening:
            for _ in range(DEAF):
                _, writer = await listening.enter_async_context(connected(server.url, 4096))
                writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + data)
            outcomes = await in_turns(client, 20, 100, body(ANSWER_TOKENS))
            await asyncio.to_thread(eventually, lambda: nothing_runs(server))
            return outcomes

    check(asyncio.run(main()), ANSWER_TOKENS)
    eventually(lambda: aborted(server) == DEAF * CHOICES)  # none of them came to its end
    assert edge_mib(server) - before_mib < GROWTH_MIB_MAX
