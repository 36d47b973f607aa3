"""Load for a paced server, from one process and cheaply, and the result of each call."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from tests.support.cluster.fake_engine import answer
from tests.support.e2e.server import Server
from tidemill.cluster.edge.chat.tokenizer_files import load_tokenizer
from tidemill.workers.sources.names import bundled

REUSE_S_MAX = 1.0
"""The server closes connections that are idle for longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one call. Times are of the monotonic clock; `text` is the answer's."""

    number: int
    sent_s: float
    ended_s: float
    status: int
    first_s: float
    text: str
    retry_after: str


def text_of(prompt: Sequence[int], num_tokens: int) -> str:
    """Return the text of the fake engine's answer."""
    decoder = load_tokenizer(bundled()["keeper"]).decoder()
    return "".join(decoder.push(answer(tuple(prompt), index)) for index in range(num_tokens))


@contextmanager
def paced_server(*models: dict[str, Any], **edge: object) -> Generator[Server]:
    """Run a `tests.support.e2e.paced` with these models, as a configuration file has them."""
    common = {"model": "keeper", "ttft_max": 3600, "max_model_len": 4096}
    config = {"models": [{**common, **model} for model in models], "edge": {"port": 0, **edge}}
    with tempfile.TemporaryDirectory(prefix="paced-") as folder:
        file = Path(folder) / "cluster.yaml"
        file.write_text(yaml.safe_dump(config))
        arguments = ["--config", str(file)]
        with Server(arguments, Path(folder) / "log", "tests.support.e2e.paced") as server:
            yield server


@dataclass(frozen=True, slots=True)
class Client:
    """Keeps its connections, as the clients of servers do."""

    http: aiohttp.ClientSession

    async def call(self, number: int, body: dict[str, Any], headers: dict[str, str]) -> Outcome:
        sent_s = time.monotonic()
        first_s = 0.0
        texts: list[str] = []
        async with self.http.post("/v1/completions", json=body, headers=headers) as reply:
            async for line in reply.content:
                first_s = first_s or time.monotonic()
                if reply.status == 200 and line.startswith(b"data: {"):
                    texts += _texts(json.loads(line.removeprefix(b"data: ")))
        return Outcome(
            number=number,
            sent_s=sent_s,
            ended_s=time.monotonic(),
            status=reply.status,
            first_s=first_s,
            text="".join(texts),
            retry_after=reply.headers.get("retry-after", ""),
        )


@asynccontextmanager
async def client_of(url: str) -> AsyncGenerator[Client]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSE_S_MAX)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout()) as http:
        yield Client(http)


def _texts(chunk: dict[str, Any]) -> list[str]:
    """Return the text of a chunk's choice, if it has one."""
    assert "error" not in chunk, chunk
    return [choice["text"] for choice in chunk["choices"][:1]]


async def at_rate(
    client: Client,
    rate: float,
    seconds: float,
    body: Callable[[int], dict[str, Any]],
    headers: dict[str, str],
) -> list[Outcome]:
    """Calls at their times, whatever becomes of those before; waits for the last of them."""
    start_s = time.monotonic()
    calls: list[asyncio.Task[Outcome]] = []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, start_s + number / rate - time.monotonic()))
        calls.append(asyncio.create_task(client.call(number, body(number), headers)))
    return list(await asyncio.gather(*calls))


async def in_turns(client: Client, width: int, count: int, body: dict[str, Any]) -> list[Outcome]:
    """`count` calls, `width` at a time."""
    numbers = iter(range(count))

    async def one_after_another() -> list[Outcome]:
        return [await client.call(number, body, {}) for number in numbers]

    rows: Sequence[list[Outcome]] = await asyncio.gather(*(one_after_another() for _ in range(width)))
    return [outcome for row in rows for outcome in row]
