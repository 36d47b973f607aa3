# pyright: basic
# transformers' classes have no usable types.
"""The tokens of a request are equal on every path through real engines.

The model is the bundled one, and the paths are more than each architecture takes in test_architectures.py.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.parity.served import answer, serving
from tidemill.kvstore.layout import restorable_end
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.messages import Provenance, Request, Sampling
from tidemill.workers.settings import EngineSettings
from tidemill.workers.sources.names import bundled

MIB = 1 << 20
NEW_TOKENS = 20
SAMPLINGS = (Sampling(temperature=0), Sampling(temperature=0.9, top_p=0.95, seed=5))
PAGES = (16, 64)
VOCABULARY = 97


@pytest.fixture(scope="module")
def settings(kernel_cache: Path) -> EngineSettings:
    return EngineSettings(
        model_folder=bundled()["keeper"],
        memory_bytes=16 * MIB,
        store_url="memory:?size=0",
        cache_folder=kernel_cache,
    )


def requests_of(page_tokens: int) -> list[Request]:
    """One token, less than a page, and every way a prompt can end near a page boundary."""
    lengths = {1, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens, 3 * page_tokens - 1}
    return [
        Request(
            request_id=f"{length}-{index}",
            tokens=tokens_of(length, seed=length),
            max_new_tokens=NEW_TOKENS,
            sampling=sampling,
        )
        for length in sorted(lengths)
        for index, sampling in enumerate(SAMPLINGS)
    ]


def tokens_of(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())


@pytest.fixture(scope="module")
def wanted(settings: EngineSettings) -> dict[str, list[int]]:
    """The cold path: each prompt alone, in one step, with a salt of its own."""

    async def main() -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        async with serving(settings, page_size=64, max_num_batched_tokens=4096) as built:
            for page_tokens in PAGES:
                for request in requests_of(page_tokens):
                    alone = replace(request, salt=f"{page_tokens} {request.request_id}")
                    answers[request.request_id], provenance = await answer(built, alone)
                    assert provenance == Provenance(computed_tokens=len(request.tokens))
        assert len({tuple(tokens) for tokens in answers.values()}) > len(answers) // 2
        return answers

    return asyncio.run(main())


async def check(
    built: BuiltEngine, requests: Sequence[Request], wanted: dict[str, list[int]]
) -> list[Provenance]:
    """Answer `requests` concurrently, compare them, and return the sources of their prompts."""
    answers = await asyncio.gather(*(answer(built, request) for request in requests))
    for request, (tokens, _) in zip(requests, answers, strict=True):
        assert tokens == wanted[request.request_id], request.request_id
    return [provenance for _, provenance in answers]


@pytest.mark.parametrize("page_tokens", PAGES)
def test_cold_warm_and_in_a_batch(
    settings: EngineSettings, wanted: dict[str, list[int]], page_tokens: int
) -> None:
    async def main() -> None:
        requests = requests_of(page_tokens)
        async with serving(settings, page_size=page_tokens) as built:
            for request in requests:
                await check(built, [request], wanted)
            for request in requests:
                (warm,) = await check(built, [request], wanted)
                assert warm.reused_tokens == restorable_end(len(request.tokens), page_tokens)
        async with serving(settings, page_size=page_tokens) as built:
            await check(built, requests[:9], wanted)
            await check(built, requests[::-1], wanted)

    asyncio.run(main())


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize(
    "budget", [{"max_num_batched_tokens": 1, "max_num_seqs": 3}, {"max_num_batched_tokens": 130}]
)
def test_size_of_a_step_does_not_matter(
    settings: EngineSettings, wanted: dict[str, list[int]], page_tokens: int, budget: dict[str, int]
) -> None:
    async def main() -> None:
        async with serving(settings, page_size=page_tokens, **budget) as built:
            await check(built, requests_of(page_tokens), wanted)

    asyncio.run(main())


@pytest.mark.parametrize("drafts_max", [0, 1, 5])
@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_and_guesses(
    settings: EngineSettings,
    wanted: dict[str, list[int]],
    overlap: bool,  # noqa: FBT001  a parameter of the test
    drafts_max: int,
) -> None:
    async def main() -> None:
        requests = requests_of(16)
        async with serving(
            settings, page_size=16, overlap=overlap, num_speculative_tokens=drafts_max
        ) as built:
            await check(built, requests, wanted)
            for request in requests[:4]:
                await check(built, [replace(request, salt="alone")], wanted)
            counters = built.engine.load().counters
            tried, right = counters.get("spec_drafted_tokens", 0), counters.get("spec_accepted_tokens", 0)
            assert right <= tried
            assert not tried or drafts_max
            assert tried or not drafts_max  # it repeats itself

    asyncio.run(main())


@pytest.mark.parametrize("page_tokens", PAGES)
def test_produced_on_one_engine_and_generated_on_another(
    settings: EngineSettings, wanted: dict[str, list[int]], page_tokens: int, tmp_path: Path
) -> None:
    async def main() -> None:
        requests = requests_of(page_tokens)
        shared = {"page_size": page_tokens, "store_url": f"file://{tmp_path}?size=1GiB"}
        async with serving(settings, **shared, max_num_batched_tokens=80, max_num_seqs=4) as prefill:
            for request in requests:
                produced = await prefill.engine.produce(request)
                assert produced.depth == restorable_end(len(request.tokens), page_tokens)
        patient = [replace(request, gap_tokens_max=0) for request in requests]
        async with serving(settings, **shared) as decode:
            for request in patient[::2]:
                (provenance,) = await check(decode, [request], wanted)
                assert provenance.fetched_tokens == restorable_end(len(request.tokens), page_tokens)
            await check(decode, patient, wanted)
        async with serving(settings, **shared) as turned:  # mid-answer, as after the loss of a worker
            for request in requests:
                moved = _moved(request, wanted)
                tokens, _ = await answer(turned, moved)
                assert tokens == wanted[request.request_id][len(moved.tokens) - len(request.tokens) :]

    asyncio.run(main())


def _moved(request: Request, wanted: dict[str, list[int]]) -> Request:
    """The request as it is sent again after a loss in the middle of its answer."""
    done = 1 + len(request.tokens) % (NEW_TOKENS - 1)
    streamed = tuple(wanted[request.request_id][:done])
    return replace(request, tokens=request.tokens + streamed, max_new_tokens=NEW_TOKENS - done)


@pytest.mark.parametrize("page_tokens", PAGES)
def test_preempted_and_evicted(
    settings: EngineSettings, wanted: dict[str, list[int]], page_tokens: int
) -> None:
    """Two extents: one for states, one for pages."""

    async def main() -> None:
        requests = requests_of(page_tokens)
        fillers = [
            Request(
                request_id=f"filler {seed}",
                tokens=tokens_of(200 + seed, seed),
                max_new_tokens=max(100, 3 * page_tokens),
                sampling=SAMPLINGS[0],
            )
            for seed in range(24)
        ]
        async with serving(settings, page_size=page_tokens, memory_bytes=5 * MIB // 2) as built:
            beside = asyncio.gather(*(answer(built, filler) for filler in fillers))
            await check(built, requests, wanted)
            await beside
            await check(built, requests, wanted)
            counters = built.engine.load().counters
            assert counters.get("preemptions", 0) > 0
            assert counters["evicted_pages_for_pages"] > 0

    asyncio.run(main())
