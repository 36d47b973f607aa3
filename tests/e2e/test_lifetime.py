"""Whole servers from start to end: the demo, as the README has it, and a worker whose memory is wrong."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from tests.support.e2e.altered import LEAKS
from tests.support.e2e.server import Server, eventually, run_cli
from tests.support.e2e.streams import client_of, completion, outcomes_of, random_prompt, run_while

pytestmark = pytest.mark.slow


def test_demo() -> None:
    ended, left = run_cli("demo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers are right" in ended.stdout
    assert not left


async def cancelled(url: str) -> None:
    body = {"prompt": [7] * 90, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with (
        client_of(url) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": LEAKS}) as response,
    ):
        async for _ in response.aiter_lines():
            return


def test_planted_leak_ends_its_worker(tmp_path: Path) -> None:
    arguments = ("keeper", "--port", "0", "--mixed", "2", "--memory", "64MiB")
    rng = Random(3)
    bodies = [completion(random_prompt(rng, 200), 400) for _ in range(6)]
    with Server(arguments, tmp_path / "log", "tests.support.e2e.altered") as server:
        calm, before = outcomes_of(server.url, bodies), server.lives()

        def leak() -> None:
            asyncio.run(cancelled(server.url))
            eventually(lambda: "the owners of this worker's memory are wrong" in server.log())

        streams = run_while(server.url, bodies, leak)
        assert [stream.outcome for stream in streams] == calm

        def has_a_successor() -> bool:
            now = server.lives()
            return len(now) == 2 and len(now.items() & before.items()) == 1

        eventually(has_a_successor)
        assert f"{LEAKS}." in server.log(), "the newest events"


def test_killed_answer_of_the_demo_is_the_calm_one() -> None:
    ended, left = run_cli("demo", "--kill")
    assert ended.returncode == 0, ended.stderr
    assert "kill -9 " in ended.stdout
    assert ended.stdout.endswith("diff: none\n600 tokens, all equal; 2 workers\n")
    assert not left
