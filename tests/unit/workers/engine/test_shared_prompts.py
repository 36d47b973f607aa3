"""A prompt that many requests share is computed once, also when they arrive together and its maker is
lost."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest

from tests.support.workers.bench import (
    ATTENTION_ONLY,
    IN_VIRTUAL_TIME,
    UNWINDOWED,
    Bench,
    Tuning,
    a_request,
    a_store,
    bench,
    prompt,
    root_of,
)
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import Layout
from tidemill.workers.messages import PagesMissing, Request

pytestmark = IN_VIRTUAL_TIME

MANY = 128
NEW_TOKENS = 3
OWN = 6
LONG = prompt(96)
"""Several steps of 20 tokens; its checkpoints on the grid are 16 tokens apart."""


def sharing(shared: tuple[int, ...], count: int = MANY, salt: str = "") -> list[Request]:
    return [
        a_request(shared + prompt(OWN, 1000 + seed), NEW_TOKENS, request_id=f"{salt}{seed}", salt=salt)
        for seed in range(count)
    ]


def own_tokens(requests: list[Request], num_shared: int) -> int:
    """Return what remains when the first `num_shared` tokens of each are cached; the last drawn token is not
    run."""
    return sum(len(request.tokens) + request.max_new_tokens - 1 - num_shared for request in requests)


def restorable_tokens(one: Bench, tokens: tuple[int, ...], salt: str = "") -> int:
    size = one.layout.page_tokens
    return size * one.ledger.index.match(page_keys(root_of(salt), tokens, size)).restorable_pages


async def test_waiting_requests_need_no_memory_for_what_they_share() -> None:
    async with bench(layout=ATTENTION_ONLY, num_extents=1000, tuning=Tuning(rows_max=1)) as one:
        await one.answer_all(sharing(LONG, 1))
        answers = asyncio.create_task(one.answer_all(sharing(LONG, 5)))
        while one.engine.load().waiting_rows < 4:  # noqa: ASYNC110 - nothing signals it
            await asyncio.sleep(0.001)
        missing = -(-(len(LONG) + OWN - restorable_tokens(one, LONG)) // one.layout.page_tokens)
        assert 0 < one.engine.load().wanted_bytes <= 4 * missing * one.layout.page_bytes
        await answers


@UNWINDOWED
@pytest.mark.parametrize("num_shared", [4, 29, 30, 32, 77])
async def test_concurrent_requests_compute_a_shared_prompt_once(num_shared: int, layout: Layout) -> None:
    requests = sharing(prompt(num_shared))
    boundary = num_shared // 4 * 4

    async with bench(layout=layout, num_extents=1000, tuning=Tuning(rows_max=MANY)) as one:
        came_from = await one.answer_all(requests)
        assert one.count("computed_tokens") == boundary + own_tokens(requests, boundary)
        assert sum(provenance.reused_tokens == boundary for provenance in came_from) == MANY - 1
        assert restorable_tokens(one, prompt(num_shared)) == boundary


@UNWINDOWED
@pytest.mark.parametrize("arrival", range(8, 80, 8))
async def test_request_that_comes_amid_the_prompt_of_another_computes_its_own_part(
    arrival: int, layout: Layout
) -> None:
    """Between two checkpoints of the grid it waits for the one where the prompts part."""
    first, *others = sharing(LONG, 5)

    async with bench(layout=layout, num_extents=200, tokens_max=8, tuning=Tuning(rows_max=4)) as one:
        maker = asyncio.create_task(one.answer(first))
        await one.until(lambda: one.count("computed_tokens") >= arrival)
        came_from = await one.answer_all(others)
        await maker
        assert [provenance.reused_tokens for provenance in came_from] == [96] * 4


@UNWINDOWED
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(3))
async def test_prompts_that_part_at_different_depths(seed: int, layout: Layout, *, overlap: bool) -> None:  # noqa: ARG001
    """A tree: each of its parts is computed once. A row in flight may have passed a place when it turns out
    that prompts part there: without a checkpoint at it, a hybrid computes that part once more."""
    trunk = prompt(16)
    branches = [trunk + prompt(12, 10 + branch) for branch in range(4)]
    twigs = [branch + prompt(8, 20 + twig) for branch in branches for twig in range(2)]
    requests = [
        replace(number, request_id=f"{index} {number.request_id}")
        for index, twig in enumerate(twigs)
        for number in sharing(twig, 6)
    ]

    async with bench(layout=layout, num_extents=1000, tuning=Tuning(rows_max=64, overlap=overlap)) as one:
        await one.answer_all(requests)
        once = 16 + 4 * 12 + 8 * 8 + own_tokens(requests, 36)
        if layout.hybrid:
            assert once <= one.count("computed_tokens") <= once + 28
        else:
            assert one.count("computed_tokens") == once
            assert all(restorable_tokens(one, part) == len(part) for part in [trunk, *branches, *twigs])


@pytest.mark.parametrize("steps", range(7))
async def test_its_maker_is_aborted_in_the_middle(steps: int) -> None:
    """Another request continues at the last checkpoint of the grid."""
    requests = sharing(LONG, 20)

    async with _small_steps() as one:
        maker = asyncio.create_task(one.answer(requests[0]))
        await one.until(lambda: one.engine.num_requests == 1)
        others = asyncio.create_task(one.answer_all(requests[1:]))
        await one.until(lambda: len(one.runner.steps) >= steps)
        maker.cancel()
        await others
        assert one.count("computed_tokens") <= 96 + 16 + 20 + own_tokens(requests, 96)
        assert restorable_tokens(one, LONG) == 96


@pytest.mark.parametrize("computed", range(8, 80, 16))
async def test_its_maker_is_preempted_in_the_middle(computed: int) -> None:
    """The budget shrinks below what it and an older request hold, and is given back."""
    requests = sharing(LONG, 20)
    older = a_request(prompt(60, 5), 40, request_id="older")

    async with _small_steps() as one:
        first = asyncio.create_task(one.answer(older))
        await one.until(lambda: one.count("generated_tokens") > 0)
        work = asyncio.create_task(one.answer_all(requests))
        await one.until(lambda: one.engine.load().running_rows == 2)
        start = one.count("computed_tokens")
        await one.until(lambda: one.count("computed_tokens") >= start + computed)
        one.engine.resize(0)
        await one.until(lambda: bool(one.engine.preempted))
        one.engine.resize(200 * one.layout.extent_bytes)
        await asyncio.gather(first, work)
        assert one.engine.preempted[0] != "older"
        assert restorable_tokens(one, LONG) == 96
        useful = 99 + 96 + own_tokens(requests, 96)
        assert one.count("computed_tokens") <= useful + 99 + 96, "once more at most"


async def test_its_maker_fails() -> None:
    """It may not compute that many tokens itself; the others stop waiting for it."""
    requests = sharing(LONG, 20)
    requests[0] = replace(requests[0], gap_tokens_max=8)

    async with _small_steps() as one:
        maker = asyncio.create_task(one.answer(requests[0]))
        await asyncio.sleep(0)
        others = asyncio.create_task(one.answer_all(requests[1:]))
        with pytest.raises(PagesMissing):
            await maker
        await others
        assert one.count("computed_tokens") == 96 + own_tokens(requests[1:], 96)


async def test_worker_produces_it_once_for_all() -> None:
    requests = sharing(prompt(64), 32)

    store = a_store()
    async with bench(store, num_extents=400) as one:
        made = await asyncio.gather(*map(one.engine.produce, requests))
        assert {produced.depth for produced in made} == {68}
        assert one.count("computed_tokens") == 64 + 32 * 4
    async with bench(store, num_extents=400) as other:
        came_from = await other.answer_all(replace(request, gap_tokens_max=0) for request in requests)
        assert sum(provenance.computed_tokens for provenance in came_from) == 32 * 2


def _small_steps() -> AbstractAsyncContextManager[Bench]:
    return bench(num_extents=200, tokens_max=20, tuning=Tuning(rows_max=16, extents_min=8))
