"""Whole servers from start to end: the demo, as the README has it, and a worker whose memory is wrong."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.e2e.leaky import MARK
from tests.support.e2e.server import Server, eventually, run_cli
from tests.support.e2e.streams import client_of, run_all, run_while

pytestmark = pytest.mark.slow


def test_demo() -> None:
    ended, left = run_cli("demo")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 of 6 answers are right" in ended.stdout
    assert not left


def bodies(count: int) -> list[dict[str, Any]]:
    rng = Random(3)
    return [
        {
            "model": "keeper",
            "prompt": [rng.randrange(5, 800) for _ in range(200)],
            "max_tokens": 400,
            "temperature": 0,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


async def cancelled(url: str) -> None:
    body = {"prompt": [7] * 90, "max_tokens": 400, "stream": True, "ignore_eos": True}
    async with (
        client_of(url) as client,
        client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": MARK}) as response,
    ):
        async for _ in response.aiter_lines():
            return


def test_planted_leak_ends_its_worker(tmp_path: Path) -> None:
    arguments = ("keeper", "--port", "0", "--mixed", "2", "--memory", "64MiB")
    log = tmp_path / "log"
    server = Server(arguments, log, "tests.support.e2e.leaky")
    try:
        calm = asyncio.run(run_all(server.url, bodies(6)))
        before = {row["info"]["worker"] for row in server.workers()}

        def leak() -> None:
            asyncio.run(cancelled(server.url))
            eventually(lambda: "the owners of this worker's memory are wrong" in log.read_text())

        streams = run_while(server.url, bodies(6), leak)
        assert [stream.outcome for stream in streams] == [stream.outcome for stream in calm]

        def has_a_successor() -> bool:
            now = {row["info"]["worker"] for row in server.workers()}
            return len(now) == 2 and len(now & before) == 1

        eventually(has_a_successor)
        assert f"{MARK}." in log.read_text(), "the newest events"
        assert server.stop() == 0
    finally:
        server.kill_everything()


def test_killed_answer_of_the_demo_is_the_calm_one() -> None:
    ended, left = run_cli("demo", "--kill")
    assert ended.returncode == 0, ended.stderr
    assert "kill -9 " in ended.stdout
    assert ended.stdout.endswith("diff: none\n600 tokens, all equal; 2 workers\n")
    assert not left
