"""A model without requests has no workers; the next requests are held while they start, and are exact."""

import asyncio
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.e2e.server import EVENTUALLY_S_MAX, Server, command_of, eventually
from tests.support.e2e.streams import Body, client_of, completion
from tidemill.cluster.metrics import specs
from tidemill.cluster.metrics.scrape import scraped

pytestmark = pytest.mark.slow

HELD_MAX = 2
CONFIG = """
models:
- model: keeper
  groups:
  - {{role: prefill, memory: 64MiB}}
  - {{role: decode, memory: 64MiB}}
  autoscaling:
    metrics_interval_s: 0.25
    upscale_delay_s: 1
    downscale_delay_s: 1
    downscale_to_zero_delay_s: 2
    max_queued_requests: {held_max}
edge: {{port: 0, frontends: {frontends}}}
"""


@pytest.fixture(scope="module", params=[1, 2])
def server(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server that answers itself, or whose edges have joined it."""
    folder = tmp_path_factory.mktemp("zero")
    config = folder / "cluster.yaml"
    config.write_text(CONFIG.format(held_max=HELD_MAX, frontends=request.param))
    with Server(["--config", str(config)], folder / "log") as server:
        yield server


def body(number: int) -> Body:
    prompt = [5 + (7 * index + number) % 700 for index in range(150)]
    return completion(prompt, 40, temperature=1, seed=number)


async def answer(client: httpx.AsyncClient, number: int) -> str:
    response = await client.post("/v1/completions", json=body(number))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def num_worker_processes(server: Server) -> int:
    return sum("ray::WorkerActor" in command_of(process) for process in server.processes())


def names(server: Server) -> list[str]:
    return sorted(row["info"]["name"] for row in server.workers())


def is_at_zero(server: Server) -> bool:
    return not server.workers() and not num_worker_processes(server)


async def held(client: httpx.AsyncClient) -> float:
    return scraped((await client.get("/metrics")).text).value(specs.HELD, "keeper")


async def until_held(client: httpx.AsyncClient, number: int) -> None:
    async with asyncio.timeout(EVENTUALLY_S_MAX):
        while await held(client) != number:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


async def test_requests_are_held_while_workers_start_and_answered_exactly(server: Server) -> None:
    """One that is cancelled while it is held leaves nothing."""
    async with client_of(server.url) as client:
        expected = [await answer(client, number) for number in range(HELD_MAX)]
        await asyncio.to_thread(eventually, lambda: is_at_zero(server))
        assert (await client.get("/health")).status_code == 200, "a probe must not keep requests away"
        roles = (await client.get("/cluster/scale")).json()["roles"]
        assert [(role["role"], role["workers"]) for role in roles] == [("prefill", 0), ("decode", 0)]

        left = asyncio.create_task(answer(client, 0))
        await until_held(client, 1)
        left.cancel()
        await until_held(client, 0)
        assert (await client.get("/load")).json() == {"server_load": 0}
        await asyncio.to_thread(eventually, lambda: is_at_zero(server))

        began_s = time.monotonic()
        held = [asyncio.create_task(answer(client, number)) for number in range(HELD_MAX)]
        await until_held(client, HELD_MAX)
        refused = await client.post("/v1/completions", json=body(9))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        assert "wait for one already" in refused.json()["error"]["message"]
        assert await asyncio.gather(*held) == expected
        print(f"answered {time.monotonic() - began_s:.1f} s after the first request")  # noqa: T201
        await asyncio.to_thread(eventually, lambda: names(server) == ["decode-0", "prefill-0"])
