"""Edges of a killed detached endpoint complete their answers and end, unless `tidemill down` ends them."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.e2e.detached import Detached
from tests.support.e2e.faults import EDGE
from tests.support.e2e.server import eventually, sessions_of
from tests.support.e2e.streams import Stream, client_of, completion, outcomes_of
from tidemill.cluster.processes.system.children import endpoint_pid

pytestmark = pytest.mark.slow

EDGES = 2
SIZES = ("--decode", "1", "--prefill", "1", "--memory", "64MiB")
OPTIONS = (*SIZES, "--frontends", str(EDGES), "--shutdown-timeout", "1")
"""Answers take longer than the time that a server has for its end."""


@pytest.fixture(scope="module")
def detached() -> Iterator[Detached]:
    with Detached() as detached:
        detached.serve(*OPTIONS)
        yield detached


def edges(detached: Detached) -> set[int]:
    return {process.pid for process in detached.parts(EDGE)}


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
    if then is None:
        await asyncio.gather(*running)
        return
    await asyncio.to_thread(then)
    await asyncio.gather(*running, return_exceptions=True)


def test_edges_of_a_killed_endpoint_complete_their_answers_and_end(detached: Detached) -> None:
    before = edges(detached)
    assert len(before) == EDGES
    sessions = sessions_of(detached.processes())
    assert len(sessions) == 1
    kept = streams(2 * EDGES, max_tokens=600)
    asyncio.run(kill_endpoint_under(detached, kept))
    eventually(detached.serves)
    eventually(lambda: edges(detached).isdisjoint(before) and len(edges(detached)) == EDGES)
    again = outcomes_of(detached.url, [stream.body for stream in kept])
    assert again == [stream.outcome for stream in kept]
    assert sessions_of(detached.processes()) == sessions


def test_down_ends_edges_of_a_killed_endpoint(detached: Detached) -> None:
    """Their answers are still in progress, because the worker stands still, and another endpoint has begun to
    start."""
    before, killed = edges(detached), detached.endpoint()
    [worker] = [row["info"]["pid"] for row in detached.worker_rows() if row["info"]["role"] == "decode"]
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
