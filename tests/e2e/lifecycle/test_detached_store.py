"""The Mooncake of a detached server outlives every other process of it, and `tidemill down` ends it."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from random import Random

import psutil
import pytest

from tests.support.e2e.detached import Detached
from tests.support.e2e.faults import MASTER, OWNER, STORE, SUPERVISOR
from tests.support.e2e.server import eventually
from tests.support.e2e.streams import Outcome, Stream, completion, random_prompt, run_all

pytestmark = pytest.mark.slow

SIZES = ("--prefill", "1", "--decode", "1", "--memory", "64MiB")
MOONCAKE = ("--store", "mooncake?size=128MiB&ports=open&timeout=1s")


@pytest.fixture(scope="module")
def detached() -> Iterator[Detached]:
    with Detached() as detached:
        detached.serve(*SIZES, *MOONCAKE)
        yield detached
        status, _, err = detached.run("down")
        assert status == 0, err
        eventually(detached.nothing_is_left)


def pids(detached: Detached, *names: str) -> list[int]:
    return [detached.part(name).pid for name in names]


def answers(detached: Detached, *seeds: int) -> list[Stream]:
    bodies = [completion(random_prompt(Random(seed), 300), 8) for seed in seeds]
    return asyncio.run(run_all(detached.url, bodies))


def restored(detached: Detached, seeds: Iterator[int]) -> bool:
    """Return whether new workers find in the store what earlier ones have stored now."""
    known: dict[int, Outcome] = {}
    published = counter(detached, "published_bytes")

    def are_stored() -> bool:
        seed = next(seeds)
        known[seed] = answers(detached, seed)[0].outcome
        return counter(detached, "published_bytes") > published

    eventually(are_stored)
    before = detached.workers()
    for row in detached.worker_rows():
        os.kill(row["info"]["pid"], signal.SIGKILL)

    def are_new() -> bool:
        found = detached.workers()
        return len(found) == len(before) and found.isdisjoint(before)

    eventually(are_new)
    found = answers(detached, *known)
    assert [stream.outcome for stream in found] == [*known.values()]
    return any(stream.usage["prompt_tokens_details"]["cached_tokens"] for stream in found)


def counter(detached: Detached, name: str) -> float:
    return sum(row["load"]["counters"].get(name, 0) for row in detached.worker_rows())


def test_store_outlives_endpoint_supervisor_and_workers(detached: Detached) -> None:
    before = pids(detached, MASTER, OWNER)
    assert restored(detached, count(100))
    psutil.Process(detached.endpoint()).kill()
    detached.part(SUPERVISOR).kill()
    eventually(detached.serves)
    eventually(lambda: detached.run("scale")[0] == 0)
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
