"""Several edge processes behind one port: any may be killed, and they count and answer as one."""

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from threading import Event
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.support.cluster.fake_service import events_of
from tests.support.e2e.faults import EDGE
from tests.support.e2e.server import (
    EVENTUALLY_S_MAX,
    NO_TLS,
    Server,
    command_of,
    eventually,
    sessions_of,
)
from tests.support.e2e.streams import (
    Body,
    Stream,
    cached_of,
    client_of,
    completion,
    random_prompt,
    run_all,
)
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import scraped

pytestmark = pytest.mark.slow

EDGES = 3
SIZES = ["--prefill", "1", "--decode", "1", "--memory", "64MiB", "--page-size", "16"]
OPTIONS = ["keeper", "--port", "0", "--frontends", str(EDGES), *SIZES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("edges")
    with Server([*OPTIONS, "--database", str(folder / "stored.db")], folder / "log") as server:
        yield server
        assert server.stop(signal.SIGINT) == 0


def edges(server: Server) -> set[int]:
    return {process.pid for process in server.processes() if EDGE in command_of(process)}


def get(server: Server, path: str) -> httpx.Response:
    """The answer over a new connection, so that any edge may give it."""
    answer = httpx.get(f"{server.url}{path}", timeout=EVENTUALLY_S_MAX, verify=NO_TLS)
    assert answer.is_success, answer.text
    return answer


def edge_of(server: Server) -> int:
    return get(server, "/cluster").json()["frontend"]["pid"]


def tokens(server: Server) -> float:
    return scraped(get(server, "/metrics").text).value(specs.GENERATION_TOKENS, "keeper")


def body(seed: int, max_tokens: int) -> Body:
    return completion(random_prompt(Random(seed), 200), max_tokens)


async def connected_to(server: Server, wanted: set[int]) -> httpx.AsyncClient:
    """A client whose one connection is to one of these edges."""
    while True:
        opened = client_of(server.url)
        if (await opened.get("/cluster")).json()["frontend"]["pid"] in wanted:
            return opened
        await opened.aclose()


def test_edges_answer_as_one(server: Server) -> None:
    asyncio.run(run_all(server.url, [body(seed, max_tokens=8) for seed in range(12)]))
    for _ in range(20):
        cached_of(server.url, body(99, max_tokens=8))
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
        assert cached_of(server.url, body(99, max_tokens=8))
    assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=60, verify=NO_TLS).is_success
    assert not cached_of(server.url, body(99, max_tokens=8)), "every edge knows of the reset"


def test_connections_spread_over_edges(server: Server) -> None:
    async def pids() -> Counter[int]:
        clients = [client_of(server.url) for _ in range(48)]
        answers = await asyncio.gather(*(opened.get("/cluster") for opened in clients))
        for opened in clients:
            await opened.aclose()
        return Counter(answer.json()["frontend"]["pid"] for answer in answers)

    counted = asyncio.run(pids())
    assert counted == dict.fromkeys(edges(server), 48 // EDGES)


def test_edges_share_the_cores_with_workers_and_get_no_ctrl_c(server: Server) -> None:
    assert sessions_of(server.processes()) == {os.getsid(server.pid)}
    assert {os.getpgid(edge) for edge in edges(server)}.isdisjoint({os.getpgid(server.pid)})


@pytest.mark.parametrize(
    ("number", "line"),
    [(signal.SIGKILL, "is started again"), (signal.SIGSTOP, "does not answer and is killed")],
)
def test_lost_edge_breaks_its_own_streams_and_returns(
    server: Server, number: signal.Signals, line: str
) -> None:
    """A client of an edge that stands still gets a reset instead of waiting, and others notice nothing."""
    before = edges(server)
    assert len(before) == EDGES
    lost, kept = (Stream(body(number + index, max_tokens=2500)) for index in range(2))

    async def run() -> None:
        victim = edge_of(server)
        breaking, living = await connected_to(server, {victim}), await connected_to(server, before - {victim})
        try:
            ended = asyncio.create_task(lost.run(breaking))
            other = asyncio.create_task(kept.run(living))
            for stream in (lost, kept):
                await stream.under_way.wait()
            seen = await asyncio.to_thread(tokens, server)
            os.kill(victim, number)
            assert not lost.finish_reason, "too late: make the stream longer"
            with pytest.raises(httpx.TransportError):
                await ended
            for _ in range(2 * EDGES):  # the port answers all the time, and no counter falls
                now = await asyncio.to_thread(tokens, server)
                assert now >= seen
                seen = now
            await other
        finally:
            await breaking.aclose()
            await living.aclose()

    asyncio.run(run())
    assert line in server.log()
    eventually(lambda: len(edges(server)) == EDGES)
    assert len(edges(server) & before) == EDGES - 1
    as_far = {**lost.body, "max_tokens": len(lost.pieces)}
    again = asyncio.run(run_all(server.url, [as_far, kept.body]))
    assert lost.text.startswith(again[0].text)
    assert again[1].outcome == kept.outcome
    assert again[0].usage["prompt_tokens_details"]["cached_tokens"]
    eventually(lambda: len({edge_of(server) for _ in range(4 * EDGES)}) == EDGES)


KILLS = 3
CHAINS = 4


def test_acknowledged_response_survives_its_edge(server: Server) -> None:
    """Clients continue chains while edge after edge is killed; every edge then has all that they received."""
    stop = Event()
    chains: list[list[dict[str, Any]]] = [[] for _ in range(CHAINS)]

    def talk(chain: list[dict[str, Any]], *, stream: bool) -> None:
        while not stop.is_set():
            previous = {"previous_response_id": chain[-1]["id"]} if chain else {}
            asked = {"input": f"turn {len(chain)}", "max_output_tokens": 4, "stream": stream, **previous}
            with suppress(httpx.TransportError):  # its edge was killed
                reply = httpx.post(
                    f"{server.url}/v1/responses", json=asked, timeout=EVENTUALLY_S_MAX, verify=NO_TLS
                )
                if not stream:
                    assert reply.status_code == 200, reply.text
                    chain.append(reply.json())
                elif (last := events_of(reply)[-1])["type"] == "response.incomplete":
                    chain.append(last["response"])

    with ThreadPoolExecutor() as threads:
        talking = [threads.submit(talk, chain, stream=bool(at % 2)) for at, chain in enumerate(chains)]
        try:
            for kill in range(KILLS):
                eventually(lambda least=2 * kill + 2: all(len(chain) >= least for chain in chains))
                eventually(lambda: len(edges(server)) == EDGES)
                os.kill(edge_of(server), signal.SIGKILL)
        finally:
            stop.set()
        for talk_done in talking:
            talk_done.result()
    for chain in chains:
        for response in chain:
            assert get(server, f"/v1/responses/{response['id']}").json() == response
        items: list[dict[str, Any]] = []
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            after = f"&after={items[-1]['id']}" if items else ""
            page = get(server, f"/v1/responses/{chain[-1]['id']}/input_items?order=asc&limit=7{after}").json()
            items += page["data"]
        texts = [item["content"][0]["text"] for item in items if item["role"] == "user"]
        assert texts == [f"turn {index}" for index in range(len(chain))]


LINES = 120


def test_batch_has_each_line_once_whatever_edge_is_killed(server: Server) -> None:
    """Each edge in turn is killed while lines are answered, so one of them runs the batch."""
    asked = {"max_tokens": 16, "ignore_eos": True, "temperature": 0}
    lines = [
        {
            "custom_id": f"line-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"The keeper {index}", **asked},
        }
        for index in range(LINES)
    ]
    content = "\n".join(map(json.dumps, lines))
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=9) as client:
        file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        def answered() -> int:
            counts = client.batches.retrieve(batch.id).request_counts
            return 0 if counts is None else counts.completed

        eventually(lambda: answered() > 0)
        killed = edges(server)
        for edge in killed:
            os.kill(edge, signal.SIGKILL)
        eventually(lambda: len(edges(server) - killed) == EDGES)
        before = answered()
        eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
        assert before < LINES, "it was killed in the middle"
        done = client.batches.retrieve(batch.id)
        assert done.output_file_id is not None
        assert done.error_file_id is None
        found = [json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()]
        assert [line["custom_id"] for line in found] == [line["custom_id"] for line in lines]
        alone = client.completions.create(model="keeper", prompt="The keeper 7", extra_body=asked)
        assert found[7]["response"]["body"]["choices"][0]["text"] == alone.choices[0].text
