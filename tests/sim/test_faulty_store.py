"""The faulty store of the simulator does all that the contract allows, and nothing else."""

import asyncio
from random import Random

import pytest

from tests.support.sim.faulty_store import FaultyStore
from tests.support.sim.loop import simulate
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.page_store import Got, Put

KEYS = [ObjectKey(Kind.PAGE, PageKey(bytes([number] * 16))) for number in range(20)]
BODIES = [Random(number).randbytes(100) for number in range(20)]


async def fetch(store: FaultyStore) -> list[tuple[Got, bytes]]:
    views = [bytearray(100) for _ in KEYS]
    outcomes = await store.get([(key, memoryview(view)) for key, view in zip(KEYS, views, strict=True)])
    return [(outcome, bytes(view)) for outcome, view in zip(outcomes, views, strict=True)]


async def put(store: FaultyStore, numbers: list[int]) -> list[Put]:
    return await store.put([(KEYS[number], memoryview(BODIES[number])) for number in numbers])


@pytest.mark.parametrize("seed", range(5))
def test_faulty_store_loses_objects_and_never_changes_them(seed: int) -> None:
    rng = Random(seed)
    store = FaultyStore(rng, drop=0.2, evict=0.1, corrupt=0.3, refuse=0.1, delay_s_max=1.0)
    got: set[Got] = set()
    refused = lost = 0

    async def user() -> None:
        nonlocal refused, lost
        for _ in range(20):
            outcomes = await put(store, rng.sample(range(20), 5))
            there = [outcome.is_there for outcome in outcomes]
            assert there == sorted(there, reverse=True)
            assert outcomes[sum(there) :] in ([], [Put.FULL, *[Put.SKIPPED] * (4 - sum(there))])
            refused += there.count(False)
            for (outcome, found), body in zip(await fetch(store), BODIES, strict=True):
                assert outcome is not Got.HIT or found == body
                got.add(outcome)
                lost += outcome is Got.MISS

    async def users() -> None:
        await asyncio.gather(*(user() for _ in range(3)))

    simulate(seed, users())
    assert got - {Got.OTHER_VERSION} == {Got.HIT, Got.MISS, Got.CORRUPT}
    assert refused
    assert lost
    assert store.stats().refused == refused


def test_faulty_store_has_its_objects_back_after_an_outage() -> None:
    store = FaultyStore(Random(0))

    async def scenario() -> None:
        assert await put(store, [1, 2]) == [Put.STORED] * 2
        store.is_down = True
        assert await put(store, [3, 4]) == [Put.UNREACHABLE, Put.SKIPPED]
        assert await put(store, []) == []
        assert [outcome for outcome, _ in await fetch(store)] == [Got.UNREACHABLE] * 20
        assert await store.contains(KEYS) == [False] * 20
        store.is_down = False
        assert sum(await store.contains(KEYS)) == 2

    simulate(0, scenario())


def test_faulty_store_ends_a_cancelled_call_before_its_memory_is_free() -> None:
    store = FaultyStore(Random(0), delay_s_max=1.0)
    memory = bytearray(100)

    async def scenario() -> None:
        await put(store, [1])
        task = asyncio.ensure_future(store.get([(KEYS[1], memoryview(memory))]))
        await asyncio.sleep(1e-9)  # virtual: until everything ready has run
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert memory == BODIES[1], "the transfer ran to its end before the caller returned"

    simulate(0, scenario())
