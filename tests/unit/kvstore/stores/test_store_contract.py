"""The contract of all page stores. A new store adds a class that opens and damages it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol, cast

import pytest

from tests.support.kvstore.objects import page, random_body
from tests.support.mooncake import Mooncake, PlainClient, Shared, mooncake
from tests.support.sim.faulty_store import FaultyStore
from tidemill.kvstore.keys import Kind, ObjectKey
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.folder_bound import BLOCK_BYTES
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.mooncake_admin import list_objects
from tidemill.kvstore.stores.mooncake_client import MooncakeClient, NativeStore
from tidemill.kvstore.stores.mooncake_store import load_library
from tidemill.kvstore.stores.page_store import Got, PageStore, Put
from tidemill.kvstore.stores.remote_store import RemoteStore
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES, SECRET_BYTES, Sealing
from tidemill.kvstore.stores.tiered_store import Tier, TieredStore

BODY_BYTES = BLOCK_BYTES - SEAL_BYTES
OBJECT_BYTES = BODY_BYTES + SEAL_BYTES
AMPLE_BYTES = 1 << 30

Damage = Callable[[bytes], bytes]
EMPTY = "nothing"


class Subject(Protocol):
    """A store under test: opens it, and damages its objects (seal and body) bypassing it.

    reports_winner  Of two concurrent writers, one gets STORED and the other EXISTED.
    stores_empty    It can store an object without bytes.
    """

    reports_winner: bool
    stores_empty: bool

    def open(self, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN) -> PageStore: ...

    def damage(self, key: ObjectKey, change: Damage) -> None: ...


@dataclass
class Memory:
    folder: Path
    store: MemoryStore = field(default_factory=lambda: MemoryStore(AMPLE_BYTES))
    reports_winner: bool = True
    stores_empty: bool = True

    def open(self, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN) -> PageStore:
        self.store = MemoryStore(capacity_bytes, sealing)
        return self.store

    def damage(self, key: ObjectKey, change: Damage) -> None:
        self.store.objects[key][:] = change(bytes(self.store.objects[key]))


@dataclass
class FaultlessMemory(Memory):
    def open(self, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN) -> PageStore:
        self.store = FaultyStore(Random(1), capacity_bytes=capacity_bytes, sealing=sealing)
        return self.store


@dataclass
class Files:
    folder: Path
    reports_winner: bool = True
    stores_empty: bool = True

    def open(self, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN) -> PageStore:
        return FileStore(self.folder, capacity_bytes, sealing=sealing)

    def damage(self, key: ObjectKey, change: Damage) -> None:
        [path] = self.folder.glob(f"objects/*/{key}")
        path.write_bytes(change(path.read_bytes()))


@dataclass
class RealMooncake:
    """A real Mooncake, which returns the same outcome to both of two concurrent writers. When full it
    guarantees less than this suite demands: see test_mooncake_faults.py."""

    service: Mooncake
    client: PlainClient
    reports_winner: bool = False
    stores_empty: bool = False

    def open(self, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN) -> PageStore:
        assert capacity_bytes == AMPLE_BYTES, "the memory of its owners is fixed"
        self.client.clear()
        client = MooncakeClient(
            cast("NativeStore", Shared(self.client)), load_library().ReplicateConfig(), stages=True
        )
        return RemoteStore(
            client,
            sealing=sealing,
            executor=client.readers,
            listing=lambda: asyncio.to_thread(list_objects, self.service.admin),
        )

    def damage(self, key: ObjectKey, change: Damage) -> None:
        self.client.write(str(key), change(self.client.read(str(key))))


class Tiered(Memory):
    """A store behind a near tier that is always full."""

    def open(self, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN) -> PageStore:
        self.store = MemoryStore(capacity_bytes, sealing)
        return TieredStore([Tier(MemoryStore(0)), Tier(self.store)])


BOUNDED: dict[str, Callable[[Path], Subject]] = {
    "memory": Memory,
    "file": Files,
    "faultless": FaultlessMemory,
    "tiered": Tiered,
}
SUBJECTS = [*BOUNDED, "mooncake"]


@pytest.fixture(scope="module")
def real_mooncake(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealMooncake]:
    with mooncake(tmp_path_factory.mktemp("mooncake") / "log") as service:
        client = PlainClient(service)
        yield RealMooncake(service, client)
        client.close()


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    if request.param == "mooncake":
        return request.getfixturevalue("real_mooncake")
    return BOUNDED[request.param](tmp_path / "store")


@pytest.fixture(params=BOUNDED)
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    """Return a store that stores exactly its capacity."""
    return BOUNDED[request.param](tmp_path / "store")


def body_of(number: int, num_bytes: int = BODY_BYTES) -> bytearray:
    return random_body(number, num_bytes)


def offers(numbers: list[int]) -> list[tuple[ObjectKey, memoryview]]:
    return [(page(number), memoryview(body_of(number))) for number in numbers]


async def fetch(store: PageStore, numbers: list[int]) -> list[bytes | Got]:
    """Return the body of each hit, else the outcome."""
    views = [memoryview(bytearray(BODY_BYTES)) for _ in numbers]
    outcomes = await store.get([(page(number), view) for number, view in zip(numbers, views, strict=True)])
    return [bytes(view) if got is Got.HIT else got for got, view in zip(outcomes, views, strict=True)]


@asynccontextmanager
async def opened(
    subject: Subject, capacity_bytes: int = AMPLE_BYTES, sealing: Sealing = PLAIN
) -> AsyncGenerator[PageStore]:
    store = subject.open(capacity_bytes, sealing)
    try:
        yield store
    finally:
        await store.close()
        await store.close()


async def test_store_returns_results_in_order(subject: Subject) -> None:
    async with opened(subject) as store:
        objects = offers([3, 1, 2])
        assert await store.put(objects) == [Put.STORED] * 3
        for _, body in objects:
            body[:] = bytes(BODY_BYTES)
        assert await fetch(store, [1, 9, 3, 1]) == [body_of(1), Got.MISS, body_of(3), body_of(1)]
        assert await store.contains([page(9), page(2), page(2, Kind.CHECKPOINT)]) == [False, True, False]
        assert await store.put([]) == await store.get([]) == await store.contains([]) == []


async def test_store_keeps_the_object_of_the_first_writer(subject: Subject) -> None:
    async with opened(subject) as store:
        assert await store.put([*offers([1]), (page(1), memoryview(body_of(2)))]) == [Put.STORED, Put.EXISTED]
        assert await store.put([(page(1), memoryview(body_of(3)))]) == [Put.EXISTED]
        assert await fetch(store, [1]) == [body_of(1)]


async def test_store_one_of_many_writers_wins(subject: Subject) -> None:
    async with opened(subject) as store:
        bodies = [body_of(100 + writer) for writer in range(8)]
        outcomes = await asyncio.gather(*(store.put([(page(1), memoryview(body))]) for body in bodies))
        winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome == [Put.STORED]]
        assert winners
        assert len(winners) == 1 or not subject.reports_winner
        found = await fetch(store, [1, 1])
        assert found[0] == found[1]
        assert found[0] in winners


DAMAGES: dict[str, tuple[Damage, Got]] = {
    "a bit of the body": (lambda stored: stored[:-1] + bytes([stored[-1] ^ 4]), Got.CORRUPT),
    "a bit of the seal": (
        lambda stored: stored[: SEAL_BYTES - 1] + bytes([stored[SEAL_BYTES - 1] ^ 4]) + stored[SEAL_BYTES:],
        Got.CORRUPT,
    ),
    "another version": (
        lambda stored: stored[:4] + bytes([stored[4] + 1]) + stored[5:],
        Got.OTHER_VERSION,
    ),
    "no last byte": (lambda stored: stored[:-1], Got.TRUNCATED),
    "no body": (lambda stored: stored[:SEAL_BYTES], Got.TRUNCATED),
    "half a seal": (lambda stored: stored[: SEAL_BYTES // 2], Got.TRUNCATED),
    EMPTY: (lambda _: b"", Got.TRUNCATED),
    "a byte more": (lambda stored: stored + b"\0", Got.TRUNCATED),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("sealing", [PLAIN, Sealing(bytes(SECRET_BYTES))], ids=["plain", "keyed"])
async def test_store_detects_and_deletes_a_damaged_object(
    subject: Subject, damage: str, sealing: Sealing
) -> None:
    if damage == EMPTY and not subject.stores_empty:
        pytest.skip("the store refuses empty objects")
    change, outcome = DAMAGES[damage]
    async with opened(subject, sealing=sealing) as store:
        await store.put(offers([1, 2]))
        subject.damage(page(1), change)
        assert await fetch(store, [1, 2]) == [outcome, body_of(2)]
        assert await fetch(store, [1]) == [Got.MISS]
        assert await store.contains([page(1)]) == [False]
        assert await store.put(offers([1])) == [Put.STORED]
        assert await fetch(store, [1]) == [body_of(1)]
        assert store.stats().corrupt == store.stats().got[outcome] == 1


async def test_store_detects_an_object_of_another_key_or_secret(subject: Subject) -> None:
    ours, theirs = Sealing(b"1" * SECRET_BYTES), Sealing(b"2" * SECRET_BYTES)
    async with opened(subject, sealing=ours) as store:
        await store.put(offers([1, 2, 3]))
        for number, sealing, sealed in ((1, theirs, 1), (2, ours, 3)):
            forged = sealing.seal(page(sealed), memoryview(body_of(4))) + body_of(4)
            subject.damage(page(number), lambda _, forged=forged: forged)
        assert await fetch(store, [1, 2, 3]) == [Got.CORRUPT, Got.CORRUPT, body_of(3)]


@pytest.mark.parametrize("view_bytes", [1, BODY_BYTES - 1, BODY_BYTES + 1, 5 * BODY_BYTES])
async def test_store_reports_another_length_as_truncated(subject: Subject, view_bytes: int) -> None:
    async with opened(subject) as store:
        await store.put(offers([1]))
        assert await store.get([(page(1), memoryview(bytearray(view_bytes)))]) == [Got.TRUNCATED]
        assert await fetch(store, [1]) == [Got.MISS]


async def test_store_accepts_a_removed_object_again(subject: Subject) -> None:
    async with opened(subject) as store:
        await store.put(offers([1, 2, 3]))
        await store.remove([page(1), page(3), page(9)])
        assert await store.contains([page(number) for number in (1, 2, 3)]) == [False, True, False]
        assert await fetch(store, [1, 2]) == [Got.MISS, body_of(2)]
        assert await store.put(offers([1])) == [Put.STORED]


async def test_store_separates_and_lists_objects_of_each_kind_and_shard(subject: Subject) -> None:
    keys = [ObjectKey(kind, page(number).key, number % 3) for kind in Kind for number in range(60)]
    keys += [ObjectKey(Kind.PAGE, page(1).key, shard) for shard in (0, 0x100)]
    async with opened(subject) as store:
        assert await store.list_objects() == []
        await store.put([(key, memoryview(body_of(index))) for index, key in enumerate(keys)])
        for index, key in enumerate(keys):
            view = memoryview(bytearray(BODY_BYTES))
            assert await store.get([(key, view)]) == [Got.HIT]
            assert view == body_of(index)
        found = await store.list_objects()
        assert {(stored.key, stored.bytes) for stored in found} == {(key, OBJECT_BYTES) for key in keys}
        assert len(found) == len(keys)


async def test_memory_store_counts_a_read_as_a_use(tmp_path: Path) -> None:
    async with opened(Memory(tmp_path), capacity_bytes=3 * OBJECT_BYTES) as store:
        await store.put(offers([1, 2, 3]))
        assert await fetch(store, [1]) == [body_of(1)]
        await store.put(offers([4]))
        assert await store.contains([page(number) for number in (1, 2, 3, 4)]) == [True, False, True, True]


async def test_store_evicts_the_least_recently_used_object(bounded: Subject) -> None:
    async with opened(bounded, capacity_bytes=4 * OBJECT_BYTES) as store:
        for number in range(12):
            assert await store.put(offers([number])) == [Put.STORED]
            assert store.stats().bytes <= 4 * OBJECT_BYTES
        exist = await store.contains([page(number) for number in range(12)])
        assert exist[-1]
        assert sorted(exist) == exist, "an older object outlived a younger one"
        assert store.stats().evicted == 12 - sum(exist) > 0
        assert store.stats().objects == sum(exist)


async def test_store_evicts_demoted_objects_first_until_their_next_use(bounded: Subject) -> None:
    async with opened(bounded, capacity_bytes=4 * OBJECT_BYTES) as store:
        await store.put(offers([1, 2, 3, 4]))
        await store.demote([page(3), page(4), page(9)])
        assert await fetch(store, [4]) == [body_of(4)]
        assert await store.put(offers([5])) == [Put.STORED]
        assert await store.contains([page(number) for number in (2, 3, 4, 5)]) == [True, False, True, True]


async def test_store_skips_all_objects_after_the_first_that_does_not_fit(bounded: Subject) -> None:
    async with opened(bounded, capacity_bytes=4 * OBJECT_BYTES) as store:
        await store.put(offers([6]))
        assert await store.put(offers([1, 2, 3, 4, 5, 6])) == [Put.STORED] * 4 + [Put.FULL, Put.SKIPPED]
        assert await store.contains([page(number) for number in range(1, 6)]) == [True] * 4 + [False]
        assert store.stats().refused == 2


async def test_store_put_never_evicts_its_own_objects(bounded: Subject) -> None:
    async with opened(bounded, capacity_bytes=4 * OBJECT_BYTES) as store:
        for number in (1, 2, 3, 4):
            await store.put(offers([number]))
        assert await store.put(offers([1, 2, 3, 5])) == [Put.EXISTED] * 3 + [Put.STORED]
        assert await fetch(store, [1, 2, 3, 5, 4]) == [
            *(body_of(number) for number in (1, 2, 3, 5)),
            Got.MISS,
        ]


async def test_store_refuses_an_object_larger_than_itself(bounded: Subject) -> None:
    async with opened(bounded, capacity_bytes=OBJECT_BYTES) as store:
        await store.put(offers([1]))
        assert await store.put([(page(2), memoryview(body_of(2, OBJECT_BYTES)))]) == [Put.FULL]
        assert await fetch(store, [1]) == [body_of(1)]


async def test_store_writes_no_view_after_a_cancelled_get(subject: Subject) -> None:
    memory = bytearray(1 << 22)
    async with opened(subject) as store:
        await store.put([(page(1), memoryview(body_of(1, len(memory))))])
        for steps in range(8):
            task = asyncio.ensure_future(store.get([(page(1), memoryview(memory))]))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            memory[:] = bytes(len(memory))
    assert not any(memory), "a transfer wrote after its task had ended"


async def test_store_never_stores_memory_reused_after_a_cancelled_put(subject: Subject) -> None:
    async with opened(subject) as store:
        for steps in range(8):
            memory = body_of(steps)
            task = asyncio.ensure_future(store.put([(page(steps), memoryview(memory))]))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
            memory[:] = bytes(BODY_BYTES)
        for steps, found in enumerate(await fetch(store, list(range(8)))):
            assert found in (body_of(steps), Got.MISS)


async def test_store_counts_add_up(subject: Subject) -> None:
    async with opened(subject) as store:
        await store.put(offers([1, 2, 1]))
        await fetch(store, [1, 2, 3])
        await store.list_objects()  # a shared store counts its objects only for a listing
        stats = store.stats()
        assert (stats.objects, stats.bytes) == (2, 2 * OBJECT_BYTES)
        assert stats.capacity_bytes > 0
        assert stats.put == {Put.STORED: 2, Put.EXISTED: 1}
        assert (stats.puts, stats.refused, stats.put_bytes) == (3, 0, 2 * BODY_BYTES)
        assert (stats.gets, stats.hits, stats.misses, stats.corrupt) == (3, 2, 1, 0)
        assert stats.get_bytes == 2 * BODY_BYTES
