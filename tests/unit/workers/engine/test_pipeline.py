"""A step that breaks ends only the request that broke it. A loop that ends frees all memory."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest

from tests.support.sim.fold import Broke
from tests.support.workers.bench import (
    IN_VIRTUAL_TIME,
    LAYOUTS,
    OVERLAPS,
    Bench,
    BrokenRunner,
    Tuning,
    a_request,
    bench,
    prompt,
)
from tidemill.kvstore.layout import Layout
from tidemill.workers.engine.pipeline import FAILURES_MAX
from tidemill.workers.execution.step import Drawn, Step
from tidemill.workers.messages import Produced, Request, RequestError, WorkerGone
from tidemill.workers.options import CheckpointStrategy

pytestmark = IN_VIRTUAL_TIME

VOCABULARY = 3


def poisoned(until: int) -> Callable[[Step], Exception | None]:
    """A row of a poison request that goes beyond `until` breaks its step."""

    def breaks(step: Step) -> Exception | None:
        bad = any(row.sequence_id.startswith("poison") and row.end > until for row in step)
        return Broke("poison") if bad else None

    return breaks


async def refused(one: Bench, request: Request) -> None:
    """It gets all tokens up to the one that breaks, then the error, as its own fault and no other's."""
    got: list[int] = []

    async def read() -> None:
        async with aclosing(one.engine.generate(request)) as deltas:
            async for delta in deltas:
                got.extend(delta.tokens)
                assert delta.finish is None

    with pytest.raises(RequestError, match="on no other") as caught:
        await read()
    assert (caught.value.status, caught.value.code) == (500, "step_failed")
    want = one.expected(request)
    assert got == want[: len(got)]


def requests_of(count: int, name: str = "good", seed: int = 0) -> list[Request]:
    return [
        a_request(prompt(3 + 5 * index, seed + index, VOCABULARY), 20, request_id=f"{name}{index}")
        for index in range(count)
    ]


@LAYOUTS
@OVERLAPS
@pytest.mark.parametrize("drafts_max", [0, 3])
@pytest.mark.parametrize("strategy", ["none", "double", "lazy"])
@pytest.mark.parametrize("until", [4, 17, 30])
async def test_poison_request_gets_its_error_and_no_other(
    layout: Layout, drafts_max: int, strategy: CheckpointStrategy, until: int, *, overlap: bool
) -> None:
    """The request breaks in the first row of its prompt, in a later one, and while it decodes; as the oldest
    and among others."""
    tuning = Tuning(overlap=overlap, drafts_max=drafts_max, vocabulary=VOCABULARY, breaks=poisoned(until))
    async with bench(layout=layout, strategy=strategy, tuning=tuning) as one:
        for place in (0, 2):
            good = [asyncio.create_task(one.answer(request)) for request in requests_of(place)]
            poison = a_request(prompt(18, 50, VOCABULARY), 20, request_id="poison")
            bad = asyncio.create_task(refused(one, poison))
            good += [asyncio.create_task(one.answer(request)) for request in requests_of(4, seed=7)]
            while not bad.done() or not all(task.done() for task in good):
                one.ledger.check()
                await asyncio.sleep(0.01)
            await asyncio.gather(bad, *good)
            await one.settle()


@OVERLAPS
@pytest.mark.parametrize("until", [4, 9])
@pytest.mark.parametrize("count", [2, 3, 6])
async def test_several_poison_requests_together(count: int, until: int, *, overlap: bool) -> None:
    """However many of them break one after the other, each alone: it is they that are broken."""
    tuning = Tuning(overlap=overlap, vocabulary=VOCABULARY, breaks=poisoned(until), rows_max=16)
    async with bench(tuning=tuning) as one:
        good = [one.answer(request) for request in requests_of(3)]
        bad = [
            refused(one, a_request(prompt(8, 60 + index, VOCABULARY), 20, request_id=f"poison{index}"))
            for index in range(count)
        ]
        await asyncio.gather(*bad, *good)


@OVERLAPS
async def test_poison_prompt_that_is_produced(*, overlap: bool) -> None:
    async with bench(tuning=Tuning(overlap=overlap, breaks=poisoned(16))) as one:
        poison = a_request(prompt(40, 50), 20, request_id="poison")
        calls: list[Awaitable[object]] = [*map(one.answer, requests_of(2))]
        calls += [one.engine.produce(poison)]
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(end, RequestError) for end in ended] == [False, False, True], ended


@LAYOUTS
@OVERLAPS
@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13, 18])
async def test_step_that_breaks_once_costs_no_request_anything(
    number: int, layout: Layout, *, overlap: bool
) -> None:
    """Its rows come back one at a time; no token is lost, streamed twice or wrong, with all written places of
    the step full of garbage."""
    steps, struck = 0, False

    def breaks(step: Step) -> Exception | None:
        nonlocal steps, struck
        steps += 1
        strikes = not struck and steps >= number and len(step) > 1
        struck |= strikes
        return Broke("once") if strikes else None

    tuning = Tuning(overlap=overlap, drafts_max=2, vocabulary=VOCABULARY, breaks=breaks)
    async with bench(layout=layout, tuning=tuning) as one:
        requests = requests_of(5)
        requests[3] = replace(requests[3], stop_token_ids=(2,))
        produced = asyncio.create_task(one.engine.produce(a_request(prompt(33, 9), 1)))
        await one.answer_all(requests)
        assert (await produced).depth == 32
        assert struck
        assert 2 <= len(one.engine.preempted) <= 6, "those of the step, once each"


@OVERLAPS
@pytest.mark.parametrize("last", [1, 3, 7])
async def test_when_every_step_breaks_the_loop_ends(last: int, *, overlap: bool) -> None:
    """Beyond FAILURES_MAX it is not the requests that are broken."""
    runner = BrokenRunner(last, Broke)
    async with bench(runner=runner, tuning=Tuning(overlap=overlap)) as one:
        requests = [a_request(prompt(5, index), 30, request_id=str(index)) for index in range(8)]
        ended = await asyncio.gather(*(_all_of(one, request) for request in requests))
        assert {type(end) for end in ended} <= {WorkerGone, RequestError}
        assert sum(isinstance(end, WorkerGone) for end in ended) >= len(requests) - FAILURES_MAX
        with pytest.raises(Broke):
            await one.loop
        assert len(one.runner.steps) <= last + 2 * FAILURES_MAX


class DeviceFailed(Broke, RuntimeError):
    """An error as torch and Triton raise it, which the bench expects at the end of the loop."""


FATAL: dict[str, Exception] = {
    "torch": DeviceFailed("CUDA error: an illegal memory access was encountered"),
    "Triton": DeviceFailed("Triton Error [CUDA]: an illegal memory access was encountered"),
    "lost": WorkerGone("a rank is gone"),
}


@OVERLAPS
@pytest.mark.parametrize("first", [1, 3, 21])
@pytest.mark.parametrize("error", FATAL.values(), ids=FATAL)
async def test_device_or_worker_that_fails_ends_the_loop_and_blames_no_request(
    error: Exception, first: int, *, overlap: bool
) -> None:
    """Every call of the device fails from the first failure on, as after an Xid. Some streams wait for
    memory, and calls for the same prompt to be produced."""
    runner = BrokenRunner(first, lambda: error)
    async with bench(num_extents=12, runner=runner, tuning=Tuning(overlap=overlap, rows_max=24)) as one:
        requests = [a_request(prompt(5, index), 30, request_id=str(index)) for index in range(24)]
        prompts = [asyncio.create_task(_produced(one, a_request(prompt(40, 99)))) for _ in range(3)]
        ended = await asyncio.gather(*(_all_of(one, request) for request in requests))
        assert {type(end) for end in ended} == {WorkerGone}
        assert {type(end) for end in await asyncio.gather(*prompts)} <= {WorkerGone, Produced}
        with pytest.raises(type(error), match=re.escape(str(error))):
            await one.loop
        assert len(one.runner.steps) <= first + overlap
        assert isinstance(await _all_of(one, requests[0]), WorkerGone), "also who comes later"


class Refusing:
    """Its third step cannot even be started."""

    def __init__(self) -> None:
        self._runner = BrokenRunner(10)
        self._steps = 0

    def run(self, step: Step) -> Awaitable[list[Drawn]]:
        self._steps += 1
        if self._steps == 3:
            raise WorkerGone("the link is broken")
        return asyncio.ensure_future(self._runner.run(step))


@OVERLAPS
async def test_step_that_cannot_be_started(*, overlap: bool) -> None:
    async with bench(runner=Refusing(), tuning=Tuning(overlap=overlap, wraps=False)) as one:
        requests = [a_request(prompt(5, index), 30, request_id=str(index)) for index in range(5)]
        ended = await asyncio.gather(*(_all_of(one, request) for request in requests))
        assert {type(end) for end in ended} == {WorkerGone}


@LAYOUTS
@OVERLAPS
@pytest.mark.parametrize("turns", [0, 1, 5, 20, 60, 150])
async def test_loop_is_cancelled_in_the_middle_of_a_step(
    turns: int, layout: Layout, *, overlap: bool
) -> None:
    """It ends when its steps have: nothing writes to the memory afterwards, and all of it is freed."""
    tuning = Tuning(overlap=overlap, drafts_max=2, vocabulary=VOCABULARY)
    async with bench(layout=layout, num_extents=12, tuning=tuning) as one:
        calls: list[asyncio.Task[Produced | Exception | None]] = [
            asyncio.create_task(_all_of(one, request)) for request in requests_of(6)
        ]
        calls.append(asyncio.create_task(_produced(one, a_request(prompt(40, 3), 1))))
        for _ in range(turns):
            await asyncio.sleep(0)
        await one.until(lambda: len(one.runner.in_flight) > 0)
        one.runner.gate.clear()
        await one.until(lambda: len(one.runner.in_flight) == 1 + overlap or bool(turns))
        calls[0].cancel()
        one.loop.cancel()
        await asyncio.sleep(1.0)
        assert bool(one.runner.in_flight) == (not one.loop.done())
        one.ledger.check()
        one.runner.gate.set()
        with suppress(asyncio.CancelledError):
            await one.loop
        assert one.runner.in_flight == []
        one.ledger.check()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(ended[0], asyncio.CancelledError)
        assert all(isinstance(end, WorkerGone | Produced | None) for end in ended[1:]), ended


async def _produced(one: Bench, request: Request) -> Produced | Exception | None:
    try:
        return await one.engine.produce(request)
    except WorkerGone as error:
        return error


async def _all_of(one: Bench, request: Request) -> Produced | Exception | None:
    try:
        await one.read(request)
    except (RequestError, WorkerGone) as error:
        return error
    return None
