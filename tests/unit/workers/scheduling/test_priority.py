"""The order of requests: urgent ones first, then earlier ones, and in the end those that waited long."""

import asyncio
from contextlib import aclosing
from random import Random

import pytest

from tests.support.workers.bench import IN_VIRTUAL_TIME, Bench, Tuning, a_request, bench, prompt
from tests.unit.workers.engine.test_fairness import Machine, now_s
from tidemill.cluster.edge.chat.request.hints import PRIORITY_MAX
from tidemill.cluster.processes.endpoint.batch_lane import LINES_TOGETHER
from tidemill.workers.scheduling.sequence import PRIORITY_AGE_S

pytestmark = IN_VIRTUAL_TIME

STEP_S = 0.1


async def served(one: Bench, name: str, priority: int, order: list[str], new_tokens: int = 5) -> float:
    """Record its name when its first token comes; return the time until then."""
    start_s, first_s = now_s(), 0.0
    request = a_request(prompt(9, hash_of(name)), new_tokens, request_id=name, priority=priority)
    async with aclosing(one.engine.generate(request)) as deltas:
        async for _ in deltas:
            if not first_s:
                first_s = now_s() - start_s
                order.append(name)
    return first_s


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode())  # no two names share a prompt, which would be found and overtake


@pytest.mark.parametrize("seed", range(4))
async def test_those_that_wait_are_served_in_the_order_of_their_classes(seed: int) -> None:
    """One at a time; the lower the number the earlier, and within a class who came first."""
    rng = Random(seed)
    tuning = Tuning(rows_max=1)
    async with bench(num_extents=200, runner=Machine(base_s=STEP_S, rng=rng), tuning=tuning) as one:
        order: list[str] = []
        tasks = [asyncio.create_task(served(one, "first", 5, order))]
        await one.until(lambda: one.engine.load().running_rows == 1)
        classes = [(rng.randrange(-2, 3), index) for index in range(12)]
        for priority, index in classes:
            tasks.append(asyncio.create_task(served(one, f"{priority}.{index}", priority, order)))
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert order == ["first", *(f"{priority}.{index}" for priority, index in sorted(classes))]


async def test_lines_of_batches_delay_no_request_of_a_client() -> None:
    """They are all that the edges send at a time."""
    machine = Machine(base_s=STEP_S, rng=Random(0))
    async with bench(num_extents=400, runner=machine, tuning=Tuning(rows_max=64)) as one:
        order: list[str] = []
        alone_s = await served(one, "alone", 0, order)
        lines = [
            asyncio.create_task(served(one, f"line{index}", PRIORITY_MAX, order, 300))
            for index in range(LINES_TOGETHER)
        ]
        await one.until(lambda: one.engine.load().running_rows == LINES_TOGETHER)
        for index in range(5):
            assert await served(one, f"client{index}", 0, order) < alone_s + 2.5 * STEP_S
        assert not any(line.done() for line in lines)
        await asyncio.gather(*lines)


async def test_flood_of_urgent_requests_does_not_starve_a_low_class() -> None:
    """A request two classes lower waits only for those that came within its disadvantage."""
    machine = Machine(base_s=STEP_S, rng=Random(0))
    async with bench(num_extents=400, runner=machine, tuning=Tuning(rows_max=2)) as one:
        order: list[str] = []
        low = {
            priority: asyncio.create_task(served(one, f"low{priority}", priority, order))
            for priority in (1, 2)
        }
        count = 0

        async def urgent() -> None:
            nonlocal count
            while not all(task.done() for task in low.values()):
                count += 1
                await served(one, f"urgent{count}", 0, order)

        flood = [asyncio.create_task(urgent()) for _ in range(8)]
        for priority, task in low.items():
            waited_s = await task
            one_by_one_s = 8 * 6 * STEP_S  # those of the flood that were there before
            assert PRIORITY_AGE_S * priority * 0.5 <= waited_s <= PRIORITY_AGE_S * priority + one_by_one_s
        await asyncio.gather(*flood)
        assert count > 50


async def test_low_class_gives_way_when_memory_is_scarce() -> None:
    """An urgent one that came later keeps its memory."""
    async with bench(num_extents=8) as one:
        low = [
            asyncio.create_task(
                one.answer(a_request(prompt(10, index), 60, request_id=f"low{index}", priority=3))
            )
            for index in range(4)
        ]
        await one.until(lambda: one.engine.load().running_rows > 1)
        urgent = asyncio.create_task(
            one.answer(a_request(prompt(10, 77), 60, request_id="urgent", priority=0))
        )
        await asyncio.gather(urgent, *low)
        assert one.engine.preempted
        assert "urgent" not in one.engine.preempted


async def test_urgent_prompt_is_computed_before_the_others() -> None:
    """Its pages come first in the step, also when all of them run."""
    machine = Machine(base_s=STEP_S, rng=Random(0))
    async with bench(num_extents=400, tokens_max=16, runner=machine) as one:
        order: list[str] = []

        async def first_token(name: str, priority: int) -> None:
            request = a_request(prompt(100, hash_of(name)), 1, request_id=name, priority=priority)
            async with aclosing(one.engine.generate(request)) as deltas:
                await anext(deltas)
            order.append(name)

        tasks = [asyncio.create_task(first_token(f"usual{index}", 1)) for index in range(3)]
        await one.until(lambda: len(one.runner.steps) > 1)
        tasks.append(asyncio.create_task(first_token("urgent", 0)))
        await asyncio.gather(*tasks)
        assert order[0] == "urgent"
