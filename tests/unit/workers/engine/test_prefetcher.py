"""Pages are published while they are computed, and fetched elsewhere meanwhile."""

import asyncio

import pytest

from tests.support.sim.fold import fold_layout
from tests.support.workers.bench import (
    ATTENTION_ONLY,
    HYBRID,
    IN_VIRTUAL_TIME,
    UNWINDOWED,
    Bench,
    a_request,
    a_store,
    bench,
    prompt,
    root_of,
    stored,
)
from tests.support.workers.timed_store import TimedStore
from tidemill.kvstore.keys import Kind, ObjectKey, page_keys
from tidemill.kvstore.layout import Layout
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.engine.prefetcher import AHEAD_PAGES_MAX, POLL_S_MAX
from tidemill.workers.messages import Produced, Provenance

pytestmark = IN_VIRTUAL_TIME

LONG = prompt(121)
KEYS = page_keys(root_of(""), LONG[:120], 4)


@UNWINDOWED
@pytest.mark.parametrize(("put_s", "early"), [(0.0, 10), (0.1, 1)])
async def test_prompt_is_published_while_it_is_computed(layout: Layout, put_s: float, early: int) -> None:
    """Each page is offered once, in order, and the first ones are there long before the last is computed.
    Behind a put that takes longer than a step comes one of all later pages."""
    store = TimedStore(put_s=put_s)
    pages = [ObjectKey(Kind.PAGE, key) for key in KEYS]
    async with bench(store, layout=layout, tokens_max=12) as one:
        task = asyncio.create_task(one.engine.produce(a_request(LONG)))
        await one.until(lambda: one.ledger.counters["computed_tokens"] > 60)
        assert store.objects.keys() >= set(pages[:early])
        assert pages[-1] not in store.objects
        assert (await task).depth == 120
        offered = [key for put in store.puts for key in put]
        assert offered == pages + [ObjectKey(Kind.CHECKPOINT, KEYS[-1])] * layout.hybrid
        assert not put_s or 2 < len(store.puts) < 10, "fewer than steps"


@UNWINDOWED
@pytest.mark.parametrize("refuses", [1, 2, 5])
async def test_no_page_counts_as_stored_after_one_that_was_not(layout: Layout, refuses: int) -> None:
    """Later puts begin where the store has ended; one that comes too late for that leaves the depth at 0."""
    store = TimedStore()
    async with bench(store, layout=layout, tokens_max=12) as one:
        task = asyncio.create_task(one.engine.produce(a_request(LONG)))
        await one.until(lambda: one.ledger.counters["computed_tokens"] > 30)
        store.refuses = refuses
        produced = await task
        assert produced.depth == 120
        assert all(ObjectKey(Kind.PAGE, key) in store.objects for key in KEYS)
        store.objects.clear()
        store.refuses = 1000
        assert (await one.engine.produce(a_request(LONG))).depth == 0


async def test_pieces_after_a_refused_put_are_not_offered() -> None:
    """The end of the prompt waits for its turn, which never comes."""
    store = TimedStore(put_s=5.0)
    store.refuses = 1
    async with bench(store, tokens_max=12) as one:
        assert (await one.engine.produce(a_request(LONG))).depth == 0
        assert len(store.puts) == 1
        assert one.ledger.num_leases == 0, "it is held for a put that never comes"


async def test_checkpoint_of_a_junction_is_published_though_later_pages_wait_as_well() -> None:
    """The pages up to it came from a prefetch, so it is computed in several steps, and in front of all that
    waits is a put that takes long."""
    shared = prompt(47)
    keys = page_keys(root_of(""), shared, 4)

    store = TimedStore()
    async with bench(store) as one, bench(store, tokens_max=12) as other:
        await one.engine.produce(a_request(shared + prompt(10, 1)))
        assert (await other.engine.prefetch(a_request(shared))).depth == 44
        store.put_s = 5.0
        await other.engine.produce(a_request(shared + prompt(40, 2)))
        assert ObjectKey(Kind.CHECKPOINT, keys[-1]) in store.objects


async def test_store_that_is_late_does_not_hold_up_the_answer_of_a_prefill_worker() -> None:
    store = TimedStore(put_s=500.0, patience=3.0)
    async with bench(store) as one:
        async with asyncio.timeout(50.0):
            produced = await one.engine.produce(a_request(LONG))
        assert produced == Produced(depth=0, provenance=Provenance(computed_tokens=120))
        assert one.ledger.num_leases > 0, "what is being put stays where it is"
        store.put_s = 0.0
        await asyncio.sleep(600.0)
        assert ObjectKey(Kind.PAGE, KEYS[0]) in store.objects


@UNWINDOWED
async def test_late_fetch_is_given_up_and_its_memory_kept_until_it_has_ended(layout: Layout) -> None:
    """The store writes noise into the pages while it is late: a request that reused them would answer
    nonsense."""
    store = await stored(TimedStore(), a_request(LONG), layout=layout)
    store.get_s, store.patience = 100.0, 2.0
    async with bench(store, layout=layout) as second:
        async with asyncio.timeout(50.0):
            provenance = await second.answer(a_request(LONG))
        assert provenance == Provenance(computed_tokens=121)
        assert second.count("fetches_late") == 1
        assert store.under_way == 1
        assert second.ledger.num_leases >= 1
        store.get_s = 0.0
        await asyncio.sleep(200.0)
        await second.settle()


async def test_request_cancelled_during_its_fetch_ends_immediately() -> None:
    store = await stored(TimedStore(), a_request(LONG))
    store.get_s = 100.0
    async with bench(store) as second:
        task = asyncio.create_task(second.answer(a_request(LONG)))
        await second.until(lambda: store.under_way == 1)
        task.cancel()
        async with asyncio.timeout(1.0):
            await asyncio.wait({task})
        assert second.engine.num_requests == 0
        assert second.ledger.num_leases == 1, "the transfer uses it"
        await asyncio.sleep(200.0)
        assert second.ledger.num_leases == 0


@UNWINDOWED
@pytest.mark.parametrize("get_s", [0.0, 0.003, 0.05])
async def test_pages_are_fetched_while_they_are_computed_elsewhere(layout: Layout, get_s: float) -> None:
    store = TimedStore(get_s=get_s)
    async with bench(store, layout=layout, tokens_max=12) as one, bench(store, layout=layout) as other:
        request = a_request(LONG)
        ahead = asyncio.create_task(other.engine.prefetch(request))
        assert (await one.engine.produce(request)).depth == 120
        here = len(other.ledger.index)
        assert here > 0
        ahead.cancel()
        provenance = await other.answer(request)
        assert provenance == Provenance(fetched_tokens=120, computed_tokens=1)
        fetched = [key for get in store.gets for key in get]
        assert len(set(fetched)) == len(fetched) == 30 + layout.hybrid, "nothing is fetched twice"


async def _prefetched(one: Bench, depth_max: int) -> None:
    leases = one.ledger.num_leases
    produced = await one.engine.prefetch(a_request(LONG))
    assert produced.depth <= depth_max
    assert one.ledger.num_leases == leases
    await one.answer(a_request(LONG))


async def test_prefetch_takes_no_memory_that_is_needed() -> None:
    """Memory for as many pages must be left for others, and requests that wait for memory go first."""
    store = await stored(a_store(), a_request(LONG))
    num_extents = extents_for(HYBRID, 128)
    async with bench(store, num_extents=num_extents) as other:
        await _prefetched(other, 0)
    async with bench(store, num_extents=2 * num_extents) as other:
        running = asyncio.create_task(other.answer(a_request(prompt(121, 1), 100)))
        waiting = asyncio.create_task(other.answer(a_request(prompt(200, 2), 6)))
        await other.until(lambda: other.engine.load().waiting_rows == 1)
        await _prefetched(other, 0)
        await asyncio.gather(running, waiting)


async def test_prefetch_that_waits_holds_no_memory() -> None:
    """A stream needs all there is, while the last page of the prefetch is not stored yet."""
    store, rest = TimedStore(), await stored(a_store(), a_request(LONG), layout=ATTENTION_ONLY)
    num_extents = extents_for(ATTENTION_ONLY, 200)
    async with bench(store, layout=ATTENTION_ONLY, num_extents=num_extents) as other:
        ahead = asyncio.create_task(other.engine.prefetch(a_request(LONG, request_id="ahead")))
        for index, key in enumerate(rest.objects):
            await other.until(lambda there=index: len(other.ledger.index) == there)
            if index < 29:
                store.objects[key] = rest.objects[key]
        assert other.ledger.num_leases == 0
        await other.answer(a_request(prompt(121, 1), 70))
        assert not ahead.done()
        ahead.cancel()
        await asyncio.wait([ahead])


async def test_prefetch_that_finds_nothing_asks_ever_less_often() -> None:
    store = TimedStore()
    async with bench(store) as one:
        ahead = asyncio.create_task(one.engine.prefetch(a_request(LONG)))
        await asyncio.sleep(10.0)
        ahead.cancel()
        assert 10.0 / POLL_S_MAX < len(store.asked) < 10.0 / POLL_S_MAX + 10


async def test_prefetch_asks_for_a_part_of_a_long_prompt() -> None:
    store, layout = TimedStore(), fold_layout(1, hybrid=False)
    async with bench(store, layout=layout) as one, bench(store, layout=layout) as other:
        await one.engine.produce(a_request(LONG))
        store.asked.clear()
        assert (await other.engine.prefetch(a_request(LONG))).depth == 120
        assert [len(keys) for keys in store.asked] == [AHEAD_PAGES_MAX, 120 - AHEAD_PAGES_MAX]


async def test_prefetch_that_is_late_keeps_its_memory_and_the_request_does_not_wait_for_it() -> None:
    store = await stored(TimedStore(), a_request(LONG))
    store.get_s, store.patience = 500.0, 2.0
    async with bench(store) as other:
        ahead = asyncio.create_task(other.engine.prefetch(a_request(LONG)))
        await asyncio.sleep(10.0)
        assert store.under_way == other.ledger.num_leases == 1, "the transfer uses it"
        async with asyncio.timeout(50.0):
            assert await other.answer(a_request(LONG)) == Provenance(computed_tokens=121)
        await ahead
        await asyncio.sleep(500.0)


async def test_prefetch_that_finds_no_page_ends_and_the_request_is_served() -> None:
    store = await stored(TimedStore(), a_request(LONG))
    for key in list(store.objects):
        store.objects[key][-1] ^= 1
    async with bench(store) as other:
        await _prefetched(other, 0)
