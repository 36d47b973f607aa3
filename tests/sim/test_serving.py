"""Whole clusters with crashes, little memory, and a faulty store, also with outages.

Each run is a function of its seed. `SIM_SEED=17 SIM_RUNS=1 pytest tests/sim` replays one, `SIM_RUNS=10000` is
a soak.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random

import pytest

from tests.support.sim.faulty_store import FaultyStore
from tests.support.sim.fold import VOCABULARY, fold_layout
from tests.support.sim.loop import simulate
from tests.support.sim.traffic import ask, converse
from tests.support.sim.world import DEADLY, POISON, World, WorldSettings
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.workers.engine.memory_plan import capacity_tokens, extents_for
from tidemill.workers.messages import Poisonous, Request, RequestError, Unserved
from tidemill.workers.scheduling.admission import PREEMPTIONS_MAX

FIRST = int(os.environ.get("SIM_SEED", "0"))
RUNS = int(os.environ.get("SIM_RUNS", "0"))
VIRTUAL_S_MAX = 36_000.0
WINDOWS = (0, 0, 1, 3, 8, 17)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + (RUNS or 100)))
def test_cluster_streams_are_exact_or_unserved(seed: int) -> None:
    rng = Random(seed)
    layout = _draw_layout(rng)
    settings = _draw_settings(rng, layout)
    poisoned = rng.random() < 0.1
    store = _draw_store(rng)

    async def main() -> None:
        world = World(rng, settings, lambda: store, layout)
        longest, shared = _prompts(world, rng)
        async with _serving(world, latest_s=10.0) as clients:
            for index in range(8):
                clients.create_task(converse(world, rng, index, shared, longest))
            if poisoned:
                clients.create_task(_poison(world, rng, shared))
            if rng.random() < 0.2:
                clients.create_task(_deadly(world, rng, shared))
        if not (settings.resize_s or settings.broker or settings.breaks or poisoned):
            assert all(worker.engine.preemptions_max <= PREEMPTIONS_MAX for worker in world.incarnations)

    simulate(seed, main())


@pytest.mark.parametrize("seed", range(FIRST, FIRST + (RUNS or 30)))
def test_cluster_streams_are_exact_over_a_store_with_outages(seed: int) -> None:
    rng = Random(seed)
    layout = _draw_layout(rng)
    settings = replace(_draw_settings(rng, layout), fault_s=0.0, breaks=0.0)
    store = _draw_store(rng)
    guards: list[GuardedStore] = []

    def open_store() -> GuardedStore:
        guards.append(GuardedStore(store))
        return guards[-1]

    async def main() -> None:
        world = World(rng, settings, open_store, layout)
        longest, shared = _prompts(world, rng)
        outages = asyncio.create_task(_outages(rng, store, pause_s_max=rng.choice([1.0, 20.0])))
        async with _serving(world, latest_s=120.0) as clients:
            served = [clients.create_task(converse(world, rng, index, shared, longest)) for index in range(6)]
        assert outages.cancel()
        await asyncio.wait({outages})
        for guard in guards:
            await guard.close()
        assert world.kills or all(client.result() for client in served), "a store prevents no answer"

    simulate(seed, main())


async def _outages(rng: Random, store: FaultyStore, pause_s_max: float) -> None:
    """Let the store fail immediately, late or hang, and sometimes lose all, until it is cancelled."""
    while True:
        await asyncio.sleep(rng.random() * pause_s_max)
        store.fail(rng.choice([0.0, 4.3, 30.0]))
        try:
            await asyncio.sleep(rng.choice([0.1, 3.0, 40.0]) * rng.random())
        finally:
            store.recover()
        if rng.random() < 0.2:
            for key in list(store.objects):
                store.forget(key)


@asynccontextmanager
async def _serving(world: World, latest_s: float) -> AsyncGenerator[asyncio.TaskGroup]:
    """Await all clients. Check that every lease ends within `latest_s`, as abandoned fetches do."""
    try:
        async with asyncio.timeout(VIRTUAL_S_MAX), asyncio.TaskGroup() as clients:
            yield clients
    finally:
        await world.stop()
        await asyncio.sleep(latest_s)
    for worker in world.incarnations:
        assert worker.ledger.num_leases == 0, "a lease outlived its request"
        worker.ledger.check()


def _draw_layout(rng: Random) -> Layout:
    kind = rng.random()
    return fold_layout(
        rng.choice([1, 2, 4, 16]),
        hybrid=kind < 0.8,
        window=WINDOWS[int(kind * 100) % len(WINDOWS)],
        extent_bytes_min=rng.choice([1, 256, 1024]),
        checkpoint_dtype="bfloat16" if kind < 0.4 else None,
        page_slices=1 + int(kind * 1000) % 2,
    )


def _draw_store(rng: Random) -> FaultyStore:
    return FaultyStore(
        rng,
        drop=rng.choice([0, 0.05]),
        evict=rng.choice([0, 0.02]),
        corrupt=rng.choice([0, 0.02]),
        refuse=rng.choice([0, 0.05, 1.0]),
        delay_s_max=rng.choice([0.001, 0.2]),
    )


def _prompts(world: World, rng: Random) -> tuple[int, list[int]]:
    """Return the length of the longest prompt, and the tokens with which all begin."""
    longest = min(100, capacity_tokens(world.layout, world.settings.extents_min))
    return longest, [rng.randrange(world.settings.vocabulary) for _ in range(rng.randrange(longest // 2))]


def _draw_settings(rng: Random, layout: Layout) -> WorldSettings:
    mixed = rng.choice([0, 0, 1, 2])
    longest = rng.choice([3 * layout.page_tokens, 40, 100])
    extents_min = extents_for(layout, longest)
    num_extents = extents_min * rng.choice([1, 2, 6])
    broker = rng.random() < 0.2
    return WorldSettings(
        crash=rng.choice([0, 0, 0.003, 0.02]),
        delay_s_max=rng.choice([0.001, 0.1]),
        step_s_max=0.05,
        restart_s=2.0,
        num_extents=num_extents,
        extents_min=extents_min,
        extents_max=num_extents + rng.choice([num_extents] if broker else [0, 0, num_extents]),
        resize_s=0.0 if broker else rng.choice([0, 0.2, 5.0]),
        strategy=rng.choice(["none", "double", "lazy", "lazy"]),
        checkpoint_interval=rng.choice([1, 1, 2, 3]),
        checkpoints_per_path=rng.choice([2, 4, 16]),
        policy=rng.choice(["lru", "value"]),
        prefill=0 if mixed else rng.choice([1, 2]),
        decode=0 if mixed else rng.choice([1, 2]),
        mixed=mixed,
        broker=broker,
        overlap=rng.random() < 0.75,
        drafts_max=(drafts_max := rng.choice([0, 0, 1, 2, 4])),
        mtp=drafts_max == 2,
        vocabulary=rng.choice([VOCABULARY, 3]),
        breaks=rng.choice([0, 0, 0.01, 0.1]),
        fault_s=rng.choice([0, 0, 2.0, 8.0]),
    )


async def _poison(world: World, rng: Random, shared: list[int]) -> None:
    """Check that a poison request alone is refused, if it is served at all."""
    await asyncio.sleep(rng.random() * 5)
    request = Request(request_id=POISON, tokens=(*shared, 1), max_new_tokens=1)
    with suppress(Unserved, Poisonous), pytest.raises(RequestError, match="on no other"):
        await ask(world, request, patience=1000)


async def _deadly(world: World, rng: Random, shared: list[int]) -> None:
    """Check that a deadly request crashes at most two workers, unless there are other faults."""
    await asyncio.sleep(rng.random() * 5)
    calm = not world.settings.crash and not world.settings.fault_s
    for index in range(2):
        router = world.router
        request = Request(request_id=f"{DEADLY}-{index}", tokens=(*shared, 2), max_new_tokens=1)
        with pytest.raises((Unserved, Poisonous)) as refused:
            await ask(world, request, patience=1000)
        if calm:
            assert refused.type is Poisonous
            assert world.deadly_kills == 2
        elif refused.type is Poisonous and world.router is router:
            kills = world.deadly_kills
            with pytest.raises((Unserved, Poisonous)):
                await ask(world, request, patience=1000)
            assert world.deadly_kills == kills or world.router is not router
