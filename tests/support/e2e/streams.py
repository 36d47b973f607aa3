"""Completions over HTTP as a test wants them: the text of each stream, and when it is well under way."""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx

from tests.support.e2e.server import NO_TLS

Body = dict[str, Any]
Outcome = tuple[str, str | None, int]
"""The text, why it ends, and how many tokens it has."""


def random_prompt(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(5, 890) for _ in range(num_tokens)]


def completion(prompt: list[int] | str, max_tokens: int, **more: object) -> Body:
    """Return a request to keeper: greedy, and of that many tokens, unless `more` changes it."""
    common = {"model": "keeper", "temperature": 0, "ignore_eos": True}
    return {**common, "prompt": prompt, "max_tokens": max_tokens, **more}


@dataclass
class Stream:
    """One streamed completion. `pieces` are its chunks of text as they came; `usage` is there at the end."""

    body: Body
    pieces: list[str] = field(default_factory=list[str])
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    under_way: asyncio.Event = field(default_factory=asyncio.Event)
    pieces_awaited: int = 20

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def outcome(self) -> Outcome:
        """All that must not depend on the path."""
        return self.text, self.finish_reason, self.usage["completion_tokens"]

    async def run(self, client: httpx.AsyncClient) -> None:
        body = {**self.body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            ended = False
            async for line in response.aiter_lines():
                if not line or line == "event: error":  # the error itself is in the next line
                    continue
                assert not ended, f"a line after the end: {line}"
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    ended = True
                    continue
                self._take(json.loads(data))
        assert ended, "the stream was cut"

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            assert self.finish_reason is None, "text after the finish"
            self.pieces.append(choice["text"])
            self.finish_reason = choice["finish_reason"]
        if len(self.pieces) >= self.pieces_awaited:
            self.under_way.set()


async def run_all(url: str, bodies: list[Body]) -> list[Stream]:
    """Run all of `bodies` concurrently to their ends."""
    streams = [Stream(body) for body in bodies]
    async with client_of(url) as client, asyncio.TaskGroup() as running:
        for stream in streams:
            running.create_task(stream.run(client))
    return streams


def outcomes_of(url: str, bodies: list[Body]) -> list[Outcome]:
    return [stream.outcome for stream in asyncio.run(run_all(url, bodies))]


def cached_of(url: str, body: Body) -> int:
    """Return how many tokens of the prompt were not computed."""
    [stream] = asyncio.run(run_all(url, [body]))
    return stream.usage["prompt_tokens_details"]["cached_tokens"]


def run_while(url: str, bodies: list[Body], break_it: Callable[[], None]) -> list[Stream]:
    """Run all of `bodies` concurrently to their ends; call `break_it` when all have produced several
    tokens. If all have ended by then, because the machine is slow, run them again."""

    async def run() -> list[Stream]:
        streams = [Stream(body) for body in bodies]
        async with client_of(url) as client, asyncio.TaskGroup() as running:
            for stream in streams:
                running.create_task(stream.run(client))
            for stream in streams:
                await stream.under_way.wait()
            if all(stream.finish_reason for stream in streams):
                return []
            await asyncio.to_thread(break_it)
        return streams

    for _ in range(5):
        if streams := asyncio.run(run()):
            return streams
    raise AssertionError("too late: make the streams longer")


def client_of(url: str, tls: ssl.SSLContext = NO_TLS) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits, verify=tls)
