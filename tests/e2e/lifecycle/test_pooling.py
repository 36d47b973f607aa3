"""Embeddings from a real cluster: prefill workers make them, and when one is killed others make the same."""

import asyncio
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.support.e2e.server import Server, eventually
from tests.support.e2e.streams import client_of

TEXTS = [
    "Alice keeps the key in the harbor. " * 10 + f"Bob is now at the mill {index}." for index in range(48)
]
ARGUMENTS = ("keeper", "--convert", "embed", "--prefill", "2", "--decode", "1", "--port", "0")


def metrics_of(server: Server) -> str:
    return httpx.get(f"{server.url}/metrics").text


def busy_workers(server: Server) -> list[int]:
    """Return the processes of workers that compute rows, as of their last heartbeats."""
    return [row["info"]["pid"] for row in server.workers("prefill") if row["load"]["running_rows"]]


async def embedded(client: httpx.AsyncClient, texts: Sequence[str]) -> list[str]:
    reply = await client.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"})
    assert reply.status_code == 200, reply.text
    return [row["embedding"] for row in reply.json()["data"]]


async def embed_while_one_is_killed(server: Server) -> tuple[list[str], list[list[str]]]:
    async with client_of(server.url) as client:
        wanted = [row for text in TEXTS for row in await embedded(client, [text])]
        await client.post("/reset_prefix_cache")
        asked = [asyncio.create_task(embedded(client, TEXTS)) for _ in range(8)]
        while not (busy := await asyncio.to_thread(busy_workers, server)):
            assert not all(task.done() for task in asked)
        os.kill(busy[0], signal.SIGKILL)
        return wanted, await asyncio.gather(*asked)


def test_embeddings_are_the_same_when_a_worker_is_killed(tmp_path: Path) -> None:
    with Server([*ARGUMENTS, "--max-num-batched-tokens", "192"], tmp_path / "log") as server:
        wanted, found = asyncio.run(embed_while_one_is_killed(server))
        assert len(set(wanted)) == len(TEXTS)
        assert found == [wanted] * len(found)
        rows = httpx.get(f"{server.url}/cluster/requests").json()["requests"]
        assert {row["decode"].partition("-")[0] for row in rows} == {"prefill"}
        moved = re.search(r"^tidemill:request_migrations_total\S* (\S+)", metrics_of(server), re.MULTILINE)
        assert moved is not None
        assert float(moved[1]) > 0, "the worker that was killed had nothing to do"
        eventually(lambda: len(server.workers("prefill")) == 2)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 400
