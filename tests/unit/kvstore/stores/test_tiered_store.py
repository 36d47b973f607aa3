"""Chains of stores: the tiers of each read and write, and the cost of slow tiers."""

import asyncio
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kvstore.objects import page, random_body
from tests.support.kvstore.scripted_store import Fault, Scripted, now
from tests.support.loops import IN_REAL_TIME, IN_VIRTUAL_TIME, run_by
from tests.support.sim.faulty_store import FaultyStore
from tests.support.sim.loop import simulate
from tidemill.kvstore.keys import Kind, ObjectKey
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, PageStore, Put, StoreStats
from tidemill.kvstore.stores.seal import SEAL_BYTES
from tidemill.kvstore.stores.tiered_store import SEEN_S, Tier, TieredStore, Write

pytestmark = IN_VIRTUAL_TIME

BODY_BYTES = 1000
OBJECT_BYTES = BODY_BYTES + SEAL_BYTES
AMPLE_BYTES = 1 << 30


def key(number: int) -> ObjectKey:
    """Return a key; every fifth one is of a checkpoint."""
    return page(number, Kind.PAGE if number % 5 else Kind.CHECKPOINT)


def body_of(number: int) -> bytearray:
    return random_body(number, BODY_BYTES)


def memory() -> MemoryStore:
    return MemoryStore(AMPLE_BYTES)


async def put(store: PageStore, *numbers: int) -> list[Put]:
    return await store.put([(key(number), memoryview(body_of(number))) for number in numbers])


async def fetch(store: PageStore, *numbers: int) -> list[Got]:
    """Return the outcomes, assert that hits are right, and overwrite the memory afterwards."""
    views = [memoryview(bytearray(BODY_BYTES)) for _ in numbers]
    outcomes = await store.get([(key(number), view) for number, view in zip(numbers, views, strict=True)])
    for number, view, got in zip(numbers, views, outcomes, strict=True):
        assert got is not Got.HIT or view == body_of(number)
        view[:] = bytes(BODY_BYTES)
    return outcomes


def numbers_in(store: MemoryStore) -> list[int]:
    return sorted(int.from_bytes(stored.key, "big") for stored in store.objects)


async def settle() -> None:
    """Run everything that waits for nothing."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_tiered_store_asks_the_next_tier_only_for_missing_objects() -> None:
    near, far = Scripted(), Scripted()
    store = TieredStore([Tier(near), Tier(far)])
    await put(near, 1, 2)
    await put(far, 2, 3)
    assert await fetch(store, 1, 2) == [Got.HIT] * 2
    assert far.calls["get"] == 0
    assert await fetch(store, 3, 9, 1, 3) == [Got.HIT, Got.MISS, Got.HIT, Got.HIT]
    assert far.stats().got == {Got.HIT: 2, Got.MISS: 1}
    await store.close()


@pytest.mark.parametrize("near", Write)
@pytest.mark.parametrize("far", Write)
async def test_tiered_store_writes_to_each_tier_by_its_policy(near: Write, far: Write) -> None:
    stores = [MemoryStore(100 * OBJECT_BYTES), MemoryStore(300 * OBJECT_BYTES)]
    store = TieredStore([Tier(stores[0], near), Tier(stores[1], far)])
    takes_puts = [policy is Write.ALL for policy in (near, far)]
    rooms = [room for room, takes in zip((100, 300), takes_puts, strict=True) if takes]
    assert store.stats().free_bytes == min(rooms, default=0) * OBJECT_BYTES
    outcomes = await put(store, 1, 2)
    assert outcomes == ([Put.STORED] * 2 if any(takes_puts) else [Put.FULL, Put.SKIPPED])
    assert [numbers_in(tier) for tier in stores] == [[1, 2] if takes else [] for takes in takes_puts]
    for tier in stores:
        tier.objects.clear()
    await put(stores[0], 3)
    await put(stores[1], 4)
    assert await fetch(store, 3, 4) == [Got.HIT] * 2
    await settle()
    assert numbers_in(stores[0]) == ([3] if near is Write.NONE else [3, 4])
    assert numbers_in(stores[1]) == ([4] if far is Write.NONE else [3, 4])
    assert await fetch(store, 3, 4) == [Got.HIT] * 2
    await store.close()


async def test_tiered_store_copies_hits_in_order_while_memory_lasts() -> None:
    near, far = memory(), memory()
    store = TieredStore([Tier(near), Tier(far)], copy_bytes_max=3 * BODY_BYTES)
    await put(far, 1, 2, 3, 4, 5)
    for arrived in ([1, 2, 3], [1, 2, 3, 4, 5]):
        assert await fetch(store, 1, 2, 3, 4, 5) == [Got.HIT] * 5
        await settle()
        assert numbers_in(near) == arrived
    await store.close()


class GatedStore(MemoryStore):
    """A store whose puts wait until the gate is open."""

    def __init__(self) -> None:
        super().__init__(AMPLE_BYTES)
        self.gate = asyncio.Event()

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        await self.gate.wait()
        return await super().put(objects)


async def test_tiered_store_does_not_wait_for_a_slow_near_tier_to_take_a_hit() -> None:
    near, far = GatedStore(), memory()
    store = TieredStore([Tier(near), Tier(far)])
    await put(far, 1, 2, 3)
    assert await fetch(store, 1) == [Got.HIT]
    assert await fetch(store, 2) == [Got.HIT]
    near.gate.set()
    await settle()
    assert numbers_in(near) == [1], "a second copy was made during the first"
    near.gate.clear()
    assert await fetch(store, 2, 3) == [Got.HIT] * 2
    closing = asyncio.ensure_future(store.close())
    await settle()
    assert not closing.done(), "the store was closed during a put"
    near.gate.set()
    await closing


async def test_tiered_store_waits_once_for_a_tier_that_is_down() -> None:
    near, far = Scripted(Fault(1.0, 60.0, 10.0)), memory()
    guard = GuardedStore(near, 0.25)
    store = TieredStore([Tier(guard), Tier(far)])
    await put(store, 1)
    await asyncio.sleep(2.0)
    assert await fetch(store, 1) == [Got.HIT], "the far tier was not asked"
    assert store.stats().is_down
    assert TieredStore([Tier(guard)]).patience_s(0) == 0
    started, calls, puts = now(), near.calls.total(), guard.stats().puts
    assert await fetch(store, 1, 2) == [Got.HIT, Got.UNREACHABLE]
    await settle()
    assert guard.stats().puts == puts, "a copy was made for a tier that is down"
    assert await put(store, 3) == [Put.STORED]
    assert await store.contains([key(3), key(4)]) == [True, False]
    assert (now(), near.calls.total()) == (started, calls)
    await asyncio.sleep(100.0)
    assert store.stats().trips == 1
    assert not store.stats().is_down
    await store.close()


async def test_tiered_store_refills_a_far_tier_that_was_restarted_empty() -> None:
    near, far = memory(), memory()
    store = TieredStore([Tier(near), Tier(far)])
    await put(store, 1, 2)
    far.objects.clear()
    await fetch(store, 1)
    await settle()
    assert numbers_in(far) == [], "the far tier is written on each hit"
    await asyncio.sleep(SEEN_S)
    await fetch(store, 1)
    await settle()
    assert numbers_in(far) == [1]
    await store.close()


async def test_tiered_store_fills_other_tiers_when_one_is_full() -> None:
    near, far = MemoryStore(2 * OBJECT_BYTES), memory()
    store = TieredStore([Tier(near), Tier(far)])
    await put(near, 2)
    assert await put(store, 1, 2, 3, 4, 5) == [Put.STORED, Put.EXISTED, *[Put.STORED] * 3]
    assert (numbers_in(near), numbers_in(far)) == ([1, 2], [1, 2, 3, 4, 5])
    both_full = TieredStore([Tier(near), Tier(MemoryStore(OBJECT_BYTES))])
    assert await put(both_full, 6, 7, 8, 9) == [Put.STORED, Put.STORED, Put.FULL, Put.SKIPPED]
    await store.close()


async def test_tiered_store_repairs_a_near_tier_from_a_far_one() -> None:
    near, far = memory(), memory()
    store = TieredStore([Tier(near), Tier(far)])
    await put(store, 1, 2)
    near.objects[key(1)][-1] ^= 4
    near.objects[key(2)][-1] ^= 4
    far.forget(key(2))
    assert await fetch(store, 1, 2, 3) == [Got.HIT, Got.CORRUPT, Got.MISS]
    await settle()
    assert await fetch(near, 1, 2) == [Got.HIT, Got.MISS]
    assert store.stats().got == {Got.HIT: 1, Got.CORRUPT: 1, Got.MISS: 1}
    await store.close()


async def test_tiered_store_lists_and_removes_objects_of_all_tiers() -> None:
    near, far = memory(), memory()
    store = TieredStore([Tier(near, Write.HITS), Tier(far)])
    await put(store, 1, 2)
    await put(near, 2, 3)
    assert await store.contains([key(number) for number in (1, 2, 3, 4)]) == [True, True, True, False]
    assert sorted(int.from_bytes(stored.key.key, "big") for stored in await store.list_objects()) == [
        1,
        2,
        3,
    ]
    stats = store.stats()
    assert (stats.objects, stats.bytes, stats.capacity_bytes) == (4, 4 * OBJECT_BYTES, 2 * AMPLE_BYTES)
    assert (stats.put, stats.put_bytes) == ({Put.STORED: 2}, 2 * BODY_BYTES)
    await store.remove([key(1), key(2)])
    assert (numbers_in(near), numbers_in(far)) == ([3], [])
    await put(near, 1)
    assert await fetch(store, 1) == [Got.HIT]
    await settle()
    assert numbers_in(far) == [1], "the far tier was not written after a remove"
    await store.close()
    assert (numbers_in(near), numbers_in(far)) == ([], [])


async def test_tiered_store_patience_is_the_sum_of_its_tiers() -> None:
    store = TieredStore(
        [Tier(memory()), Tier(GuardedStore(memory(), 2.0)), Tier(GuardedStore(memory(), 0.5))]
    )
    assert store.patience_s(0) == pytest.approx(2.5)
    assert TieredStore([Tier(memory())]).patience_s(1) == float("inf")
    await store.close()


@IN_REAL_TIME
async def test_tiered_store_copies_large_hits_on_a_thread() -> None:
    content = Random(1).randbytes(3 << 20)
    view = memoryview(bytearray(len(content)))
    near, far = memory(), memory()
    store = TieredStore([Tier(near), Tier(far)])
    await far.put([(key(1), memoryview(content))])
    for steps in range(8):
        task = asyncio.ensure_future(store.get([(key(1), view)]))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
    assert await store.get([(key(1), view)]) == [Got.HIT]
    view[:] = bytes(len(content))
    await settle()
    assert await near.get([(key(1), view)]) == [Got.HIT]
    assert view == content
    await store.close()


Operation = tuple[str, list[int]]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "remove"]), st.lists(st.integers(0, 9), max_size=6)), max_size=25
)
TIERS = st.lists(st.tuples(st.integers(0, 8), st.sampled_from(Write)), min_size=1, max_size=3)


async def history(store: TieredStore, operations: Sequence[Operation], stores: Sequence[MemoryStore]) -> None:
    for name, numbers in operations:
        if name == "put":
            outcomes = await put(store, *numbers)
            exist = [outcome.is_there for outcome in outcomes]
            assert exist == sorted(exist, reverse=True)
            assert all(outcome is Put.SKIPPED for outcome in outcomes[exist.count(True) + 1 :])
            union = {number for tier in stores for number in numbers_in(tier)}
            assert set(numbers[: exist.count(True)]) <= union
        elif name == "get":
            outcomes = await fetch(store, *numbers)
            assert set(outcomes) <= {Got.HIT, Got.MISS}
            await settle()
        else:
            await store.remove([key(number) for number in numbers])
            union = {number for tier in stores for number in numbers_in(tier)}
            assert not set(numbers) & union


@settings(deadline=None, derandomize=True, max_examples=150)
@given(TIERS, OPERATIONS, st.integers(0, 9))
@run_by(partial(simulate, 1))
async def test_tiered_store_behaves_like_one_store_after_any_history(
    tiers: list[tuple[int, Write]], operations: list[Operation], copies: int
) -> None:
    stores = [MemoryStore(capacity * OBJECT_BYTES) for capacity, _ in tiers]
    chain = [Tier(tier, policy) for tier, (_, policy) in zip(stores, tiers, strict=True)]
    store = TieredStore(chain, copy_bytes_max=copies * BODY_BYTES)
    await history(store, operations, stores)
    for tier, (capacity, _) in zip(stores, tiers, strict=True):
        assert tier.stats().bytes <= capacity * OBJECT_BYTES
    await store.close()


@pytest.mark.parametrize("seed", range(20))
async def test_tiered_store_returns_what_was_put_or_nothing_under_any_faults(seed: int) -> None:
    rng = Random(seed)

    def faulty() -> FaultyStore:
        drop, evict, corrupt, refuse = (rng.random() * 0.2 for _ in range(4))
        return FaultyStore(rng, drop=drop, evict=evict, corrupt=corrupt, refuse=refuse, delay_s_max=0.01)

    store = TieredStore([Tier(GuardedStore(faulty(), 1.0)), Tier(GuardedStore(faulty(), 1.0))])
    tasks = [put(store, *rng.sample(range(30), 6)) for _ in range(15)]
    reads = [fetch(store, *rng.sample(range(30), 6)) for _ in range(30)]
    await asyncio.gather(*tasks, *reads)
    stats: StoreStats = store.stats()
    assert (stats.puts, stats.gets) == (90, 180)
    await store.close()
