"""A drained worker leaves its work to others, which resume it and do not compute it again."""

import asyncio
from contextlib import aclosing
from random import Random

import pytest

from tests.support.sim.faulty_store import FaultyStore
from tests.support.workers.bench import (
    IN_VIRTUAL_TIME,
    LAYOUTS,
    Bench,
    Tuning,
    a_request,
    a_store,
    bench,
    prompt,
)
from tidemill.kvstore.layout import Layout
from tidemill.workers.engine.drain import WITHIN_S
from tidemill.workers.messages import HandedOver, Request
from tidemill.workers.options import CheckpointStrategy

pytestmark = IN_VIRTUAL_TIME

FAR = 100


async def handed_over(one: Bench, request: Request) -> list[int]:
    """Return what is streamed until the worker ends it."""
    got: list[int] = []
    try:
        async with aclosing(one.engine.generate(request)) as deltas:
            async for delta in deltas:
                got += delta.tokens
    except HandedOver:
        return got
    raise AssertionError("it was answered to its end")


@pytest.mark.parametrize("drafts_max", [0, 3])
@pytest.mark.parametrize("strategy", ["none", "lazy", "double"])
@LAYOUTS
async def test_streams_are_resumed_from_the_store(
    layout: Layout, strategy: CheckpointStrategy, drafts_max: int
) -> None:
    """Another worker fetches all but the tokens drawn while that was stored."""
    tuning = Tuning(interval=5, drafts_max=drafts_max, vocabulary=3)

    store = a_store()
    requests = [a_request(prompt(9, index, 3), FAR, request_id=str(index)) for index in range(4)]
    async with (
        bench(store, layout=layout, strategy=strategy, tuning=tuning, num_extents=200) as one,
        bench(store, layout=layout, strategy=strategy, tuning=tuning, num_extents=200) as other,
    ):
        streams = [asyncio.create_task(handed_over(one, request)) for request in requests]
        await one.until(lambda: one.count("generated_tokens") > 60)
        one.engine.restrict(produces=False, generates=False)
        for request, stream in zip(requests, streams, strict=True):
            got = await stream
            want = one.expected(request)
            assert 0 < len(got) < FAR
            assert got == want[: len(got)]
            rest = a_request((*request.tokens, *got), FAR - len(got), request_id=f"{request.request_id}'")
            provenance = await other.answer(rest)
            resumed = provenance.fetched_tokens
            assert resumed >= len(rest.tokens) - 4 * (2 + drafts_max), "little is computed again"


async def test_slow_store_is_waited_for() -> None:
    """The stream continues meanwhile; another worker resumes it where it was at the order."""
    store = FaultyStore(Random(0), drop=0, evict=0, corrupt=0, refuse=0, delay_s_max=0.5)
    request = a_request(prompt(9), 2 * FAR)
    async with bench(store, num_extents=200) as one, bench(store, num_extents=200) as other:
        stream = asyncio.create_task(handed_over(one, request))
        await one.until(lambda: one.count("generated_tokens") > 20)
        known = len(request.tokens) + one.count("generated_tokens")
        one.engine.restrict(produces=False, generates=False)
        got = await stream
        rest = a_request((*request.tokens, *got), 2 * FAR - len(got), request_id="again")
        assert (await other.answer(rest)).fetched_tokens >= known


async def test_new_and_waiting_calls_end_immediately() -> None:
    async with bench(tuning=Tuning(rows_max=1)) as one:
        running = asyncio.create_task(handed_over(one, a_request(prompt(5), 15)))
        await one.until(lambda: one.engine.load().running_rows == 1)
        waiting = [
            asyncio.create_task(handed_over(one, a_request(prompt(20, index + 1), 3, request_id=str(index))))
            for index in range(3)
        ]
        await one.until(lambda: one.engine.load().waiting_rows > 0)
        one.runner.gate.clear()  # no step ends
        one.engine.restrict(produces=False, generates=False)
        late = one.engine.load().waiting_rows
        assert late
        ended, _ = await asyncio.wait(waiting, timeout=1.0)
        one.runner.gate.set()
        assert len(ended) == len(waiting)
        assert one.engine.load().waiting_rows == 0
        for request in (a_request(prompt(5)), a_request(prompt(9))):
            with pytest.raises(HandedOver):
                await one.engine.produce(request)
            with pytest.raises(HandedOver):
                await one.engine.prefetch(request)
            assert await handed_over(one, request) == []
        await asyncio.gather(running, *waiting)


async def test_role_keeps_its_own_work() -> None:
    async with bench() as one:
        stream = asyncio.create_task(one.answer(a_request(prompt(5), 30)))
        await one.until(lambda: one.count("generated_tokens") > 3)
        one.engine.restrict(produces=False, generates=True)
        with pytest.raises(HandedOver):
            await one.engine.produce(a_request(prompt(9)))
        await stream
        one.engine.restrict(produces=True, generates=False)
        assert (await one.engine.produce(a_request(prompt(9)))).depth == 8
        assert await handed_over(one, a_request(prompt(5))) == []
        one.engine.restrict(produces=True, generates=True)
        await one.answer(a_request(prompt(5)))


async def test_stream_ends_when_storing_takes_too_long() -> None:
    """A prompt that is still being computed goes when the time is up."""
    async with bench(num_extents=400, tuning=Tuning(step_s_max=2.0)) as one:
        task = asyncio.create_task(one.engine.produce(a_request(prompt(1000))))
        await one.until(lambda: len(one.runner.steps) > 2)
        before_s = asyncio.get_running_loop().time()
        one.engine.restrict(produces=False, generates=False)
        with pytest.raises(HandedOver):
            await task
        took_s = asyncio.get_running_loop().time() - before_s
        assert WITHIN_S <= took_s < WITHIN_S + 10


async def test_answer_that_ends_before_the_next_page_ends_here() -> None:
    async with bench() as one:
        stream = asyncio.create_task(one.answer(a_request(prompt(5), 3)))
        await one.until(lambda: one.count("generated_tokens") > 0)
        one.engine.restrict(produces=False, generates=False)
        await stream
