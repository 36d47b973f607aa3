"""Checkpoints while decoding: the slots that each strategy holds, keeps and frees, alone and together."""

import asyncio

import pytest

from tests.support.sim.fold import expected
from tests.support.workers.bench import (
    IN_VIRTUAL_TIME,
    LAYOUTS,
    LOOK_S,
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
from tidemill.kvstore.memory.demand import CHECKPOINT_STATE
from tidemill.workers.messages import Request
from tidemill.workers.options import CheckpointStrategy

pytestmark = IN_VIRTUAL_TIME

STRATEGIES: tuple[CheckpointStrategy, ...] = ("none", "double", "lazy")


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("strategy", "slots"), [("none", 1), ("double", 3), ("lazy", 2)])
async def test_slots_at_rest(strategy: CheckpointStrategy, slots: int, *, overlap: bool) -> None:
    """`lazy` borrows the slot for a boundary one step before it is reached, if a step is in flight."""
    async with bench(strategy=strategy, tuning=Tuning(overlap=overlap)) as one:
        work = [asyncio.create_task(one.answer(a_request(prompt(10, seed), 60))) for seed in range(3)]
        seen: set[tuple[int, int]] = set()
        while not any(task.done() for task in work):
            if one.count("generated_tokens") > 3 * 10:
                load = one.engine.load()
                seen.add((load.running_rows, load.state_slots))
            await asyncio.sleep(LOOK_S)
        await asyncio.gather(*work)
        assert {rows for rows, _ in seen} == {3}
        assert min(held for _, held in seen) == 3 * slots
        assert max(held for _, held in seen) <= 3 * (slots + (overlap and strategy == "lazy"))
        await one.settle()
        assert one.engine.load().state_slots == 0


@LAYOUTS
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_where_the_next_turn_resumes(strategy: CheckpointStrategy, layout: Layout) -> None:
    """It resumes at the end of the answer, or with `none` at the end of the prompt; without states always
    there; on another worker at the same place."""
    store, copied = a_store(), a_store()
    async with bench(store, strategy=strategy, layout=layout) as one:
        request = a_request(prompt(10), 15)
        await one.answer(request)
        answer = tuple(one.expected(request))
        following = a_request(request.tokens + answer + prompt(7, 1), 5)
        depth = 8 if strategy == "none" and layout.hybrid else 24
        await one.settle()
        copied.objects.update(store.objects)
        async with bench(copied, layout=layout) as other:
            assert (await other.answer(following)).fetched_tokens == depth
        assert (await one.answer(following)).reused_tokens == depth


@pytest.mark.parametrize("strategy", ["double", "lazy"])
@pytest.mark.parametrize("interval", [1, 2, 3])
async def test_interval_is_kept(strategy: CheckpointStrategy, interval: int) -> None:
    async with bench(strategy=strategy, tuning=Tuning(interval=interval)) as one:
        assert await _depths_seen(one, a_request(prompt(2), 41)) == set(range(interval, 11, interval))


@pytest.mark.parametrize("strategy", ["double", "lazy"])
@pytest.mark.parametrize("refusals", [1, 2, 3])
async def test_boundary_without_a_slot_is_caught_up_with_at_the_next_page(
    strategy: CheckpointStrategy, refusals: int
) -> None:
    """The second slot of `double` is its own: nothing that others take can refuse it."""
    asked = 0

    def refuses(site: str) -> bool:
        nonlocal asked
        asked += site == CHECKPOINT_STATE
        return site == CHECKPOINT_STATE and 2 <= asked < 2 + refusals

    async with bench(strategy=strategy, tuning=Tuning(interval=4, refuses=refuses)) as one:
        depths = await _depths_seen(one, a_request(prompt(2), 66))
        if strategy == "double":
            assert depths == {4, 8, 12, 16}
        else:  # 4 was kept until the first page at which a slot could be had
            assert depths == {4, 8 + refusals, 12, 16}
            assert one.count("checkpoints_skipped") == refusals


async def _depths_seen(one: Bench, request: Request) -> set[int]:
    """Return the depths, in pages, of all checkpoints that existed. There is never more than one, and never
    none after the first."""
    work = asyncio.create_task(one.answer(request))
    seen: set[int] = set()
    while not work.done():
        depths = [entry.depth_pages for entry in one.ledger.index if entry.checkpoint is not None]
        assert len(depths) == bool(depths or seen)
        seen.update(depths)
        await asyncio.sleep(LOOK_S)
    await work
    return seen


@pytest.mark.parametrize("count", [64, 128])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_all_reach_every_boundary_in_the_same_step(strategy: CheckpointStrategy, count: int) -> None:
    """No request loses a checkpoint to the boundary of another."""
    requests = [a_request(prompt(9, seed), 20, request_id=str(seed)) for seed in range(count)]

    tuning = Tuning(rows_max=count + 1)
    async with bench(strategy=strategy, num_extents=3 * count, tokens_max=9 * count, tuning=tuning) as one:
        one.runner.gate.clear()
        opener = asyncio.create_task(one.answer(a_request(prompt(1), 1)))
        await one.until(lambda: bool(one.runner.steps))
        work = asyncio.create_task(one.answer_all(requests))
        await one.until(lambda: one.engine.load().running_rows == count + 1)
        one.runner.gate.set()
        await asyncio.gather(opener, work)
        assert {len(step) for step in one.runner.steps} == {1, count}, "all of them in step"
        await one.settle()
        for request in requests:
            tokens = request.tokens + tuple(expected(request, hybrid=True))
            keys = page_keys(root_of(""), tokens, 4)
            assert one.ledger.index.match(keys).restorable_pages == (2 if strategy == "none" else 7)
        assert one.engine.preempted == []
        counters = one.engine.load().counters
        assert counters.get("checkpoints_skipped", 0) == 0
        assert not any(value for name, value in counters.items() if name.startswith("evicted"))
