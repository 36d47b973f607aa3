"""A worker of two ranks behind a prefill worker of one gives the tokens of one process, also when ranks
crash, with both ways to sum."""

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import psutil
import pytest

from tests.support.e2e.server import Server, command_of, eventually
from tests.support.e2e.streams import run_all, run_while
from tidemill import LLM, SamplingParams

pytestmark = pytest.mark.slow

Outcome = tuple[str, str | None, int]
"""The text, why it ends, and how many tokens it has."""

STREAMS = 8
GROUP = ["--prefill", "1", "--decode", "1", "--decode-tensor-parallel-size", "2", "--memory", "64MiB"]


def bodies() -> list[dict[str, Any]]:
    rng = Random(7)
    return [
        {
            "model": "keeper",
            "prompt": [rng.randrange(5, 890) for _ in range(60 + 30 * index)],
            "max_tokens": 300,
            "temperature": index % 2,
            "seed": index,
            "ignore_eos": True,
        }
        for index in range(STREAMS)
    ]


@pytest.fixture(scope="module")
def wanted() -> list[Outcome]:
    """Return the engine's answers in one process."""
    asked = bodies()
    fields = ("max_tokens", "temperature", "seed", "ignore_eos")
    params = [SamplingParams(**{field: body[field] for field in fields}) for body in asked]
    with LLM("keeper", memory="64MiB") as alone:
        answers = [output.outputs[0] for output in alone.generate([body["prompt"] for body in asked], params)]
    return [(answer.text, answer.finish_reason, len(answer.token_ids)) for answer in answers]


@pytest.fixture(scope="module", params=["exact", "fast"])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """It must be stopped without leaving a process."""
    way = ["--tensor-parallel-reduce", request.param, "--allow-inexact-groups"]
    server = Server(["keeper", "--port", "0", *GROUP, *way], tmp_path_factory.mktemp("group") / "log")
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def rank_of(server: Server) -> psutil.Process:
    """The process of the group that is not its leader: awaited, and alone, after a restart."""
    found: list[psutil.Process] = []

    def is_alone() -> bool:
        found[:] = [process for process in server.processes() if "ray::RankActor" in command_of(process)]
        return len(found) == 1

    eventually(is_alone)
    return found[0]


def leader_of(server: Server) -> psutil.Process:
    eventually(lambda: len(server.workers("decode")) == 1)
    (row,) = server.workers("decode")
    return psutil.Process(row["info"]["pid"])


def test_group_gives_the_tokens_of_one_process(server: Server, wanted: list[Outcome]) -> None:
    """The prompts come from a prefill worker of one rank, as shards that two ranks fetch."""
    assert [stream.outcome for stream in asyncio.run(run_all(server.url, bodies()))] == wanted
    eventually(lambda: server.counter("store_gets_as_hit") > 0)  # with the next heartbeat


@pytest.mark.parametrize("victim", [rank_of, leader_of])
def test_streams_survive_the_loss_of_a_rank(
    server: Server,
    wanted: list[Outcome],
    victim: Any,  # noqa: ANN401 - one of two functions
) -> None:
    """kill -9 while all streams run: each ends with the exact tokens, on the next life of the group."""
    before = {rank_of(server).pid, leader_of(server).pid}

    streams = run_while(server.url, bodies(), lambda: victim(server).kill())
    assert [stream.outcome for stream in streams] == wanted
    assert before.isdisjoint({rank_of(server).pid, leader_of(server).pid})
    eventually(lambda: not any(psutil.pid_exists(pid) for pid in before))


def test_frozen_rank_of_an_idle_group_is_noticed_before_a_request_arrives(
    server: Server, wanted: list[Outcome]
) -> None:
    """The worker is out until the rank goes on, and then it is the same life."""
    rank, life = rank_of(server), leader_of(server).pid
    rank.suspend()
    try:
        eventually(lambda: not server.workers("decode"))
    finally:
        rank.resume()
    eventually(lambda: [row["info"]["pid"] for row in server.workers("decode")] == [life])
    assert [stream.outcome for stream in asyncio.run(run_all(server.url, bodies()))] == wanted
