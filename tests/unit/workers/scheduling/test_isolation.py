"""Requests on trial run alone, and their callers know when."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from random import Random

import pytest

from tests.support.sim.fold import expected
from tests.support.workers.bench import IN_VIRTUAL_TIME, Bench, Tuning, a_request, bench, prompt
from tidemill.workers.execution.step import Step
from tidemill.workers.messages import TRIAL_TOKENS, Request

pytestmark = IN_VIRTUAL_TIME

TRIALS_S_MAX = 60.0


class Caller:
    """A caller that records how many steps the worker had begun at each notice."""

    def __init__(self, one: Bench, *, slow_s: float = 0.0) -> None:
        self.notices: list[tuple[bool, int]] = []
        self._one = one
        self._slow_s = slow_s

    async def notify(self, alone: bool) -> None:  # noqa: FBT001  the signature of Notify
        assert not self._one.runner.in_flight, "something runs that the caller would blame its request for"
        self.notices.append((alone, len(self._one.runner.steps)))
        await asyncio.sleep(self._slow_s)

    async def answer(self, request: Request) -> list[int]:
        async with aclosing(self._one.engine.generate(request, self.notify)) as deltas:
            return [token async for delta in deltas for token in delta.tokens]

    def steps(self) -> list[Step]:
        """Return the steps between the two notices, for each pair of them."""
        begun, over = self.notices[::2], self.notices[1::2]
        assert [alone for alone, _ in self.notices] == [True, False] * len(over)
        trials = zip(begun, over, strict=True)
        return [step for (_, first), (_, last) in trials for step in self._one.runner.steps[first:last]]


def names_of(step: Step) -> set[str]:
    return {row.sequence_id.split("#")[0] for row in step}


def on_trial(index: int, num_tokens: int = 9, new: int = 12) -> Request:
    return replace(a_request(prompt(num_tokens, index), new, request_id=f"suspect-{index}"), on_trial=True)


@pytest.mark.parametrize("slow_s", [0.0, 0.5])
async def test_each_runs_alone_until_its_first_tokens_and_others_in_between(slow_s: float) -> None:
    async with bench() as one:
        stream = asyncio.create_task(one.answer(a_request(prompt(5, 99), 40)))
        await one.until(lambda: len(one.runner.steps) > 3)
        callers = [Caller(one, slow_s=slow_s) for _ in range(3)]
        requests = [on_trial(index) for index in range(3)]
        answers = [
            asyncio.create_task(caller.answer(request))
            for caller, request in zip(callers, requests, strict=True)
        ]
        got = await asyncio.gather(*answers)
        assert got == [expected(request, hybrid=True) for request in requests]
        await stream
        for caller, request in zip(callers, requests, strict=True):
            steps = caller.steps()
            assert {name for step in steps for name in names_of(step)} == {request.request_id}
            drawn = sum(row.sampling_state is not None for step in steps for row in step)
            assert drawn == TRIAL_TOKENS
        ends = sorted(caller.notices[1][1] for caller in callers)
        begins = sorted(caller.notices[0][1] for caller in callers)
        assert all(begin > end for end, begin in zip(ends, begins[1:], strict=False)), "others go between"


async def test_producing_is_on_trial_to_its_end() -> None:
    async with bench() as one:
        caller = Caller(one)
        stream = asyncio.create_task(one.answer(a_request(prompt(5, 99), 60)))
        await one.until(lambda: len(one.runner.steps) > 3)
        produced = await one.engine.produce(on_trial(0, num_tokens=61), caller.notify)
        assert produced.depth == 60
        rows = [row for step in caller.steps() for row in step]
        assert sum(len(row.tokens) for row in rows) == 60
        await stream


async def test_short_answer_is_over_before_its_caller_has_it() -> None:
    """Otherwise the caller would blame it when the worker crashes afterwards."""
    async with bench() as one:
        caller = Caller(one, slow_s=1.0)
        stream = asyncio.create_task(one.answer(a_request(prompt(5, 99), 60)))
        await one.until(lambda: len(one.runner.steps) > 3)
        request = on_trial(0, new=1)
        assert await caller.answer(request) == expected(request, hybrid=True)
        assert len(caller.steps()) == 1
        await stream


async def test_caller_that_leaves_delays_no_request() -> None:
    async with bench() as one:
        caller = Caller(one, slow_s=1000.0)
        leaving = asyncio.create_task(caller.answer(on_trial(0)))
        await one.until(lambda: bool(caller.notices))
        stream = asyncio.create_task(one.answer(a_request(prompt(5, 99), 5)))
        await asyncio.sleep(5.0)
        assert not one.runner.steps
        leaving.cancel()
        await stream


@pytest.mark.parametrize("seed", range(12))
async def test_budget_that_goes_up_and_down_confuses_no_trial(seed: int) -> None:
    """A suspect may lose its memory, and get it back, whenever its caller is about to be notified. The next
    trial begins all the same, and all steps between the two notices are the suspect's alone."""
    rng = Random(seed)
    async with bench(num_extents=12, tuning=Tuning(extents_min=3)) as one:
        requests = [on_trial(index) for index in range(4)]
        callers = [Caller(one, slow_s=rng.choice([0.0, 0.0, 0.02])) for _ in requests]
        answers = asyncio.gather(*map(Caller.answer, callers, requests))
        ends_s = asyncio.get_running_loop().time() + TRIALS_S_MAX
        while not answers.done():
            assert asyncio.get_running_loop().time() < ends_s, "a trial that never begins or ends"
            one.engine.resize(rng.choice([0, 12]) * one.layout.extent_bytes)
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.01]))
        assert await answers == [expected(request, hybrid=True) for request in requests]
        for caller, request in zip(callers, requests, strict=True):
            assert {name for step in caller.steps() for name in names_of(step)} <= {request.request_id}
