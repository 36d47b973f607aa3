"""A device that answers late: a step may have ended before the answer of the one before it is read."""

import asyncio
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest

from tests.support.workers.bench import (
    ATTENTION_ONLY,
    HYBRID,
    WINDOWS,
    Bench,
    Tuning,
    a_request,
    bench,
    prompt,
    run,
)
from tidemill.kvstore.layout import Layout
from tidemill.workers.messages import Request, WorkerGone

LATE = Tuning(late_s_max=0.05, vocabulary=3)
"""Answers come up to 50 ms after steps of up to 40 ms."""

layouts = pytest.mark.parametrize(
    "layout", [HYBRID, ATTENTION_ONLY, WINDOWS], ids=["hybrid", "attention", "windows"]
)
seeds = pytest.mark.parametrize("seed", range(3))


def requests_of(count: int) -> list[Request]:
    return [a_request(prompt(5 + 7 * index, index, 3), 20, request_id=f"r{index}") for index in range(count)]


@layouts
@seeds
@pytest.mark.parametrize("drafts_max", [0, 3])
def test_tokens_are_those_of_steps_in_turn(layout: Layout, seed: int, drafts_max: int) -> None:
    """Stop tokens end answers amid guesses, so steps in flight are void."""

    async def main() -> None:
        async with bench(layout=layout, tuning=replace(LATE, drafts_max=drafts_max)) as one:
            requests = [replace(request, stop_token_ids=(2,) * (seed % 2)) for request in requests_of(6)]
            await one.answer_all(requests)
            if not drafts_max:
                assert _overlaps(one)

    run(main(), seed)


def _overlaps(one: Bench) -> bool:
    """Steps read tokens that the answers before them have."""
    return any(-1 in row.tokens for step in one.runner.steps for row in step)


@seeds
def test_preemption_waits_for_late_answers(seed: int) -> None:
    async def main() -> None:
        async with bench(num_extents=8, tuning=replace(LATE, vocabulary=251)) as one:
            requests = [a_request(prompt(10 + 3 * index, index), 60) for index in range(6)]
            await asyncio.gather(*map(one.answer, requests))
            assert one.count("preemptions") > 0

    run(main(), seed)


@layouts
@seeds
def test_caller_that_leaves_amid_steps_in_flight(layout: Layout, seed: int) -> None:
    """Its memory is used by steps whose answers are late; the others are not disturbed."""

    async def main() -> None:
        async with bench(layout=layout, num_extents=24, tuning=LATE) as one:

            async def leave(request: Request, after: int) -> None:
                async with aclosing(one.engine.generate(request)) as deltas:
                    async for _ in deltas:
                        after -= 1
                        if after <= 0:
                            break

            first, *others = requests_of(6)
            leaving = [leave(replace(first, request_id=f"left{after}"), after) for after in range(1, 6)]
            await asyncio.gather(*leaving, *map(one.answer, others))

    run(main(), seed)


@seeds
def test_worker_that_ends_while_two_steps_fly(seed: int) -> None:
    """Every stream ends with WorkerGone, after both steps have answered."""

    async def main() -> None:
        async with bench(tuning=LATE) as one:
            answers = [asyncio.create_task(one.answer(request)) for request in requests_of(4)]
            await one.until(lambda: len(one.runner.in_flight) == 2 and len(one.runner.steps) > 9)
            one.loop.cancel()
            with suppress(asyncio.CancelledError):
                await one.loop
            assert not one.runner.in_flight
            for ended in await asyncio.gather(*answers, return_exceptions=True):
                assert isinstance(ended, WorkerGone)

    run(main(), seed)
