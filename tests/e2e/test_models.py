"""Two models behind one endpoint, each with its own workers: what happens to one does not reach the other."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, eventually, run_cli
from tests.e2e.streams import Stream, client_of, run_all

FILE = """
models:
- model: keeper
  served-model-name: [org/keeper, keeper]
- model: keeper
  served-model-name: spare
  mixed: 1
  max-model-len: 256
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.yaml").write_text(FILE)
    arguments = ["--model-config", str(folder / "models.yaml"), "--port", "0", "--memory", "16MiB"]
    server = Server(arguments, folder / "log")
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill_everything()


def body_of(model: str, max_tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": [5 + 7 * index % 800 for index in range(150)],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def test_both_answer_under_all_names(server: Server) -> None:
    streams = asyncio.run(
        run_all(server.url, [body_of(name, 20) for name in ("org/keeper", "keeper", "spare")])
    )
    assert len({stream.outcome for stream in streams}) == 1, "the same weights"
    too_long = {**body_of("spare", 20), "prompt": [7] * 300}
    assert httpx.post(f"{server.url}/v1/completions", json=too_long, timeout=60).status_code == 400
    names = {row["info"]["name"]: row["model"] for row in server.workers()}
    assert names == {
        "org-keeper-prefill-0": "org/keeper",
        "org-keeper-decode-0": "org/keeper",
        "spare-mixed-0": "spare",
    }
    ended, _ = run_cli("status", "--url", server.url)
    assert "spare-mixed-0" in ended.stdout


def test_a_worker_that_dies_is_missed_by_its_own_model_alone(server: Server) -> None:
    (before,) = server.workers("mixed")
    body = body_of("keeper", 1500)

    async def run() -> Stream:
        stream = Stream(body)
        async with client_of(server.url) as client, asyncio.TaskGroup() as running:
            running.create_task(stream.run(client))
            await stream.under_way.wait()
            os.kill(before["info"]["pid"], signal.SIGKILL)
        return stream

    assert asyncio.run(run()).usage["completion_tokens"] == 1500
    eventually(
        lambda: any(row["info"]["worker"] != before["info"]["worker"] for row in server.workers("mixed"))
    )
    spare, keeper = asyncio.run(run_all(server.url, [body_of("spare", 20), body_of("keeper", 20)]))
    assert spare.outcome == keeper.outcome
