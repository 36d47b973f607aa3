"""Admission: which waiting prompt gets memory next, and how much of it before its compute starts."""

import asyncio
from contextlib import aclosing

from tests.support.workers.bench import (
    ATTENTION_ONLY,
    HYBRID,
    IN_VIRTUAL_TIME,
    Bench,
    Tuning,
    a_request,
    bench,
    prompt,
)
from tidemill.kvstore.layout import PAGES

pytestmark = IN_VIRTUAL_TIME

P = HYBRID.page_tokens
STEP_TOKENS = 16
AHEAD_TOKENS = 2 * STEP_TOKENS
"""Two steps may be in flight."""


async def first_token(one: Bench, name: str, tokens: tuple[int, ...], order: list[str]) -> None:
    async with aclosing(one.engine.generate(a_request(tokens, 1, request_id=name))) as deltas:
        await anext(deltas)
    order.append(name)


async def test_long_prompts_take_memory_one_after_the_other_and_as_they_advance() -> None:
    length = 50 * P

    async with bench(layout=ATTENTION_ONLY, num_extents=400, tokens_max=STEP_TOKENS) as one:
        order: list[str] = []
        tasks: list[asyncio.Task[None]] = []
        for seed, name in enumerate(["first", "second", "third"]):
            tasks.append(asyncio.create_task(first_token(one, name, prompt(length, seed), order)))
            await asyncio.sleep(0.001)
        looks = 0
        while len(order) < len(tasks):
            await asyncio.sleep(0.001)
            load, usage = one.engine.load(), one.ledger.usage()
            left = load.queued_tokens - (2 - len(order)) * length
            if (
                load.running_rows and left > 2 * AHEAD_TOKENS
            ):  # of which the launched ones may still be counted
                looks += 1
                assert load.running_rows == 1
                assert (usage.pinned[PAGES] - 1) * P <= length - left + AHEAD_TOKENS
        assert looks > 20
        assert order == ["first", "second", "third"]


async def test_memory_that_a_prompt_still_needs_is_given_to_no_other() -> None:
    """The shorter prompt precedes the longer one, and would keep its memory while it answers."""
    num_extents = 60 // ATTENTION_ONLY.pages_per_extent
    async with bench(layout=ATTENTION_ONLY, num_extents=num_extents, tokens_max=STEP_TOKENS) as one:
        long = asyncio.create_task(one.answer(a_request(prompt(40 * P, 1), 3, request_id="long")))
        await one.until(lambda: one.engine.load().running_rows == 1)
        await one.answer(a_request(prompt(25 * P, 2), 80, request_id="short"))
        await long
        assert not one.engine.preempted


async def test_prompt_whose_prefix_is_here_overtakes_those_that_are_computed_whole() -> None:
    """These fill each of their steps, so that the overtaking one does not end with them."""
    async with bench(num_extents=400, tokens_max=STEP_TOKENS) as one:
        known = prompt(50 * P)
        await one.answer(a_request(known, request_id="known"))
        order: list[str] = []
        tasks: list[asyncio.Task[None]] = []
        for seed in (1, 2):
            cold = prompt(3 * STEP_TOKENS * P, seed)
            tasks.append(asyncio.create_task(first_token(one, f"cold{seed}", cold, order)))
            await one.until(lambda: one.engine.load().running_rows == 1)
        tasks.append(asyncio.create_task(first_token(one, "known", (*known, 1, 2, 3), order)))
        await asyncio.gather(*tasks)
        assert order == ["known", "cold1", "cold2"]


async def test_prompt_that_loses_its_prefix_while_it_waits_loses_its_precedence() -> None:
    """The running prompt takes the memory of what the last one would have found."""
    num_extents = 70 // ATTENTION_ONLY.pages_per_extent
    tuning = Tuning(rows_max=1)
    async with bench(layout=ATTENTION_ONLY, num_extents=num_extents, tuning=tuning) as one:
        known = prompt(30 * P)
        await one.answer(a_request(known, request_id="known"))
        order: list[str] = []
        tasks = [asyncio.create_task(first_token(one, "running", prompt(60 * P, 1), order))]
        await one.until(lambda: one.engine.load().running_rows == 1)
        tasks.append(asyncio.create_task(first_token(one, "cold", prompt(9 * P, 2), order)))
        await one.until(lambda: one.engine.load().waiting_rows == 1)
        tasks.append(asyncio.create_task(first_token(one, "known", (*known, 1, 2, 3), order)))
        await asyncio.gather(*tasks)
        assert order == ["running", "cold", "known"]
