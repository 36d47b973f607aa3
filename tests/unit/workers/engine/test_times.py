"""A worker reports the exact times of the parts of a prompt and what it moved, in virtual time."""

import asyncio
from contextlib import aclosing

import pytest

from tests.support.workers.bench import IN_VIRTUAL_TIME, Bench, Tuning, a_request, bench, prompt
from tests.support.workers.timed_store import TimedStore
from tidemill.workers.messages import Request, Times

pytestmark = IN_VIRTUAL_TIME

GET_S, PUT_S = 2.0, 0.5
REQUEST = a_request(prompt(29))


async def first_token(one: Bench, request: Request) -> tuple[Times, float]:
    """Return the reported times, and the measured one."""
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    times, took_s = Times(), 0.0
    async with aclosing(one.engine.generate(request)) as deltas:
        async for delta in deltas:
            if delta.provenance is not None:
                times, took_s = delta.provenance.times, now_s() - began_s
    return times, took_s


def total_s(times: Times) -> float:
    return times.waited_s + times.fetched_s + times.computed_s + times.stored_s


async def test_parts_add_up_to_the_elapsed_time() -> None:
    store = TimedStore(get_s=GET_S, put_s=PUT_S)
    async with bench(store) as prefill:
        began_s = asyncio.get_running_loop().time()
        times = (await prefill.engine.produce(REQUEST)).provenance.times
        assert total_s(times) == pytest.approx(asyncio.get_running_loop().time() - began_s)
        assert times.computed_s > 0
        assert times.stored_s > 0
        assert times.fetched_s == 0
    async with bench(store) as decode:
        times, took_s = await first_token(decode, REQUEST)
        assert times.fetched_s == pytest.approx(GET_S)
        assert times.computed_s > 0
        assert times.stored_s == 0
        assert total_s(times) == pytest.approx(took_s)


async def test_time_in_the_admission_queue_is_reported() -> None:
    async with bench(tuning=Tuning(rows_max=1)) as one:
        first = asyncio.create_task(first_token(one, a_request(prompt(29), 40, request_id="a")))
        await one.until(lambda: bool(one.runner.steps))
        second = asyncio.create_task(first_token(one, a_request(prompt(29, 1), request_id="b")))
        (times, _), (late, took_s) = await asyncio.gather(first, second)
        assert times.waited_s == 0
        assert late.waited_s > late.computed_s
        assert total_s(late) == pytest.approx(took_s)


async def test_moved_bytes_are_counted_with_their_time() -> None:
    store = TimedStore(get_s=GET_S, put_s=PUT_S)
    async with bench(store) as prefill:
        await prefill.engine.produce(REQUEST)
        counters = prefill.engine.load().counters
        stored_bytes = 28 // 4 * prefill.layout.page_bytes + prefill.layout.state_bytes
        assert counters["published_bytes"] == stored_bytes
        assert counters["publish_seconds"] >= PUT_S
        assert counters["fetched_bytes"] == counters["fetch_seconds"] == 0
    async with bench(store) as decode:
        await decode.answer(REQUEST)
        counters = decode.engine.load().counters
        assert counters["fetched_bytes"] == stored_bytes
        assert counters["fetch_seconds"] == pytest.approx(GET_S)
