"""The Mooncake of a detached server outlives every other process of it, and `tidemill down` ends it."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.lifecycle.test_detached import SIZES, Detached
from tests.support.e2e.faults import MASTER, OWNER, STORE, SUPERVISOR
from tests.support.e2e.server import READY, eventually

pytestmark = pytest.mark.slow

MOONCAKE = ("--store", "mooncake?size=128MiB&ports=open&timeout=1s")


@pytest.fixture(scope="module")
def detached() -> Iterator[Detached]:
    detached = Detached()
    try:
        status, out, err = detached.run("serve", "keeper", "--port", "0", *SIZES, *MOONCAKE, "--detach")
        assert status == 0, out + err
        assert out.startswith(READY)
        yield detached
        status, out, err = detached.run("down")
        assert status == 0, err
        eventually(detached.nothing_is_left)
    finally:
        for process in detached.processes():
            with suppress(psutil.Error):
                process.kill()


def pids(detached: Detached, *names: str) -> list[int]:
    return [detached.part(name).pid for name in names]


def answer(detached: Detached, seed: int) -> dict[str, Any]:
    rng = Random(seed)
    prompt = [rng.randrange(5, 800) for _ in range(300)]
    body = {"model": "keeper", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{detached.url}/v1/completions", json=body, timeout=300)
    assert reply.is_success, reply.text
    return reply.json()


def restored(detached: Detached, seeds: Iterator[int]) -> bool:
    """Return whether new workers find in the store what earlier ones have stored now."""
    choices: dict[int, Any] = {}
    published = counter(detached, "published_bytes")

    def are_stored() -> bool:
        seed = next(seeds)
        choices[seed] = answer(detached, seed)["choices"]
        return counter(detached, "published_bytes") > published

    eventually(are_stored)
    before = detached.workers()
    for row in detached.worker_rows():
        os.kill(row["info"]["pid"], signal.SIGKILL)

    def are_new() -> bool:
        found = detached.workers()
        return len(found) == len(before) and found.isdisjoint(before)

    eventually(are_new)
    found = {seed: answer(detached, seed) for seed in choices}
    assert {seed: reply["choices"] for seed, reply in found.items()} == choices
    return any(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in found.values())


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
