"""Requests wait for a failed store once for each time that the circuit breaker of their worker opens."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest

from tests.support.sim.fake_master import EXPIRED, MASTER_FAILED, MISSING, NO_SPACE, OK, OWNER_FAILED
from tests.support.sim.fake_mooncake import FakeMooncake
from tests.support.sim.fold import VOCABULARY, fold_layout
from tests.support.sim.loop import simulate
from tests.support.sim.storms import TIMEOUT_S, Stores, Storm
from tests.support.sim.traffic import ask
from tests.support.sim.world import World, WorldSettings
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.stores.page_store import Put
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.messages import Request

LONGEST = 60


def test_storm_shows_each_failure_of_a_mooncake() -> None:
    """Otherwise the clusters that serve in a storm would prove nothing."""
    codes, lies = set[int](), set[str]()
    body = bytes(range(100))

    async def main() -> None:
        rng = Random(1)
        cluster = FakeMooncake(
            rng, capacity_bytes=3000, lease_s=0.05, bytes_per_s=1e4, ghosts=0.02, damage=0.1, stalls=0.2
        )
        storm = asyncio.create_task(Storm(rng, cluster, pause_s_max=1.0).run())
        client = cluster.client()
        for number in range(1000):
            name, view = str(number % 40), bytearray(100)
            [stored] = await client.put([name], [(memoryview(body),)])
            [found] = await client.get([name], [(memoryview(view),)])
            codes.update((stored, min(found, OK)))
            if stored == OK and found == MISSING:
                lies.add("a name is blocked, or its object evicted")
            if found > OK and bytes(view) != body:
                lies.add("damaged")
        storm.cancel()
        await client.close()

    simulate(1, main())
    assert codes == {OK, NO_SPACE, MISSING, EXPIRED, OWNER_FAILED, MASTER_FAILED}
    assert len(lies) == 2


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
        num_extents=extents,
        extents_min=extents,
        extents_max=extents,
        checkpoints_per_path=4,
        policy="lru",
        prefill=not mixed,
        decode=not mixed,
        mixed=mixed,
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
