"""Every way of a request through real engines, each against the cold one, by equality of tokens."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from unittest import mock

from tests.support.parity.served import answer, generated, serving
from tests.support.workers.settings import plain_settings
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kvstore.layout import Layout, layout_of, restorable_end
from tidemill.workers.engine import memory_plan
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import Provenance, Request, Sampling
from tidemill.workers.models.architectures.registry import describe
from tidemill.workers.settings import EngineSettings

PAGE_TOKENS = 16
NEW_TOKENS = 20
LENGTH_MAX = 200
EXTENTS = 400
AGAIN = " again"
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.95, seed=5))

# As small as they can be, so that a few requests exceed the memory.
smallest_extents = partial(layout_of, extent_bytes_min=1, granule_bytes=1)


@dataclass
class Journey:
    """Prompts that end at, before and behind boundaries of pages and of the window; `wanted` are the answers
    when each of them is computed alone, in one step."""

    settings: EngineSettings
    layout: Layout
    requests: list[Request]
    scratch: Path
    wanted: dict[str, list[int]] = field(default_factory=dict)

    async def check(self, built: BuiltEngine, requests: Sequence[Request] = ()) -> list[Provenance]:
        """Answer all requests concurrently, compare them, and return the sources of their prompts."""
        asked = requests or self.requests
        answers = await asyncio.gather(*(answer(built, request) for request in asked))
        for request, (tokens, _) in zip(asked, answers, strict=True):
            wanted = self.wanted[request.request_id.partition(AGAIN)[0]]
            assert tokens == wanted, f"a prompt of {len(request.tokens)} tokens"
        return [provenance for _, provenance in answers]


def journey_of(
    folder: Path, kernels: Path, scratch: Path, vocabulary: int, compute_dtype: ComputeDtype | None = None
) -> Journey:
    layout = smallest_extents(describe(folder)[0], PAGE_TOKENS)
    sizes = {"page_size": PAGE_TOKENS, "max_model_len": LENGTH_MAX, "backing": "fixed"}
    memory_bytes = EXTENTS * layout.extent_bytes
    settings = plain_settings(folder, kernels, memory_bytes, compute_dtype=compute_dtype, **sizes)
    window = layout.window_tokens
    lengths = {1, *(pages * PAGE_TOKENS + by for pages in (1, 3) for by in (-1, 0, 1))}
    lengths |= {window - 1, window, window + 1, window + PAGE_TOKENS} if window else {5 * PAGE_TOKENS - 1}
    rng = Random(7)
    requests = [
        Request(
            request_id=f"{index}",
            tokens=tuple(rng.randrange(vocabulary) for _ in range(length)),
            max_new_tokens=NEW_TOKENS,
            sampling=SAMPLINGS[index % 2],
        )
        for index, length in enumerate(sorted(size for size in lengths if 0 < size <= 6 * PAGE_TOKENS))
    ]
    return Journey(settings, layout, requests, scratch)


async def cold(journey: Journey) -> None:
    """The others are compared with it."""
    async with serving(journey.settings, page_size=64, max_num_batched_tokens=4096) as built:
        for request in journey.requests:
            found, provenance = await answer(built, replace(request, salt=request.request_id))
            assert provenance == Provenance(computed_tokens=len(request.tokens))
            journey.wanted[request.request_id] = found
    different = len({tuple(tokens) for tokens in journey.wanted.values()})
    assert different > len(journey.requests) // 2


async def warm(journey: Journey) -> None:
    async with serving(journey.settings, overlap=False) as built:
        for request in journey.requests:
            await journey.check(built, [request])
        for request in journey.requests:
            (found,) = await journey.check(built, [request])
            assert found.reused_tokens == restorable_end(len(request.tokens), PAGE_TOKENS)


async def together(journey: Journey) -> None:
    async with serving(journey.settings, num_speculative_tokens=3, max_num_batched_tokens=40) as built:
        await journey.check(built)
        await journey.check(built, journey.requests[::-1])
    async with serving(journey.settings, page_size=64, max_num_batched_tokens=1, max_num_seqs=3) as built:
        await journey.check(built)


async def fetched(journey: Journey) -> None:
    shared = {"store_url": f"file://{journey.scratch}/store?size=1GiB"}
    async with serving(journey.settings, **shared, max_num_batched_tokens=80, max_num_seqs=4) as prefill:
        for request in journey.requests:
            produced = await prefill.engine.produce(request)
            assert produced.depth == restorable_end(len(request.tokens), PAGE_TOKENS)
    async with serving(journey.settings, **shared) as decode:
        for request in journey.requests:
            (found,) = await journey.check(decode, [replace(request, gap_tokens_max=0)])
            assert found.fetched_tokens == restorable_end(len(request.tokens), PAGE_TOKENS)


async def migrated(journey: Journey) -> None:
    """Move each answer in its middle, as after the loss of a worker."""
    shared = {"store_url": f"file://{journey.scratch}/store?size=1GiB"}
    async with serving(journey.settings, **shared) as built:
        for index, request in enumerate(journey.requests):
            wanted, done = journey.wanted[request.request_id], 1 + 5 * index % (NEW_TOKENS - 1)
            moved = request.tokens + tuple(wanted[:done])
            found, _ = await answer(built, replace(request, tokens=moved, max_new_tokens=NEW_TOKENS - done))
            assert found == wanted[done:], f"a prompt of {len(request.tokens)} tokens, {done} more"


async def preempted(journey: Journey) -> None:
    """All prompts twice, without anything in common: together they exceed what is left by far."""
    twice = [
        replace(request, request_id=request.request_id + AGAIN, salt=AGAIN) for request in journey.requests
    ]
    async with serving(journey.settings, memory_max_bytes=2 * (journey.settings.memory_bytes or 0)) as built:
        work = asyncio.create_task(journey.check(built, journey.requests + twice))
        for tokens, budget_bytes in ((24, 0), (60, built.info.memory_max_bytes), (90, 0)):
            await generated(built, tokens)
            built.engine.resize(budget_bytes)
        await work
        counters = built.engine.load().counters
        assert counters["preemptions_for_resize"] > 0
        await journey.check(built, journey.requests[::-1])


def check_every_way(journey: Journey) -> None:
    with mock.patch.object(memory_plan, "layout_of", smallest_extents):
        for way in (cold, warm, together, fetched, migrated, preempted):
            asyncio.run(way(journey))
