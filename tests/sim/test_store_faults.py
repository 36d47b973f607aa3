"""Whole clusters over a Mooncake store with all failures observed so far: streams stay exact.

`SIM_SEED=17 SIM_RUNS=1 pytest tests/sim` replays one seed, `SIM_RUNS=10000` is a soak.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from tests.support.sim.fake_mooncake import FakeMooncake
from tests.support.sim.fold import VOCABULARY, fold_layout
from tests.support.sim.loop import simulate
from tests.support.sim.storms import Storm
from tests.support.sim.traffic import ask, converse
from tests.support.sim.world import World, WorldSettings
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.page_store import Put
from tidemill.kvstore.stores.remote_store import RemoteStore
from tidemill.workers.engine.memory_plan import capacity_tokens, extents_for
from tidemill.workers.messages import Request

FIRST = int(os.environ.get("SIM_SEED", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("SIM_RUNS", "30")))
VIRTUAL_S_MAX = 36_000.0
TIMEOUT_S = 0.25
LONGEST = 60
LATEST_S = 120.0
"""The time by which all abandoned transfers have ended."""


WINDOWS = (0, 0, 1, 3, 8, 17)


@pytest.mark.parametrize("seed", SEEDS)
def test_cluster_streams_are_exact_over_a_failing_store(seed: int) -> None:
    rng = Random(seed)
    simulate(seed, _run(rng))


async def _run(rng: Random) -> None:
    page_tokens, kind = rng.choice([2, 4, 16]), rng.random()
    layout = fold_layout(
        page_tokens,
        hybrid=kind < 0.8,
        window=WINDOWS[int(kind * 100) % len(WINDOWS)],
        extent_bytes_min=rng.choice([1, 256, 1024]),
    )
    settings = _draw_settings(rng, layout)
    cluster = FakeMooncake(
        rng,
        capacity_bytes=rng.choice([1 << 20, 3000]),
        lease_s=rng.choice([5.0, 5.0, 0.05]),
        bytes_per_s=rng.choice([1e9, 1e9, 1e9, 1e4, 500.0]),
        ghosts=rng.choice([0, 0.02]),
        full=rng.choice([0, 0.03]),
        damage=rng.choice([0, 0.1]),
        stalls=rng.choice([0, 0.2]),
        late_writes=rng.random() < 0.5,
    )
    stores = Stores(cluster)
    world = World(rng, settings, stores.open, layout)
    storm = asyncio.create_task(Storm(rng, cluster, pause_s_max=rng.choice([1.0, 20.0])).run())
    longest = min(100, capacity_tokens(layout, settings.extents_min))
    shared = [rng.randrange(settings.vocabulary) for _ in range(rng.randrange(longest // 2))]
    try:
        async with asyncio.timeout(VIRTUAL_S_MAX), asyncio.TaskGroup() as group:
            clients = [group.create_task(converse(world, rng, index, shared, longest)) for index in range(6)]
        assert world.kills or all(client.result() for client in clients), "a store prevents no answer"
    finally:
        storm.cancel()
        await asyncio.wait({storm})
        await world.stop()
        await asyncio.sleep(LATEST_S)
        await stores.close()
    assert storm.cancelled()
    for worker in world.incarnations:
        assert worker.ledger.num_leases == 0, "a lease outlived its request and its transfers"
        worker.ledger.check()


class Stores:
    """A client, a store and a circuit breaker for each incarnation of a worker."""

    def __init__(self, cluster: FakeMooncake) -> None:
        self.cluster = cluster
        self.guards: list[GuardedStore] = []

    def open(self) -> GuardedStore:
        store = RemoteStore(self.cluster.client(), lease_s=self.cluster.lease_s)
        self.guards.append(GuardedStore(store, TIMEOUT_S))
        return self.guards[-1]

    async def close(self) -> None:
        for guard in self.guards:
            await guard.close()


def _draw_settings(rng: Random, layout: Layout) -> WorldSettings:
    mixed = rng.choice([0, 0, 1, 2])
    extents_min = extents_for(layout, rng.choice([40, 100]))
    return WorldSettings(
        crash=rng.choice([0, 0.01, 0.03]),
        delay_s_max=0.001,
        step_s_max=rng.choice([0.001, 0.05]),
        restart_s=2.0,
        num_extents=extents_min * rng.choice([1, 2, 6]),
        extents_min=extents_min,
        extents_max=extents_min * 6,
        resize_s=0,
        strategy=rng.choice(["none", "double", "lazy"]),
        checkpoint_interval=rng.choice([1, 2]),
        checkpoints_per_path=rng.choice([2, 16]),
        policy="value",
        prefill=0 if mixed else rng.choice([1, 2]),
        decode=0 if mixed else rng.choice([1, 2]),
        mixed=mixed,
    )


@dataclass(frozen=True)
class Outage:
    """A fault of the store, during which the breaker of a worker opens at most `trips_max` times."""

    begin: Callable[[FakeMooncake], None]
    end: Callable[[FakeMooncake], None]
    trips_max: int


def _freeze_owners(cluster: FakeMooncake) -> None:
    for owner in cluster.running_owners:
        cluster.freeze_owner(owner)


def _thaw_owners(cluster: FakeMooncake) -> None:
    for owner in cluster.frozen_owners:
        cluster.thaw_owner(owner)


def _kill_owner(cluster: FakeMooncake) -> None:
    cluster.kill_owner(cluster.running_owners[0])


OUTAGES = {
    "master dead": Outage(FakeMooncake.kill_master, FakeMooncake.start_master, 1),
    "master frozen": Outage(FakeMooncake.freeze_master, FakeMooncake.thaw_master, 1),
    "owners frozen": Outage(_freeze_owners, _thaw_owners, 2),
    # the other owner answers the probes, and puts fail again, ever less often, until the master forgets it
    "owner dead": Outage(_kill_owner, _thaw_owners, 8),
}


def _fault_free(layout: Layout, *, mixed: bool) -> WorldSettings:
    """Return settings where steps and messages take no time, so that requests wait only for the store."""
    extents = 40 * extents_for(layout, LONGEST)
    return WorldSettings(
        crash=0,
        delay_s_max=0,
        step_s_max=0,
        restart_s=1.0,
        num_extents=extents,
        extents_min=extents,
        extents_max=extents,
        resize_s=0,
        strategy="lazy",
        checkpoint_interval=1,
        checkpoints_per_path=4,
        policy="lru",
        prefill=0 if mixed else 1,
        decode=0 if mixed else 1,
        mixed=int(mixed),
    )


@pytest.mark.parametrize("name", OUTAGES)
@pytest.mark.parametrize("mixed", [True, False])
def test_requests_wait_for_a_failed_store_once_per_breaker_trip(name: str, *, mixed: bool) -> None:
    rng = Random(0)
    layout = fold_layout(4, hybrid=True)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(30)) for _ in range(40)]

    async def main() -> None:
        stores = Stores(FakeMooncake(rng))
        world = World(rng, _fault_free(layout, mixed=mixed), stores.open, layout)
        try:
            await _check_outage(world, stores, prompts, OUTAGES[name])
        finally:
            await world.stop()
            await stores.close()

    simulate(0, main())


async def _check_outage(world: World, stores: Stores, prompts: list[tuple[int, ...]], outage: Outage) -> None:
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
    guards = stores.guards[len(world.workers) :]
    outage.begin(stores.cluster)
    waits_s: list[float] = []
    for prompt in before:
        waits_s.append(await took_s(prompt))
        await asyncio.sleep(0.2)
    trips = [guard.stats().trips for guard in guards]
    assert max(trips) <= outage.trips_max
    assert max(waits_s) < TIMEOUT_S + 0.05
    assert sum(wait_s > 0.1 for wait_s in waits_s) <= sum(trips)
    outage.end(stores.cluster)
    await asyncio.sleep(60)
    assert not any(guard.stats().is_down for guard in guards)
    stored = sum(guard.stats().put[Put.STORED] for guard in guards)
    assert await took_s(after) < 0.05
    await asyncio.sleep(1)  # it is published after its answer
    assert sum(guard.stats().put[Put.STORED] for guard in guards) > stored, "the store is used again"
