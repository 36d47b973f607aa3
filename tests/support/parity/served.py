"""A real engine whose step loop runs, for as long as a test needs it."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from tests.support.parity.architectures import VOCABULARY
from tidemill.workers.engine.build import BuiltEngine, build_engine
from tidemill.workers.engine.rank_processes import start_ranks
from tidemill.workers.messages import Provenance, Request
from tidemill.workers.settings import EngineSettings

MIB = 1 << 20
LANDING_S_MAX = 60
LOOK_S = 0.001
"""Between looks the loop sleeps: while it is busy, each operator of a step waits for Python's lock."""


@asynccontextmanager
async def serving(settings: EngineSettings, **changes: Any) -> AsyncGenerator[BuiltEngine]:  # noqa: ANN401
    """An engine whose step loop runs; at the end it must have all its memory back."""
    built = build_engine(replace(settings, **changes), lambda _done, _total: None, start_ranks)
    loop = asyncio.create_task(built.engine.run())
    try:
        yield built
        await built.engine.drain_publications()
        async with asyncio.timeout(LANDING_S_MAX):
            while built.engine.load().live_bytes:  # noqa: ASYNC110  steps are in flight, and signal nothing
                await asyncio.sleep(LOOK_S)
        load = built.engine.load()
        assert (load.live_bytes, load.running_rows, load.waiting_rows) == (0, 0, 0)
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        built.close()


def tokens_of(count: int, seed: int, first: int = 2) -> tuple[int, ...]:
    """Return tokens that are drawn from the vocabulary of random models, from `first` on."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(first, VOCABULARY, (count,), generator=generator).tolist())


async def together(built: BuiltEngine, requests: Sequence[Request]) -> list[list[int]]:
    """Return the answers of concurrent requests."""
    return [tokens for tokens, _ in await asyncio.gather(*(answer(built, request) for request in requests))]


async def one_by_one(built: BuiltEngine, requests: Sequence[Request]) -> list[list[int]]:
    """Return the answers of requests that share no page and no step."""
    return [(await answer(built, replace(request, salt=request.request_id)))[0] for request in requests]


async def answer(built: BuiltEngine, request: Request) -> tuple[list[int], Provenance]:
    tokens: list[int] = []
    provenance = None
    async with aclosing(built.engine.generate(request)) as deltas:
        async for delta in deltas:
            tokens += delta.tokens
            provenance = provenance or delta.provenance
    assert provenance is not None
    return tokens, provenance


async def generated(built: BuiltEngine, num_tokens: int) -> None:
    """Return when the engine has drawn this many."""
    while True:
        if built.engine.load().counters.get("generated_tokens", 0) >= num_tokens:
            return
        await asyncio.sleep(LOOK_S)
