"""The steps and checkpoints of prompts.

The budget of a step alone cuts a prompt: its checkpoints are written inside its rows. Spare ones, one for
every four pages, help the second prompt of a family and push out no others.
"""

import asyncio

import pytest

from tests.support.sim.fold import ATTENTION, fold_layout
from tests.support.workers.bench import (
    HYBRID,
    IN_VIRTUAL_TIME,
    TIGHT,
    Bench,
    Tuning,
    a_request,
    a_store,
    bench,
    prompt,
    root_of,
)
from tidemill.kvstore.keys import Kind, page_keys
from tidemill.kvstore.layout import STATES, Layout, Linear, layout_of
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.messages import Request

pytestmark = IN_VIRTUAL_TIME

P = 4
LINEAR = Linear(key_heads=1, value_heads=1, key_dim=8, value_dim=16, conv_width=2)
LARGE = layout_of((LINEAR, ATTENTION), P, extent_bytes_min=256, granule_bytes=1)
"""One state, or ten pages, in an extent."""
WINDOWS = fold_layout(P, hybrid=False, window=30)
BOTH = fold_layout(P, hybrid=True, window=30)
LONG = prompt(1024, 99)
WIDE = 16
BUDGET = 512
KINDS = {
    "attention": fold_layout(WIDE, hybrid=False),
    "states": fold_layout(WIDE, hybrid=True),
    "windows": fold_layout(WIDE, hybrid=False, window=100),
    "states and windows": fold_layout(WIDE, hybrid=True, window=100),
}

kinds = pytest.mark.parametrize("layout", KINDS.values(), ids=KINDS)


def depths(one: Bench, tokens: tuple[int, ...]) -> list[int]:
    """Return the depths of the checkpoints of a prompt, in steps of the grid."""
    path = one.ledger.index.match(page_keys(root_of(""), tokens, P)).path
    return [entry.depth_pages // 4 for entry in path if entry.checkpoint and not entry.depth_pages % 4]


def free_extents(one: Bench) -> int:
    usage = one.ledger.usage()
    return usage.empty_extents + usage.unmapped_extents


@pytest.mark.parametrize(
    ("layout", "num_tokens", "num_extents"),
    [
        *[(HYBRID, 90, 33), (HYBRID, 250, 84), (TIGHT, 90, 124), (TIGHT, 250, 324)],
        *[(LARGE, 90, 19), (LARGE, 250, 39), (WINDOWS, 90, 43), (WINDOWS, 250, 92)],
    ],
)
async def test_prompts_that_do_not_come_again_push_out_nothing(
    layout: Layout, num_tokens: int, num_extents: int
) -> None:
    """Five prompts and their ends fit the memory; with their spare checkpoints they do not."""
    requests = [a_request(prompt(num_tokens, seed), 3) for seed in range(5)]

    async with bench(layout=layout, num_extents=num_extents) as one:
        await one.answer(requests[0])
        usage = one.ledger.usage()
        assert max(usage.cached[STATES], usage.cached["windows"]) > 5, "while memory is free"
        for request in requests[1:]:
            await one.answer(request)
        for request in requests:
            assert (await one.answer(request)).reused_tokens == (num_tokens - 1) // P * P


@pytest.mark.parametrize(("layout", "num_extents"), [(HYBRID, 82), (TIGHT, 320), (LARGE, 90)])
@pytest.mark.parametrize("num_shared", [22, 70, 163, 202])
async def test_second_prompt_computes_at_most_four_pages_of_a_shared_part(
    layout: Layout, num_extents: int, num_shared: int
) -> None:
    """A long prompt has passed, and its spare checkpoints have taken all memory."""
    shared = prompt(num_shared)

    async with bench(layout=layout, num_extents=num_extents, tokens_max=64) as one:
        await one.answer(a_request(LONG, 3))
        assert free_extents(one) <= 2
        await one.answer(a_request(shared + prompt(9, 1), 3))
        second = await one.answer(a_request(shared + prompt(9, 2), 3))
        assert second.reused_tokens == num_shared // 16 * 16


@pytest.mark.parametrize(("layout", "num_extents"), [(HYBRID, 60), (TIGHT, 200), (LARGE, 30), (BOTH, 160)])
async def test_second_prompt_finds_the_shared_part_in_full_memory(layout: Layout, num_extents: int) -> None:
    """Once families have come: their junctions give spare checkpoints a credit, so that they evict others."""
    async with bench(layout=layout, num_extents=num_extents, tokens_max=64) as one:
        for seed in range(200, 230):
            await one.answer(a_request(prompt(90, seed), 3))
        assert free_extents(one) <= 2
        for family in range(300, 330):
            shared = prompt(70, family)
            found = [await one.answer(a_request(shared + prompt(9, seed), 3)) for seed in range(3)]
            assert found[2].reused_tokens == 68, "where the second one left the first"
            if family > 325:
                assert found[1].reused_tokens == 64
        assert one.ledger.spares.junctions_per_page > 0


@pytest.mark.parametrize("budget", [16, 64, 2000])
@pytest.mark.parametrize(("num_extents", "num_kept"), [(125, 63), (70, 42), (60, 32)])
async def test_shallow_ones_are_farther_apart_when_memory_is_short(
    budget: int, num_extents: int, num_kept: int
) -> None:
    async with bench(layout=LARGE, num_extents=num_extents, tokens_max=budget, tuning=Tuning()) as one:
        await one.answer(a_request(LONG, 3))
        found = depths(one, LONG)
        gaps = [end - start for start, end in zip([0, *found], found, strict=False)]
        assert len(found) == num_kept
        assert gaps == sorted(gaps, reverse=True)
        assert max(gaps) <= 4


@kinds
@pytest.mark.parametrize("num_tokens", [128, 2048, 8192])
@pytest.mark.parametrize("produces", [False, True])
async def test_steps_of_a_prompt(layout: Layout, num_tokens: int, *, produces: bool) -> None:
    tokens = prompt(num_tokens)
    boundary = (num_tokens - 1) // WIDE * WIDE

    async with bench(layout=layout, num_extents=4000, tokens_max=BUDGET, tuning=Tuning()) as one:
        request = Request(request_id="one", tokens=tokens, max_new_tokens=1)
        await (one.engine.produce(request) if produces else one.answer(a_request(tokens, 1)))
        end = boundary if produces else num_tokens
        assert [sum(len(row.tokens) for row in step) for step in one.runner.steps] == [
            min(BUDGET, end - start) for start in range(0, end, BUDGET)
        ]
        if layout.hybrid:
            keys = page_keys(root_of(""), tokens, WIDE)[: boundary // WIDE]
            path = one.ledger.index.match(keys).path
            found = {entry.depth_pages * WIDE for entry in path if entry.checkpoint is not None}
            assert found == {*range(4 * WIDE, boundary, 4 * WIDE), boundary}


def grid_in(store: MemoryStore, tokens: tuple[int, ...]) -> list[int]:
    """Return the depths of the grid of a prompt that the store has, in steps of the grid."""
    grid = page_keys(root_of(""), tokens, P)[3 : (len(tokens) - 1) // P - 1 : 4]
    states = {key.key for key in store.objects if key.kind is Kind.CHECKPOINT}
    return [step for step, key in enumerate(grid, 1) if key in states]


@pytest.mark.parametrize("layout", [HYBRID, TIGHT, LARGE, BOTH])
async def test_grid_is_found_on_another_worker_once_the_first_was_idle(layout: Layout) -> None:
    shared, store = prompt(70), a_store()
    first, second = (shared + prompt(9, seed) for seed in (1, 2))

    async with bench(store, layout=layout, num_extents=320) as one:
        await one.answer(a_request(first, 3))
        await one.engine.drain_publications()
        assert not grid_in(store, first), "before what others look for"
        await one.until(lambda: grid_in(store, first) == [1, 2, 3, 4])
    async with bench(store, layout=layout, num_extents=320) as other:
        assert (await other.answer(a_request(second, 3))).fetched_tokens == 64


async def test_grid_waits_until_no_request_is_left() -> None:
    store = a_store()

    async with bench(store, num_extents=320) as one:
        await one.answer(a_request(prompt(79), 3))
        one.runner.gate.clear()
        running = asyncio.create_task(one.answer(a_request(prompt(79, 1), 3)))
        await asyncio.sleep(100.0)
        assert not grid_in(store, prompt(79))
        one.runner.gate.set()
        await running
        await one.until(lambda: all(len(grid_in(store, prompt(79, seed))) == 4 for seed in (0, 1)))


async def test_grid_takes_what_the_store_has_free_and_goes_first() -> None:
    """Three prompts and their ends just fit the store: all of them stay there, and no part of a grid."""
    sizing = MemoryStore(1 << 30)

    async with bench(sizing, num_extents=320) as one:
        await one.answer(a_request(prompt(79), 1))
        await one.engine.drain_publications()
        capacity_bytes = 3 * sizing.stats().bytes
    store = MemoryStore(capacity_bytes)
    async with bench(store, num_extents=320) as one:
        await one.answer(a_request(prompt(79), 1))
        await one.until(lambda: len(grid_in(store, prompt(79))) == 4)
        for seed in (1, 2):
            await one.answer(a_request(prompt(79, seed), 1))
            await one.engine.drain_publications()
        await asyncio.sleep(100.0)
        assert store.stats().evicted == 4
        assert [grid_in(store, prompt(79, seed)) for seed in range(3)] == [[], [], []]
        assert store.stats().bytes == capacity_bytes
