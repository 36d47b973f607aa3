"""The history that clients saw: each call with its chunks and their times, and a check of it (after
Jepsen).

Every call asks for logprobs and running usage, so each token is seen with its position in the
answer.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from random import Random
from typing import Any

import httpx

SHAPE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 30, "maxLength": 60},
        "counts": {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 16},
    },
    "required": ["name", "counts"],
    "additionalProperties": False,
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 0.9, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    {
        "temperature": 1.0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SHAPE}},
    },
    {"temperature": 0.7, "n": 3},
    {"temperature": 1.0, "structured_outputs": {"regex": "([a-z]{2,8} ){60,80}"}},
)
"""Greedy, seeded, with penalties, two structured ones, and with several answers."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: what is sent where, but for the salt of its keys."""

    path: str
    body: dict[str, Any]


def asks(rng: Random, count: int, num_tokens: int, max_tokens: int) -> list[Ask]:
    """Return `count` requests of alternating kinds, with new prompts of about `num_tokens` tokens."""
    return [
        _ask(rng, index, rng.randrange(num_tokens // 2, num_tokens * 3 // 2), max_tokens)
        for index in range(count)
    ]


def _ask(rng: Random, index: int, num_tokens: int, max_tokens: int) -> Ask:
    kind = KINDS[index % len(KINDS)]
    common = {
        "model": "keeper",
        "max_tokens": max_tokens // kind.get("n", 1),
        "seed": rng.randrange(1 << 30),
        "ignore_eos": "response_format" not in kind and "structured_outputs" not in kind,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if index % 4 == 3:
        words = " ".join(
            rng.choice(("reed", "stone", "river", "mill", "lamp")) for _ in range(num_tokens // 3)
        )
        chat = {"messages": [{"role": "user", "content": words}], "logprobs": True, "top_logprobs": 0}
        return Ask("/v1/chat/completions", {**common, **kind, **chat})
    prompt = [rng.randrange(5, 890) for _ in range(num_tokens)]
    return Ask("/v1/completions", {**common, **kind, "prompt": prompt, "logprobs": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`offsets`: where its tokens begin in the text of the choice, empty where the endpoint does not say it.
    `total`: the usage so far, of all choices; tokens whose text is held back are counted already."""

    at_s: float
    choice: int
    text: str
    tokens: tuple[str, ...]
    offsets: tuple[int, ...]
    finish: str | None
    total: int


@dataclass
class Call:
    """One request under way, and all that came back."""

    ask: Ask
    sent_s: float = 0.0
    ended_s: float = 0.0
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    usage: dict[str, Any] | None = None
    trouble: list[str] = field(default_factory=list[str])  # of the stream as a stream
    port: int = 0  # of the client's end of the connection, when the reply has begun
    _grown: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_tokens(self) -> int:
        return self.chunks[-1].total if self.chunks else 0

    def choice(self, index: int) -> list[Chunk]:
        return [chunk for chunk in self.chunks if chunk.choice == index]

    async def reach(self, num_tokens: int) -> bool:
        """Wait until the call has `num_tokens` tokens; return False if it ended before."""
        while self.num_tokens < num_tokens and not self.ended_s:
            await self._grown.wait()
        return not self.ended_s

    async def run(self, client: httpx.AsyncClient, salt: str) -> None:
        self.sent_s = time.monotonic()
        try:
            body = {**self.ask.body, "cache_salt": salt}
            async with client.stream("POST", self.ask.path, json=body) as response:
                if response.is_error:
                    self.trouble.append(f"status {response.status_code}: {(await response.aread()).decode()}")
                    return
                self.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
                await self._read(response)
        except httpx.HTTPError as error:
            self.trouble.append(f"the connection broke: {error!r}")
        finally:
            self.ended_s = time.monotonic()
            self._grow()

    async def _read(self, response: httpx.Response) -> None:
        is_done = False
        async for line in response.aiter_lines():
            if not line:
                continue
            if is_done:
                self.trouble.append(f"a line after the end: {line}")
            if line == "data: [DONE]":
                is_done = True
            elif line.startswith("data: "):
                self._take(json.loads(line.removeprefix("data: ")))
            elif not line.startswith("event: "):
                self.trouble.append(f"no event: {line}")
        if not is_done:
            self.trouble.append("the stream was cut")

    def _take(self, data: dict[str, Any]) -> None:
        if "error" in data:
            self.trouble.append(f"error: {data['error']}")
            return
        if not data["choices"]:
            self.usage = data["usage"]
        for choice in data["choices"]:
            if "role" in choice.get("delta", {}):  # what opens a chat's choice
                continue
            tokens, offsets = _scored(choice["logprobs"])
            self.chunks.append(
                Chunk(
                    at_s=time.monotonic(),
                    choice=choice["index"],
                    text=choice["text"] if "text" in choice else choice["delta"]["content"],
                    tokens=tokens,
                    offsets=offsets,
                    finish=choice["finish_reason"],
                    total=data["usage"]["completion_tokens"],
                )
            )
        self._grow()

    def _grow(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


def _scored(logprobs: dict[str, Any] | None) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The tokens of a chunk, and where each of them begins in the answer's text."""
    if logprobs is None:
        return (), ()
    if "content" in logprobs:
        return tuple(str(logprob["bytes"]) for logprob in logprobs["content"]), ()
    return tuple(logprobs["tokens"]), tuple(logprobs["text_offset"])


def broken(call: Call, calm: Call) -> list[str]:
    """Return the differences between a call and the same call without faults."""
    found = [*call.trouble]
    seen = before = 0
    for chunk in call.chunks:
        seen += len(chunk.tokens)
        if not max(before, seen) <= chunk.total:
            found.append(f"usage goes from {before} to {chunk.total} with {seen} tokens")
        before = chunk.total
    silent = sum(chunk.finish == "stop" for chunk in call.chunks)  # the token that ends it has no text
    if call.usage is None or not call.usage["completion_tokens"] == before == seen + silent:
        found.append(f"{seen} tokens, usage {before}, then {call.usage}")
    for index in range(call.ask.body.get("n", 1)):
        found += [
            f"choice {index}: {difference}"
            for difference in _broken_choice(call.choice(index), calm.choice(index))
        ]
    return found


def _broken_choice(chunks: Sequence[Chunk], calm: Sequence[Chunk]) -> list[str]:
    found: list[str] = []
    finishes = [chunk.finish for chunk in chunks if chunk.finish]
    if len(finishes) != 1 or not chunks[-1].finish:
        found.append(f"it finishes {len(finishes)} times, or goes on after that")
    if finishes != [chunk.finish for chunk in calm if chunk.finish]:
        found.append(f"it finishes with {finishes}")
    tokens, expected = ([token for chunk in part for token in chunk.tokens] for part in (chunks, calm))
    if tokens != expected:
        place = next(i for i, pair in enumerate(zip_longest(tokens, expected)) if pair[0] != pair[1])
        found.append(f"{len(tokens)} tokens instead of {len(expected)}, the first difference at {place}")
    if _offsets(chunks) != _offsets(calm):
        found.append(f"other offsets, or one twice: {_offsets(chunks)}")
    if "".join(chunk.text for chunk in chunks) != "".join(chunk.text for chunk in calm):
        found.append("another text")
    return found


def _offsets(chunks: Sequence[Chunk]) -> list[int]:
    return [offset for chunk in chunks for offset in chunk.offsets]


def pauses_s(calls: Sequence[Call], at_s: float) -> list[float]:
    """Return, for each call in progress at `at_s`, its longest wait for a token that ended later."""
    found: list[float] = []
    for call in calls:
        if not call.sent_s <= at_s < call.ended_s:
            continue
        times = [call.sent_s, *(chunk.at_s for chunk in call.chunks)]
        gaps = [later - earlier for earlier, later in pairwise(times) if later > at_s]
        found += [max(gaps)] if gaps else []
    return sorted(found)


def percentile(sorted_s: Sequence[float], percent: int) -> float:
    return sorted_s[min(len(sorted_s) - 1, len(sorted_s) * percent // 100)]
