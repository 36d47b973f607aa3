"""The engine gives the same tokens whatever its memory and its store do, and gives its memory back."""

import asyncio

import pytest

from tests.support.kvstore.leases import scatter
from tests.support.sim.fold import ATTENTION, LINEAR
from tests.support.workers.bench import (
    IN_VIRTUAL_TIME,
    Tuning,
    a_request,
    bench,
    prompt,
    root_of,
)
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import layout_of
from tidemill.workers.messages import Provenance, RequestError

pytestmark = IN_VIRTUAL_TIME


async def test_oldest_request_is_never_held_up_by_a_younger_one() -> None:
    """Each fits alone, and no two of them together."""
    async with bench(num_extents=4) as one:
        ended: list[int] = []

        async def answer(seed: int) -> None:
            await one.answer(a_request(prompt(10, seed), 34))
            ended.append(seed)

        async with asyncio.TaskGroup() as clients:
            for seed in range(3):
                clients.create_task(answer(seed))
                await asyncio.sleep(0.1)
        assert ended == [0, 1, 2]
        assert one.engine.load().counters["preemptions"] > 0


async def test_request_that_can_never_fit_takes_no_memory() -> None:
    async with bench(num_extents=4) as one:
        before = one.ledger.usage()
        capacity = 48
        for request in (
            a_request(prompt(capacity - 5), 6),
            a_request((), 1),
            a_request(prompt(3), 0),
        ):
            with pytest.raises(RequestError):
                await one.answer(request)
            with pytest.raises(RequestError):
                await one.engine.produce(request)
        assert one.ledger.usage() == before
        await one.answer(a_request(prompt(capacity - 6), 6))


async def test_salt_shares_nothing() -> None:
    async with bench() as one:
        await one.answer(a_request(prompt(20)))
        foreign = await one.answer(a_request(prompt(20), salt="tenant"))
        assert foreign == Provenance(computed_tokens=20)


@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
async def test_step_that_uses_cpu_time_is_progress_however_long_it_takes(share: float) -> None:
    now_s = asyncio.get_running_loop().time
    async with bench(tuning=Tuning(step_cpu_s=lambda: share * now_s())) as one:
        one.runner.gate.clear()
        answer = asyncio.create_task(one.answer(a_request(prompt(9), 2)))
        await asyncio.sleep(1.0)
        seen = [one.engine.progress]
        for _ in range(20):
            await asyncio.sleep(3.0)
            seen.append(one.engine.progress)
        assert len(set(seen)) == (len(seen) if share else 1)
        one.runner.gate.set()
        await answer


async def test_pages_scattered_over_all_extents_do_not_lock_a_request_out() -> None:
    layout = layout_of((LINEAR, ATTENTION), 2, extent_bytes_min=1, granule_bytes=1)
    async with bench(layout=layout, num_extents=6) as one:
        request = a_request(prompt(11), 1)
        scatter(one.ledger, page_keys(root_of(""), request.tokens, 2))
        assert [delta.provenance for delta in await one.read(request)] == [
            Provenance(reused_tokens=10, computed_tokens=1)
        ]
