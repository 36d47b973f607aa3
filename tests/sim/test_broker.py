"""Memory shared by the workers of two models in virtual time."""

import asyncio
from random import Random

import pytest

from tests.support.sim.fold import VOCABULARY, fold_layout
from tests.support.sim.loop import simulate
from tests.support.sim.traffic import ask
from tests.support.sim.world import World, WorldSettings
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.messages import Request

VIRTUAL_S_MAX = 36_000.0
LONGEST = 60
LOOK_S = 0.05


@pytest.mark.parametrize("seed", range(6))
def test_two_models_share_the_memory_of_a_device(seed: int) -> None:
    """A hybrid and an attention model, with different pages and extents, alternate with the same prompts.

    The memory goes to the busy one, every answer is exact, and together they never map more than the device
    has. They share the store, but no objects in it.
    """
    rng = Random(seed)
    layouts = (
        fold_layout(rng.choice([2, 4]), hybrid=True, extent_bytes_min=1024),
        fold_layout(rng.choice([1, 16]), hybrid=False, extent_bytes_min=256),
    )
    share = max(extents_for(layout, LONGEST) * layout.extent_bytes for layout in layouts) * rng.choice([2, 4])
    lost = rng.choice([0, 0.3])

    async def main() -> None:
        store = MemoryStore(1 << 20)
        settings = [_settings(layout, share, lost) for layout in layouts]
        first = World(rng, settings[0], lambda: store, layouts[0], "one")
        second = World(rng, settings[1], lambda: store, layouts[1], "two", broker=first)
        try:
            async with asyncio.timeout(VIRTUAL_S_MAX):
                for busy, other in ((first, second), (second, first), (first, second)):
                    await _load_one_model(busy, other, 2 * share)
            for world in (first, second):
                assert [row.info.name for row in world.router.status().workers] == list(world.workers)
        finally:
            await second.stop()
            await first.stop()
        for worker in (*first.incarnations, *second.incarnations):
            assert worker.ledger.num_leases == 0
            worker.ledger.check()

    simulate(seed, main())


def _settings(layout: Layout, share_bytes: int, lost: float) -> WorldSettings:
    return WorldSettings(
        num_extents=share_bytes // layout.extent_bytes,
        extents_min=extents_for(layout, LONGEST),
        extents_max=2 * share_bytes // layout.extent_bytes,
        step_s_max=0.02,
        mixed=1,
        broker=True,
        lost=lost,
    )


async def _load_one_model(busy: World, other: World, total_bytes: int) -> None:
    """Load one model with more than fits, until it has most of the memory, and the other one a little."""
    running = {asyncio.create_task(_check_answer(busy, f"r{index}")) for index in range(80)}
    running.add(asyncio.create_task(_check_answer(other, "r")))
    had_most = False
    while running:
        budgets = [next(iter(world.workers.values())).engine.load().budget_bytes for world in (busy, other)]
        assert sum(budgets) <= total_bytes
        had_most |= budgets[0] > total_bytes * 0.6
        done, running = await asyncio.wait(running, timeout=LOOK_S)
        for task in done:
            task.result()
    assert had_most


async def _check_answer(world: World, name: str) -> None:
    """Check an answer; a name has the same prompt with every model."""
    rng = Random(name)
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, LONGEST - 20)))
    await ask(world, Request(request_id=name, tokens=tokens, max_new_tokens=rng.randrange(1, 20)), 1000)
