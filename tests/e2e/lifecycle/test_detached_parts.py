"""The store and the edges of a detached server outlive its endpoint, and `tidemill down` ends them.

Edges of a killed endpoint complete their answers first, unless `tidemill down` ends them.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.support.e2e.detached import Detached
from tests.support.e2e.faults import EDGE, MASTER, OWNER, STORE, SUPERVISOR
from tests.support.e2e.server import eventually, sessions_of
from tests.support.e2e.streams import (
    Outcome,
    Stream,
    client_of,
    completion,
    outcomes_of,
    random_prompt,
    run_all,
)
from tidemill.cluster.processes.system.children import endpoint_pid

pytestmark = pytest.mark.slow

EDGES = 2
SIZES = ("--prefill", "1", "--decode", "1", "--memory", "64MiB")
MOONCAKE = ("--store", "mooncake?size=128MiB&ports=open&timeout=1s")
OPTIONS = (*SIZES, *MOONCAKE, "--frontends", str(EDGES), "--shutdown-timeout", "1")
"""Answers take longer than the time that a server has for its end."""


@pytest.fixture(scope="module")
def detached() -> Iterator[Detached]:
    with Detached() as detached:
        detached.serve(*OPTIONS)
        yield detached


def pids(detached: Detached, *names: str) -> list[int]:
    return [detached.part(name).pid for name in names]


def edges(detached: Detached) -> set[int]:
    return {process.pid for process in detached.parts(EDGE)}


def wait_for_edges(detached: Detached, before: set[int]) -> None:
    """Wait until the edges of the next endpoint serve alone."""
    eventually(lambda: edges(detached).isdisjoint(before) and len(edges(detached)) == EDGES)
    eventually(detached.serves)


def restored(detached: Detached, seeds: Iterator[int]) -> bool:
    """Return whether new workers find in the store what earlier ones have stored now."""
    known: dict[int, Outcome] = {}
    published = detached.counter("published_bytes")

    def answers(*seeds: int) -> list[Stream]:
        bodies = [completion(random_prompt(Random(seed), 300), 8) for seed in seeds]
        return asyncio.run(run_all(detached.url, bodies))

    def are_stored() -> bool:
        seed = next(seeds)
        known[seed] = answers(seed)[0].outcome
        return detached.counter("published_bytes") > published

    eventually(are_stored)
    detached.replace_workers()
    found = answers(*known)
    assert [stream.outcome for stream in found] == [*known.values()]
    return any(stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in found)


def test_store_outlives_endpoint_supervisor_and_workers(detached: Detached) -> None:
    """The workers outlive the two others as well."""
    before, old = pids(detached, MASTER, OWNER), edges(detached)
    assert restored(detached, count(100))
    lives = detached.lives()
    psutil.Process(detached.endpoint()).kill()
    detached.part(SUPERVISOR).kill()
    wait_for_edges(detached, old)
    eventually(lambda: detached.run("scale")[0] == 0)
    assert detached.lives() == lives
    assert restored(detached, count(200))
    assert pids(detached, MASTER, OWNER) == before


@pytest.mark.parametrize("name", [MASTER, OWNER, STORE])
def test_killed_part_of_the_store_is_started_again_at_its_address(detached: Detached, name: str) -> None:
    before = detached.part(name).pid
    os.kill(before, signal.SIGKILL)

    def is_back() -> bool:
        with suppress(ValueError):
            return before not in pids(detached, name, MASTER, OWNER)
        return False

    eventually(is_back)
    seeds = count(before)  # of prompts that no other test has
    eventually(lambda: restored(detached, seeds))


def streams(count: int, max_tokens: int) -> list[Stream]:
    return [Stream(completion([5 + seed] * 100, max_tokens)) for seed in range(count)]


async def kill_endpoint_under(
    detached: Detached, asked: list[Stream], then: Callable[[], None] | None = None
) -> None:
    """kill -9 of the endpoint when all streams are under way, each on a connection of its own. Return at
    their ends, or after `then` if that is given."""

    async def run(stream: Stream) -> None:
        async with client_of(detached.url) as client:
            await stream.run(client)

    running = [asyncio.create_task(run(stream)) for stream in asked]
    for stream in asked:
        await stream.under_way.wait()
    psutil.Process(detached.endpoint()).kill()
    if then is not None:
        await asyncio.to_thread(then)
    await asyncio.gather(*running, return_exceptions=then is not None)


def test_edges_of_a_killed_endpoint_complete_their_answers_and_end(detached: Detached) -> None:
    before = edges(detached)
    assert len(before) == EDGES
    sessions = sessions_of(detached.processes())
    assert len(sessions) == 1
    kept = streams(2 * EDGES, max_tokens=600)
    asyncio.run(kill_endpoint_under(detached, kept))
    wait_for_edges(detached, before)
    again = outcomes_of(detached.url, [stream.body for stream in kept])
    assert again == [stream.outcome for stream in kept]
    assert sessions_of(detached.processes()) == sessions


def test_down_ends_edges_of_a_killed_endpoint(detached: Detached) -> None:
    """Their answers are still in progress, because the worker stands still, and another endpoint has begun to
    start."""
    before, killed = edges(detached), detached.endpoint()
    [worker] = [row["info"]["pid"] for row in detached.workers("decode")]
    cut = streams(EDGES, max_tokens=1500)

    def down() -> None:
        psutil.Process(worker).suspend()
        root = Path(detached.record.root)
        eventually(lambda: endpoint_pid(root) not in (None, killed))
        assert not any(stream.finish_reason for stream in cut), "too late: make the streams longer"
        assert edges(detached) >= before
        status, _, err = detached.run("down")
        assert status == 0, err

    asyncio.run(kill_endpoint_under(detached, cut, down))
    assert not any(stream.finish_reason for stream in cut)
    eventually(detached.nothing_is_left)
