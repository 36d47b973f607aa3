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
  served_model_name: [org/keeper, keeper]
  groups:
  - {role: prefill, memory: 16MiB}
  - {role: decode, memory: 24MiB}
- model: keeper
  served_model_name: spare
  max_model_len: 256
  groups:
  - {role: mixed, memory: 16MiB}
edge:
  port: 1
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "cluster.yaml").write_text(FILE)
    arguments = ["--config", str(folder / "cluster.yaml"), "--port", "0"]
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


def memory_of(server: Server, **order: object) -> dict[str, dict[str, Any]]:
    """What `tidemill memory` shows of the workers, by name, after an order if there is one."""
    url = f"{server.url}/cluster/memory"
    answer = httpx.post(url, json=order, timeout=60) if order else httpx.get(url, timeout=60)
    assert answer.status_code == 200, answer.text
    return {row["name"]: row for row in answer.json()["workers"]}


def test_groups_of_a_model_bring_unequal_shares_and_lend_each_other_all_of_them(server: Server) -> None:
    names = ("org-keeper-prefill-0", "org-keeper-decode-0")
    eventually(lambda: memory_of(server).keys() >= set(names))
    prefill, decode = (memory_of(server)[name] for name in names)
    assert prefill["share_bytes"] <= 16 * MIB < decode["share_bytes"] <= 24 * MIB
    total_bytes = prefill["share_bytes"] + decode["share_bytes"]
    assert min(prefill["max_bytes"], decode["max_bytes"]) >= total_bytes

    most_bytes = total_bytes - prefill["floor_bytes"]
    memory_of(server, worker=names[1], budget=most_bytes)
    eventually(lambda: memory_of(server)[names[1]]["budget_bytes"] == most_bytes)
    assert sum(memory_of(server)[name]["budget_bytes"] for name in names) <= total_bytes
    memory_of(server, worker=names[1], budget=None)
    (stream,) = asyncio.run(run_all(server.url, [body_of("keeper", 20)]))
    assert stream.usage["completion_tokens"] == 20
