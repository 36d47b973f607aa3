"""Engines that share a store: what is fetched, published, lost, damaged or refused there changes no token."""

import asyncio
from dataclasses import replace

import pytest

from tests.support.kvstore.leases import scatter
from tests.support.sim.fold import ATTENTION, LINEAR, fold_layout
from tests.support.workers.bench import (
    IN_VIRTUAL_TIME,
    Tuning,
    a_request,
    a_store,
    bench,
    prompt,
    root_of,
    stored,
)
from tests.support.workers.timed_store import TimedStore
from tidemill.kvstore.keys import Kind, page_keys
from tidemill.kvstore.layout import STATES, Latent, Layout, layout_of, restorable_end
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.engine.publisher import PUBLICATIONS_MAX
from tidemill.workers.messages import (
    PagesMissing,
    Produced,
    Provenance,
)

pytestmark = IN_VIRTUAL_TIME

SHAPES = sorted(
    {(P, num_tokens) for P in (1, 4, 16) for num_tokens in (1, P - 1, P, P + 1, 2 * P, 3 * P - 1, 3 * P + 1)}
    - {(P, 0) for P in (1, 4, 16)}
)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize(("page_tokens", "num_tokens"), SHAPES)
async def test_cold_warm_fetched_and_produced_are_the_same(
    page_tokens: int, num_tokens: int, *, hybrid: bool
) -> None:
    request = a_request(prompt(num_tokens), 2 * page_tokens + 1)
    boundary = restorable_end(num_tokens, page_tokens)
    layout = fold_layout(page_tokens, hybrid=hybrid)

    store = a_store()
    async with bench(store, layout=layout) as first:
        cold = await first.answer(request)
        assert cold == Provenance(computed_tokens=num_tokens)
        warm = await first.answer(request)
        assert warm == Provenance(reused_tokens=boundary, computed_tokens=num_tokens - boundary)
    async with bench(store, layout=layout) as second:
        fetched = await second.answer(request)
        assert fetched == Provenance(fetched_tokens=boundary, computed_tokens=num_tokens - boundary)
    other = a_store()
    async with bench(other, layout=layout) as prefill:
        produced = await prefill.engine.produce(request)
        assert produced == Produced(depth=boundary, provenance=Provenance(computed_tokens=boundary))
        async with bench(other, layout=layout) as decode:
            assert await decode.answer(replace(request, gap_tokens_max=0)) == fetched


async def test_short_shared_part_is_restorable_from_its_third_sight_on() -> None:
    """The second prompt leaves the path of the first one: there, at the junction, a checkpoint is made."""
    shared = prompt(10)

    async with bench() as one:
        reused: list[int] = []
        for seed in (1, 2, 3):
            provenance = await one.answer(a_request(shared + prompt(11, seed), 3))
            reused.append(provenance.reused_tokens)
        assert reused == [0, 0, 8]
        assert one.count("kv_hit_without_state_tokens") == 8, "of the second one"
        assert one.count("prefix_queried_tokens") == 3 * 20
        assert one.count("prefix_found_tokens") == 8 + 8, "pages, also without a checkpoint"
        assert one.count("prefix_resumed_tokens") == 8, "of the third one"
    async with bench(one.store) as other:
        provenance = await other.answer(a_request(shared + prompt(9, 4), 3))
        assert provenance.fetched_tokens == 8, "junctions are published"
        assert other.count("prefix_found_tokens") == 0, "fetched pages were not in memory"
        assert other.count("prefix_resumed_tokens") == 8


@pytest.mark.parametrize(
    "layout",
    [
        fold_layout(4, hybrid=True),
        fold_layout(4, hybrid=False, window=7),
        fold_layout(4, hybrid=True, window=7),
        layout_of((LINEAR, Latent(width=2 * ATTENTION.head_dim)), 4, extent_bytes_min=256, granule_bytes=1),
    ],
    ids=["states", "windows", "states and windows", "states and latents"],
)
async def test_breakpoint_is_restorable_from_its_second_sight_on(layout: Layout) -> None:
    """The first prompt names where the others will leave it, between two page boundaries."""
    shared = prompt(10)

    async with bench(layout=layout) as one:
        for seed, reused in ((1, 0), (2, 8)):
            request = replace(a_request(shared + prompt(11, seed), 3), breakpoints=(2, 10, 21))
            assert (await one.answer(request)).reused_tokens == reused
    async with bench(one.store, layout=layout) as other:
        provenance = await other.answer(a_request(shared + prompt(9, 3), 3))
        assert provenance.fetched_tokens == 8, "breakpoints are published"


async def test_pages_that_are_here_are_not_attached_beyond_the_checkpoint_in_the_store() -> None:
    async with bench() as one:
        await one.answer(a_request(prompt(33)))  # checkpoints at 16 and 32
        await one.settle()
        async with bench(one.store) as other:
            await other.engine.produce(a_request(prompt(25)))  # and at 24, in the store alone
        provenance = await one.answer(a_request(prompt(30) + prompt(9, 1)))
        assert provenance == Provenance(reused_tokens=24, computed_tokens=15)


@pytest.mark.parametrize(
    ("kind", "index"), [(Kind.PAGE, 0), (Kind.PAGE, 2), (Kind.PAGE, 4), (Kind.CHECKPOINT, -1)]
)
async def test_damaged_object_is_found_and_computed_again(kind: Kind, index: int) -> None:
    # Checkpoints at 8, 12 and 20.
    store = await stored(a_store(), *(a_request(prompt(num_tokens)) for num_tokens in (9, 13, 21)))
    held = [key for key in store.objects if key.kind is kind]
    store.objects[held[index]][-1] ^= 1
    async with bench(store) as second:
        provenance = await second.answer(a_request(prompt(21)))
        assert second.engine.load().counters["store_gets_as_corrupt"] == 1
        assert provenance.computed_tokens > 1
        assert (await second.answer(a_request(prompt(21)))).reused_tokens == 20
    async with bench(store) as third:
        assert (await third.answer(a_request(prompt(21)))).fetched_tokens == 20, "it was stored again"


async def test_store_that_takes_nothing() -> None:
    async with bench(MemoryStore(0)) as one:
        produced = await one.engine.produce(a_request(prompt(21)))
        assert produced == Produced(depth=0, provenance=Provenance(computed_tokens=20))
        assert (await one.answer(a_request(prompt(21)))).reused_tokens == 20
        assert one.engine.load().counters["store_puts_as_full"] > 0


async def test_prompt_produced_twice_concurrently_is_computed_and_published_once() -> None:
    store = TimedStore(put_s=1.0)
    async with bench(store) as one:
        request = a_request(prompt(40))
        both = await asyncio.gather(*(one.engine.produce(request) for _ in range(3)))
        assert {produced.depth for produced in both} == {36}
        assert one.engine.load().counters["computed_tokens"] == 36
        assert sum(map(len, store.puts)) == 36 // 4 + 1, "its pages and its checkpoint"
        again = await one.engine.produce(request)
        assert again == Produced(depth=36, provenance=Provenance(reused_tokens=36))
        assert one.engine.load().counters["computed_tokens"] == 36


@pytest.mark.parametrize(("num_extents", "num_tokens"), [(7, 15), (8, 17)])
async def test_pages_in_every_extent_do_not_lock_out_a_request_that_is_fetched(
    num_extents: int, num_tokens: int
) -> None:
    """Its first seven pages, kept here in an extent each, leave none for a state. They are given up; or, with
    an eighth extent, it takes the place of their checkpoint."""
    layout = layout_of((LINEAR, ATTENTION), 2, extent_bytes_min=1, granule_bytes=1)
    request = a_request(prompt(num_tokens), 1)
    store = await stored(a_store(), request, layout=layout)
    tuning = Tuning(extents_min=num_extents)
    async with bench(store, layout=layout, num_extents=8, tuning=tuning) as one:
        scatter(one.ledger, page_keys(root_of(""), request.tokens, 2), path_pages=7)
        one.engine.resize(num_extents * layout.extent_bytes)
        assert one.ledger.usage().extents[STATES] == num_extents - 7
        (delta,) = await one.read(request)
        assert delta.provenance is not None
        assert delta.provenance.computed_tokens == 1


async def test_cached_pages_are_published_without_computing() -> None:
    async with bench() as one:
        await one.engine.produce(a_request(prompt(21)))
        await one.store.close()  # which forgets all
        produced = await one.engine.produce(a_request(prompt(21)))
        assert produced == Produced(depth=20, provenance=Provenance(reused_tokens=20))
        assert one.engine.load().counters["computed_tokens"] == 20


@pytest.mark.parametrize("gap_tokens_max", [0, 8, 15, 16])
async def test_longer_gap_than_allowed_is_not_computed(gap_tokens_max: int) -> None:
    async with bench() as one:
        request = a_request(prompt(19), gap_tokens_max=gap_tokens_max)
        if gap_tokens_max < 16:
            with pytest.raises(PagesMissing):
                await one.answer(request)
            assert one.ledger.num_leases == 0
            assert one.engine.num_requests == 0
            await one.engine.produce(request)
        await one.answer(request)


async def test_store_that_is_stuck_does_not_hold_all_memory() -> None:
    """Publishing is best effort: beyond some publications under way the next ones are left out."""
    store = TimedStore()
    store.opened.clear()
    async with bench(store) as one:
        for seed in range(PUBLICATIONS_MAX + 3):
            await one.answer(a_request(prompt(5, seed), 1))
        assert one.ledger.num_leases == PUBLICATIONS_MAX
        assert one.engine.load().counters["publications_skipped"] == 3
        store.opened.set()
        await one.settle()
        assert len(store.objects) == 2 * PUBLICATIONS_MAX


async def test_fetch_that_fails_lets_the_next_one_have_its_memory() -> None:
    """Otherwise it waits for its turn behind the one that waits for its memory."""
    store = await stored(TimedStore(get_s=1.0), a_request(prompt(29)))
    async with bench(store, num_extents=3) as second:
        fetching = asyncio.create_task(second.answer(a_request(prompt(29), 3)))
        await asyncio.sleep(0.5)
        waiting = asyncio.create_task(second.answer(a_request(prompt(29, 1), 3)))
        await asyncio.sleep(0.1)
        assert second.ledger.num_leases == 1
        store.objects.clear()  # what is being fetched is lost
        await asyncio.gather(fetching, waiting)
