"""A prompt starts while slices of its pages arrive: nothing is read before it is verified, or counts without
the rest."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from tests.support.sim.fold import fold_layout
from tests.support.workers.bench import IN_VIRTUAL_TIME, Bench, a_request, bench, prompt, stored
from tests.support.workers.timed_store import TimedStore
from tidemill.kvstore.keys import Kind, ObjectKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.page_store import Got

pytestmark = IN_VIRTUAL_TIME

P = 4
GET_S = 1.0
STEP_S = 0.1
"""More than a step takes, and less than a slice."""
LAYOUTS = {
    "pages": fold_layout(P, hybrid=False, page_slices=2),
    "states": fold_layout(P, hybrid=True, page_slices=2),
    "windows": fold_layout(P, hybrid=False, window=7, page_slices=2),
    "states and windows": fold_layout(P, hybrid=True, window=7, page_slices=2),
    "copied states": fold_layout(P, hybrid=True, checkpoint_dtype="bfloat16", page_slices=2),
}
EARLY = [name for name in LAYOUTS if name != "copied states"]
REQUEST = a_request(prompt(21))
DEEPEST = 20

layouts = pytest.mark.parametrize("layout", [LAYOUTS[name] for name in EARLY], ids=EARLY)


class SlicedStore(TimedStore):
    """Calls `at_last` when the last slices of pages are asked for."""

    at_last: Callable[[], Awaitable[None]] | None = None

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        if self.at_last is not None and all(map(is_last, (key for key, _ in wanted))):
            await self.at_last()
        return await super().get(wanted)


def is_last(key: ObjectKey) -> bool:
    return key.kind is Kind.PAGE and key.shard == 1


async def filled(layout: Layout, *lengths: int) -> SlicedStore:
    """Return a slow store with the prompt up to these lengths."""
    requests = [a_request(REQUEST.tokens[:num_tokens]) for num_tokens in lengths or (len(REQUEST.tokens),)]
    store = await stored(SlicedStore(), *requests, layout=layout)
    store.get_s = GET_S
    return store


@layouts
async def test_step_is_launched_when_the_first_slice_is_here(layout: Layout) -> None:
    store = await filled(layout)
    async with bench(store, layout=layout) as one:
        answering = asyncio.create_task(one.answer(REQUEST))
        await asyncio.sleep(GET_S + STEP_S)
        ((row,),) = one.runner.steps
        assert [arrival.done() for arrival in row.arrivals] == [True, False]
        assert row.start == DEEPEST
        one.ledger.check()
        found = await answering
        assert found.times.fetched_s == pytest.approx(GET_S, abs=STEP_S), "it waited for one slice of two"
        assert (found.fetched_tokens, found.computed_tokens) == (DEEPEST, 1)
        assert one.count("early_starts") == 1
        assert (await one.answer(REQUEST)).reused_tokens == DEEPEST, "pages and checkpoint were kept"
        assert one.count("early_starts_lost") == 0


async def test_checkpoints_of_another_class_wait_for_all_slices() -> None:
    layout = LAYOUTS["copied states"]
    async with bench(await filled(layout), layout=layout) as one:
        assert (await one.answer(REQUEST)).fetched_tokens == DEEPEST
        assert one.count("early_starts") == 0


def corrupt(store: SlicedStore, _: Bench) -> None:
    store.objects[next(key for key in reversed(store.objects) if is_last(key))][-1] ^= 1


def forget(store: SlicedStore, _: Bench) -> None:
    for key in list(filter(is_last, store.objects)):
        store.forget(key)


def hang(store: SlicedStore, _: Bench) -> None:
    """The transfer ends long after the store's patience does, and then it arrives."""
    store.get_s = 5 * GET_S


def die(store: SlicedStore, _: Bench) -> None:
    store.objects.clear()


@layouts
@pytest.mark.parametrize("fault", [corrupt, forget, hang, die])
async def test_slice_that_does_not_arrive_voids_the_step(
    layout: Layout, fault: Callable[[SlicedStore, Bench], None]
) -> None:
    """The step was launched, and the answer is what is computed from the depth that holds."""
    store = await filled(layout, 13, 21)
    store.patience = 3 * GET_S
    async with bench(store, layout=layout) as one:

        async def at_last() -> None:
            store.at_last = None
            fault(store, one)
            await asyncio.sleep(STEP_S)

        store.at_last = at_last
        found = await one.answer(REQUEST)
        assert one.count("early_starts") == one.count("early_starts_lost") == 1
        assert one.runner.steps[0][0].arrivals
        assert found.fetched_tokens + found.computed_tokens == len(REQUEST.tokens)
        assert not any(row.arrivals for step in one.runner.steps[1:] for row in step), "once is enough"
        await one.answer(a_request(prompt(33)))


@layouts
@pytest.mark.parametrize("before", [corrupt, None])
async def test_sequence_that_ends_meanwhile_keeps_its_memory_for_the_fetch(
    layout: Layout, before: Callable[[SlicedStore, Bench], None] | None
) -> None:
    store = await filled(layout)
    async with bench(store, layout=layout) as one:
        answering = asyncio.create_task(one.answer(REQUEST))
        await asyncio.sleep(GET_S + STEP_S)
        if before is not None:
            before(store, one)
        answering.cancel()
        await asyncio.wait([answering])
        one.ledger.check()
        assert one.ledger.num_leases == 1, "the fetch and the step write to it"
        await one.settle()
        await one.answer(REQUEST)


@layouts
async def test_preempted_sequence_is_fetched_again_while_the_first_fetch_runs(layout: Layout) -> None:
    store = await filled(layout)
    async with bench(store, layout=layout) as one:
        answering = asyncio.create_task(one.answer(REQUEST))
        await asyncio.sleep(GET_S + STEP_S)
        (sequence,) = one.engine._sequences.running.values()
        one.engine._preempt(sequence)
        one.ledger.check()
        assert (await answering).fetched_tokens == DEEPEST


async def test_prompt_beside_others_waits_for_all_slices() -> None:
    """Otherwise their steps would wait for the store."""
    layout = LAYOUTS["states"]
    store = await filled(layout)
    async with bench(store, layout=layout) as one:
        other = asyncio.create_task(one.answer(a_request(prompt(9, 5), 400, request_id="other")))
        await one.until(lambda: bool(one.runner.steps))
        await one.answer(REQUEST)
        assert not other.done()
        assert one.count("early_starts") == 0
        await other


async def test_other_prompt_that_came_meanwhile_ends_the_early_start() -> None:
    layout = LAYOUTS["pages"]
    async with bench(await filled(layout), layout=layout) as one:
        answering = asyncio.create_task(one.answer(REQUEST))
        await asyncio.sleep(GET_S / 2)
        other = asyncio.create_task(one.answer(a_request(prompt(9, 5), 400, request_id="other")))
        assert (await answering).fetched_tokens == DEEPEST
        assert one.count("early_starts") == 0
        await other
