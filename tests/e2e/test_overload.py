"""Many streams on one edge, clients that do not read, and a flood: no token is lost and memory is bounded.
Excess requests are refused immediately, and clients that read nothing are disconnected.

FLOOD_S=60 pytest tests/e2e/test_overload.py -s -k flood measures a flood of a minute.
Its goodput stays within a tenth of its peak.
"""

import asyncio
import json
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.support.e2e.load import Client, Outcome, at_rate, client_of, in_turns, paced_server, text_of
from tests.support.e2e.server import NO_TLS, Server, command_of, eventually
from tests.support.e2e.streams import Body, completion
from tests.support.sockets import connected

pytestmark = pytest.mark.slow

SIZES = ("max_num_batched_tokens", "max_num_seqs")
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
TOKENS_PER_S = 320  # of each of two workers
PROMPT_TOKENS = 64
CAPACITY = 2 * TOKENS_PER_S / PROMPT_TOKENS  # requests in a second
NEW_TOKENS = 4
DEADLINE = {"x-slo-ttft-ms": "3000"}
FLOOD_GROWTH_MIB_MAX = 64
FLOOD_S = float(os.environ.get("FLOOD_S", "10"))
MEASURES = "FLOOD_S" in os.environ  # otherwise others use the machine, too
GOODPUT_MIN = 0.9  # of the peak
FILL_S = 3.0
"""The time until the queue is as long as the deadline allows."""


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    """One model whose prompts cost nothing, with RUNNING rows, so that the excess waits. Another model has a
    bounded number of prompt tokens per second."""
    groups = [{"role": "mixed", "replicas": 2, "memory": "1GiB"}]
    models = [
        {"served_model_name": name, "groups": groups, "engine": dict(zip(SIZES, sizes, strict=True))}
        for name, sizes in (("paced", (10**8, RUNNING // 2)), ("flooded", (TOKENS_PER_S, 32)))
    ]
    with paced_server(*models, send_timeout=2.0) as server:
        yield server


def body(max_tokens: int, prompt: Sequence[int] = PROMPT, **more: object) -> Body:
    return completion([*prompt], max_tokens, **{"model": "paced", "stream": True, **more})


def check(outcomes: list[Outcome], num_tokens: int) -> None:
    expected = text_of(PROMPT, num_tokens)
    for outcome in outcomes:
        assert outcome.status == 200
        assert outcome.text == expected


def memory_mib(server: Server) -> dict[str, int]:
    """Return the memory of the edge, the routers and the workers."""
    edge, *others = server.processes()
    parts = [process for process in others if command_of(process).startswith(("ray::Router", "ray::Worker"))]
    assert len(parts) == 6
    found = {f"{command_of(process)} {process.pid}": process for process in parts} | {"edge": edge}
    return {name: process.memory_info().rss >> 20 for name, process in found.items()}


def edge_mib(server: Server) -> float:
    return memory_mib(server)["edge"]


def nothing_runs(server: Server) -> bool:
    load = httpx.get(f"{server.url}/load", timeout=300, verify=NO_TLS).json()["server_load"]
    loads = [row["load"] for row in server.workers()]
    return load == 0 and not any(load["running_rows"] or load["waiting_rows"] for load in loads)


def aborted(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=300, verify=NO_TLS).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if ABORTED in line)


async def test_many_streams_run_beside_waiting_and_idle_connections(server: Server) -> None:
    async with client_of(server.url) as client, AsyncExitStack() as idle:
        await in_turns(client, 50, 50, body(2))
        before_mib = edge_mib(server)
        for _ in range(CONNECTIONS):
            await idle.enter_async_context(connected(server.url))
        outcomes = await in_turns(client, RUNNING + WAITING, RUNNING + WAITING, body(ANSWER_TOKENS))
        assert edge_mib(server) - before_mib < GROWTH_MIB_MAX
    check(outcomes, ANSWER_TOKENS)
    await asyncio.to_thread(eventually, lambda: nothing_runs(server))


async def test_clients_that_do_not_read_are_cut_and_others_get_all_tokens(server: Server) -> None:
    deaf = body(LONG_TOKENS, n=CHOICES, stream_options={"continuous_usage_stats": True})
    data = json.dumps(deaf).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    before_mib = edge_mib(server)

    async with client_of(server.url) as client, AsyncExitStack() as listening:
        for _ in range(DEAF):
            _, writer = await listening.enter_async_context(connected(server.url, 4096))
            writer.write(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        outcomes = await in_turns(client, 20, 100, body(ANSWER_TOKENS))
        await asyncio.to_thread(eventually, lambda: nothing_runs(server))
    check(outcomes, ANSWER_TOKENS)
    # none of them came to its end
    await asyncio.to_thread(eventually, lambda: aborted(server) == DEAF * CHOICES)
    assert edge_mib(server) - before_mib < GROWTH_MIB_MAX


def prompt(number: int) -> list[int]:
    """Return a new prompt, of which no page is cached."""
    return [100 + number % 700, 100 + number // 700, *[100 + index for index in range(PROMPT_TOKENS - 2)]]


def flooding(number: int) -> Body:
    return body(NEW_TOKENS, prompt(number), model="flooded")


def check_taken(outcomes: Sequence[Outcome], start: int = 0) -> None:
    """Every answer is exact, or was refused in whole with a time to come back."""
    for outcome in outcomes:
        if outcome.status in {429, 503}:  # immediately, or at its deadline: a machine may be slow
            assert int(outcome.retry_after) >= 1
            assert not outcome.text
            continue
        assert outcome.status == 200
        assert outcome.text == text_of(prompt(start + outcome.number), NEW_TOKENS)


def goodput(outcomes: Sequence[Outcome], since_s: float, until_s: float) -> float:
    """Answers in a second that ended between the two times."""
    done = [outcome for outcome in outcomes if outcome.status == 200 and since_s <= outcome.ended_s < until_s]
    return len(done) / (until_s - since_s)


async def test_flood_changes_nothing_for_admitted_requests(server: Server) -> None:
    async with client_of(server.url) as client:
        await flood_of(client, server)


async def peak_of(client: Client) -> float:
    peak_s = FLOOD_S / 3
    full = await at_rate(client, 1.5 * CAPACITY, peak_s, flooding, DEADLINE)
    check_taken(full)
    began_s = full[0].sent_s
    return goodput(full, began_s + FILL_S, began_s + peak_s)


async def flood_of(client: Client, server: Server) -> None:
    check_taken([await client.call(0, flooding(0), {})])
    peak = await peak_of(client) if MEASURES else 0.0
    before = memory_mib(server)

    flood_task = asyncio.create_task(
        at_rate(client, 10 * CAPACITY, FLOOD_S, lambda number: flooding(1000 + number), DEADLINE)
    )
    await asyncio.sleep(FILL_S)  # the queue is full then, which is the case that is of interest
    calm = await at_rate(
        client,
        1,
        FLOOD_S - FILL_S - 1,
        lambda number: flooding(9000 + number),
        {**DEADLINE, "authorization": "Bearer calm"},
    )
    flood = await flood_task
    check_taken(flood, 1000)
    check_taken(calm, 9000)
    after = memory_mib(server)

    began_s = flood[0].sent_s
    under_flood = goodput([*flood, *calm], began_s + FILL_S, began_s + FLOOD_S)
    refused = sum(outcome.status == 429 for outcome in flood)
    waits = sorted(outcome.first_s - outcome.sent_s for outcome in flood if outcome.status == 200)
    grown = {name: after[name] - before[name] for name in after}
    sizes = {name: (before[name], after[name]) for name in after}
    figures = (
        f"peak {peak:.1f}/s, under a flood {under_flood:.1f}/s, {refused} of {len(flood)} refused, first "
        f"tokens after {waits[len(waits) // 2]:.2f} s, the last after {waits[-1]:.2f} s, {len(calm)} of "
        f"another tenant answered; MiB before and after: {sizes}"
    )
    assert refused > len(flood) / 4, figures
    assert under_flood > GOODPUT_MIN * peak, figures
    # a slow machine may pass a deadline, but only a full queue refuses immediately
    statuses = {outcome.status for outcome in calm}
    assert 200 in statuses, "another tenant's queue is not theirs"
    assert 429 not in statuses, "another tenant's queue is not theirs"
    assert max(grown.values()) < FLOOD_GROWTH_MIB_MAX, figures
    sys.stdout.write(f"{figures}\n")
