"""Sends one request to an OpenAI-compatible endpoint and records when the tokens of its stream arrive."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

from tidemill.cluster.bench.workloads import Item

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ERROR_CHARACTERS = 300

COMMON = """
time year people way day man thing woman life child world school state family student group country hand
part place case week company system program question work government number night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head house
service friend father power hour game line end member law car city team minute idea body back face door
"""
WORDS = COMMON.split()
"""A chat has text, of one of these words per token, which is about a token in most vocabularies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """The answer to one request, or `error`. Times begin when it was sent, `start_s` after the run's start.

    `gaps_s` are the times between the chunks of its stream, `details` the prompt_tokens_details of the usage.
    """

    item: Item
    start_s: float
    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    details: Mapping[str, int] = field(default_factory=dict[str, int])
    error: str = ""

    @property
    def tpot_s(self) -> float:
        """The mean time of an output token after the first; 0.0 for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


class StreamFailed(Exception):
    """An answer that is not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadClient:
    http: httpx.AsyncClient
    clock_s: Callable[[], float]
    model: str
    endpoint: str = COMPLETIONS
    fields: Mapping[str, object] = field(default_factory=dict[str, object])
    hints: bool = False

    async def send(self, item: Item, run_start_s: float) -> RequestResult:
        """Send a request and read its stream. What fails is an error of the result."""
        start_s = self.clock_s()
        times_s: list[float] = []
        usage: dict[str, Any] = {}
        error = ""
        try:
            usage = await self._read(item, times_s)
        except (httpx.HTTPError, StreamFailed) as failure:
            error = str(failure) or type(failure).__name__
        whole = bool(times_s) and not error
        return RequestResult(
            item=item,
            start_s=start_s - run_start_s,
            ttft_s=times_s[0] - start_s if whole else 0.0,
            gaps_s=tuple(after - before for before, after in pairwise(times_s)) if whole else (),
            e2e_s=times_s[-1] - start_s if whole else 0.0,
            prompt_tokens=usage.get("prompt_tokens") or len(item.tokens),
            output_tokens=usage.get("completion_tokens") or len(times_s),
            details=usage.get("prompt_tokens_details") or {},
            error=error if whole or error else "the stream had no tokens",
        )

    async def _read(self, item: Item, times_s: list[float]) -> dict[str, Any]:
        """Add the times of the chunks with tokens, and return the usage. Raises StreamFailed, HTTPError."""
        usage: dict[str, Any] = {}
        is_whole = False
        end_s = 0.0
        async with self.http.stream("POST", self.endpoint, json=self.body(item)) as response:
            if response.is_error:
                text = (await response.aread()).decode(errors="replace")
                raise StreamFailed(f"HTTP {response.status_code}: {text[:ERROR_CHARACTERS]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    is_whole = True
                    continue
                chunk = _parsed(data)
                choices: list[dict[str, Any]] = chunk.get("choices") or []
                if any(map(_has_token, choices)):
                    times_s.append(self.clock_s())
                if any(choice.get("finish_reason") for choice in choices):
                    is_whole, end_s = True, self.clock_s()
                usage = chunk.get("usage") or usage
        if not is_whole:
            raise StreamFailed("the stream ended before its answer")
        if end_s and not times_s and usage.get("completion_tokens"):  # half a character has no text
            times_s.append(end_s)
        return usage

    def body(self, item: Item) -> dict[str, object]:
        is_chat = self.endpoint.endswith("/chat/completions")
        prompt = {"messages": messages_of(item)} if is_chat else {"prompt": item.text or item.tokens}
        return {
            **self.fields,
            **(item.hints if self.hints else {}),
            **prompt,
            "model": self.model,
            "max_tokens": item.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def messages_of(item: Item) -> list[dict[str, str]]:
    """Return the prompt as messages of a chat: a word per token, cut at `cuts`."""
    if item.text:
        return [{"role": "user", "content": item.text}]
    words = [WORDS[token % len(WORDS)] for token in item.tokens]
    return [
        {"role": "assistant" if number % 2 else "user", "content": " ".join(words[start:end])}
        for number, (start, end) in enumerate(pairwise((0, *item.cuts, len(words))))
    ]


def _parsed(data: str) -> dict[str, Any]:
    try:
        chunk: dict[str, Any] = json.loads(data)
    except ValueError as error:
        raise StreamFailed(f"not JSON in the stream: {data[:ERROR_CHARACTERS]}") from error
    if "error" in chunk:
        raise StreamFailed(f"the stream failed: {str(chunk['error'])[:ERROR_CHARACTERS]}")
    return chunk


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Return whether the chunk has output. The first one of a chat has a role, the last one a reason."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or not choice.get("finish_reason")
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
