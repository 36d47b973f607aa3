"""A worker of two ranks behind a prefill worker of one gives the tokens of one process, with both ways to
sum, also when a rank crashes; with one of them also when its leader crashes or a rank stands still."""

from collections.abc import Iterator
from random import Random

import psutil
import pytest

from tests.support.e2e.alone import keeper_alone
from tests.support.e2e.faults import RANK, process_of
from tests.support.e2e.server import Server, eventually
from tests.support.e2e.streams import Body, Outcome, completion, outcomes_of, random_prompt, run_while

pytestmark = pytest.mark.slow

STREAMS = 8
LEADER = "decode-0"
GROUP = ["--prefill", "1", "--decode", "1", "--decode-tensor-parallel-size", "2", "--memory", "64MiB"]


def bodies() -> list[Body]:
    rng = Random(7)
    return [
        completion(random_prompt(rng, 60 + 30 * index), 300, temperature=index % 2, seed=index)
        for index in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def wanted() -> list[Outcome]:
    with keeper_alone() as alone:
        return alone(bodies())


@pytest.fixture(scope="module", params=["exact", "fast"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """It must be stopped without leaving a process."""
    way = ["--tensor-parallel-reduce", request.param, "--allow-inexact-groups"]
    with Server(["keeper", "--port", "0", *GROUP, *way], tmp_path_factory.mktemp("group") / "log") as server:
        yield server


def test_group_gives_the_tokens_of_one_process(server: Server, wanted: list[Outcome]) -> None:
    """The prompts come from a prefill worker of one rank, as shards that two ranks fetch."""
    assert outcomes_of(server.url, bodies()) == wanted
    eventually(lambda: server.counter("store_gets_as_hit") > 0)  # with the next heartbeat


def pids(server: Server) -> list[int]:
    return [process_of(server, name).pid for name in (RANK, LEADER)]


@pytest.fixture
def exact(server: Server, request: pytest.FixtureRequest) -> Server:
    if "fast" in request.node.name:
        pytest.skip("it does not depend on the way to sum")
    return server


def check_loss(server: Server, wanted: list[Outcome], victim: str) -> None:
    """kill -9 while all streams run: each ends with the exact tokens, on the next life of the group."""
    before = pids(server)
    streams = run_while(server.url, bodies(), process_of(server, victim).kill)
    assert [stream.outcome for stream in streams] == wanted
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in before))
    assert set(before).isdisjoint(pids(server))


def test_streams_survive_the_loss_of_a_rank(server: Server, wanted: list[Outcome]) -> None:
    check_loss(server, wanted, RANK)


def test_streams_survive_the_loss_of_the_leader(exact: Server, wanted: list[Outcome]) -> None:
    check_loss(exact, wanted, LEADER)


def test_frozen_rank_of_an_idle_group_is_noticed_before_a_request_arrives(
    exact: Server, wanted: list[Outcome]
) -> None:
    """The worker is out until the rank goes on, and then it is the same life."""
    rank, (_, life) = process_of(exact, RANK), pids(exact)
    rank.suspend()
    try:
        eventually(lambda: not exact.workers("decode"))
    finally:
        rank.resume()
    eventually(lambda: [row["info"]["pid"] for row in exact.workers("decode")] == [life])
    assert outcomes_of(exact.url, bodies()) == wanted
