"""Requests wait for a failed store once for each time that the circuit breaker of their worker opens."""

import asyncio
from random import Random

import pytest

from tests.support.sim.faulty_store import FaultyStore
from tests.support.sim.fold import VOCABULARY, fold_layout
from tests.support.sim.loop import simulate
from tests.support.sim.traffic import ask
from tests.support.sim.world import World, WorldSettings
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.page_store import Put
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.messages import Request

LONGEST = 60
TIMEOUT_S = 0.25


def _fault_free(layout: Layout, *, mixed: bool) -> WorldSettings:
    """Return settings where steps and messages take no time, so that requests wait only for the store."""
    extents = 40 * extents_for(layout, LONGEST)
    return WorldSettings(
        num_extents=extents,
        extents_min=extents,
        extents_max=extents,
        checkpoints_per_path=4,
        policy="lru",
        prefill=not mixed,
        decode=not mixed,
        mixed=mixed,
    )


@pytest.mark.parametrize("blocks_s", [0.0, 4.3, 30.0])
@pytest.mark.parametrize("mixed", [True, False])
def test_requests_wait_for_a_failed_store_once_per_breaker_trip(blocks_s: float, *, mixed: bool) -> None:
    rng = Random(0)
    layout = fold_layout(4, hybrid=True)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(30)) for _ in range(40)]

    async def main() -> None:
        store, guards = FaultyStore(rng), list[GuardedStore]()

        def open_store() -> GuardedStore:
            guards.append(GuardedStore(store, TIMEOUT_S))
            return guards[-1]

        world = World(rng, _fault_free(layout, mixed=mixed), open_store, layout)
        try:
            await _check_outage(world, store, guards, prompts, blocks_s)
        finally:
            await world.stop()
            for guard in guards:
                await guard.close()

    simulate(0, main())


async def _check_outage(
    world: World,
    store: FaultyStore,
    opened: list[GuardedStore],
    prompts: list[tuple[int, ...]],
    blocks_s: float,
) -> None:
    """Send all prompts but one before the outage, and again during it to workers that have lost their memory.

    The last prompt is sent after the outage.
    """
    *before, after = prompts

    async def took_s(prompt: tuple[int, ...]) -> float:
        started = asyncio.get_running_loop().time()
        await ask(world, Request(request_id=f"{prompt}", tokens=prompt, max_new_tokens=5), 1000)
        return asyncio.get_running_loop().time() - started

    for prompt in before:
        assert await took_s(prompt) < 0.05, "no request waits for a healthy store"
    for worker in list(world.workers.values()):
        world.kill(worker)
    await asyncio.sleep(10)
    guards = opened[len(world.workers) :]
    store.fail(blocks_s)
    waits_s: list[float] = []
    for prompt in before:
        waits_s.append(await took_s(prompt))
        await asyncio.sleep(0.2)
    trips = [guard.stats().trips for guard in guards]
    assert max(trips) == 1
    assert max(waits_s) < TIMEOUT_S + 0.05
    assert sum(wait_s > 0.1 for wait_s in waits_s) <= sum(trips)
    store.recover()
    await asyncio.sleep(60)
    assert not any(guard.stats().is_down for guard in guards)
    stored = sum(guard.stats().put[Put.STORED] for guard in guards)
    assert await took_s(after) < 0.05
    await asyncio.sleep(1)  # it is published after its answer
    assert sum(guard.stats().put[Put.STORED] for guard in guards) > stored, "the store is used again"
