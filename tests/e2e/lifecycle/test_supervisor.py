"""The supervisor is killed amid streams: every stream is exact, and the fleet can be scaled again."""

import asyncio
import sys
import time
from collections.abc import Iterator
from random import Random

import httpx
import pytest

from tests.support.e2e.faults import SUPERVISOR, kill, process_of, run, when
from tests.support.e2e.history import Ask, Call, asks, broken, pauses_s, percentile
from tests.support.e2e.server import Server, eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("keeper", "--port", "0", "--prefill", "1", "--decode", "1", "--memory", "64MiB")
    server = Server(options, tmp_path_factory.mktemp("supervisor") / "log")
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


@pytest.fixture(scope="module")
def asked() -> list[Ask]:
    return asks(Random(9), 16, num_tokens=100, max_tokens=240)


def scaled(server: Server, num_decode: int) -> bool:
    body = {"workers": {"decode": num_decode}}
    return httpx.post(f"{server.url}/cluster/scale", json=body, timeout=300).is_success


def test_streams_are_unchanged_by_the_loss_of_the_supervisor(
    server: Server, asked: list[Ask], calm: list[Call]
) -> None:
    before = {row["info"]["worker"] for row in server.workers()}
    found = asyncio.run(run(server, asked, "lost", [when(0, 20, kill(SUPERVISOR))]))
    assert found.struck
    assert not found.late, "too late: make the streams longer"
    assert [broken(*pair) for pair in zip(found.calls, calm, strict=True)] == [[] for _ in calm]
    assert {row["info"]["worker"] for row in server.workers()} == before, "adopted, not restarted"
    pauses = pauses_s(found.calls, found.struck[0].at_s)
    sys.stdout.write(f"pauses of {len(pauses)} streams: p99 {percentile(pauses, 99):.2f} s\n")


def test_fleet_scales_again_after_the_loss_of_the_supervisor(server: Server) -> None:
    """Kill it again while a worker starts, and while one leaves."""
    before = {row["info"]["worker"] for row in server.workers()}
    for num_decode in (2, 1):
        process_of(server, SUPERVISOR).kill()
        killed_s = time.monotonic()
        eventually(lambda count=num_decode: scaled(server, count))
        sys.stdout.write(f"scaled {time.monotonic() - killed_s:.1f} s after the kill\n")
        process_of(server, SUPERVISOR).kill()
        eventually(lambda count=num_decode: len(server.workers("decode")) == count)
    assert {row["info"]["worker"] for row in server.workers()} == before
    roles = httpx.get(f"{server.url}/cluster/scale", timeout=300).json()["roles"]
    assert [(role["role"], role["workers"]) for role in roles] == [("prefill", 1), ("decode", 1)]
