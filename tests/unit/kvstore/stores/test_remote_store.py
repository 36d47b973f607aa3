"""The remote store with a scripted client: outcomes for codes, batches and confirmation."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kvstore.objects import page, random_body
from tests.support.loops import IN_REAL_TIME, IN_VIRTUAL_TIME, run_by
from tests.support.sim.loop import simulate
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import Kind, ObjectKey
from tidemill.kvstore.stores.page_store import SHARE_BYTES_MIN, Got, Put, StoredObject
from tidemill.kvstore.stores.remote_store import BATCH_OBJECTS_MAX, Listing, Parts, RemoteStore
from tidemill.kvstore.stores.seal import SEAL_BYTES, Sealing

pytestmark = IN_VIRTUAL_TIME

BODY_BYTES = 100


class ScriptedClient:
    """A client that stores objects by name and returns scripted codes.

    codes_by_call   the codes by call and name, instead of the defaults; the last one is repeated
    calls           the name of each call, and the names of its objects
    """

    def __init__(self, bytes_per_s: float = 1e12) -> None:
        self.objects: dict[str, bytes] = {}
        self.codes_by_call: dict[tuple[str, str], list[int]] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self.registered: list[memoryview] = []
        self.bytes_per_s = bytes_per_s
        self.moving = 0

    async def put(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        self.calls.append(("put", list(names)))
        await self._move(objects)
        for name, parts in zip(names, objects, strict=True):
            if self._peek_code("put", name, 0) == 0:
                self.objects.setdefault(name, b"".join(parts))
        return [self._next_code("put", name, 0) for name in names]

    async def get(self, names: Sequence[str], objects: Sequence[Parts]) -> list[int]:
        self.calls.append(("get", list(names)))
        assert len(set(names)) == len(names), "Mooncake fills only one of two equal names"
        await self._move(objects)
        return [self._get(name, parts) for name, parts in zip(names, objects, strict=True)]

    async def exist(self, names: Sequence[str]) -> list[int]:
        self.calls.append(("exist", list(names)))
        return [self._next_code("exist", name, int(name in self.objects)) for name in names]

    async def remove(self, names: Sequence[str]) -> list[int]:
        self.calls.append(("remove", list(names)))
        return [0 if self.objects.pop(name, None) is not None else -704 for name in names]

    def register(self, memory: memoryview) -> None:
        self.registered.append(memory)

    async def close(self) -> None:
        assert not self.moving

    def names(self, call: str) -> list[list[str]]:
        return [names for called, names in self.calls if called == call]

    def _get(self, name: str, parts: Parts) -> int:
        found = self.objects.get(name, b"")
        code = self._next_code("get", name, len(found) or -704)
        if code >= 0:
            assert code == sum(part.nbytes for part in parts) == len(found), (
                "the scripted code does not match the object"
            )
            parts[0][:], parts[1][:] = found[: parts[0].nbytes], found[parts[0].nbytes :]
        return code

    async def _move(self, objects: Sequence[Parts]) -> None:
        self.moving += 1
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        num_bytes = sum(part.nbytes for parts in objects for part in parts)
        loop.call_later(num_bytes / self.bytes_per_s, ended.set_result, None)
        while not ended.done():
            try:
                await asyncio.wait({ended})
            except asyncio.CancelledError:
                await asyncio.wait({ended})
                self.moving -= 1
                raise
        self.moving -= 1

    def _peek_code(self, call: str, name: str, default: int) -> int:
        return self.codes_by_call.get((call, name), [default])[0]

    def _next_code(self, call: str, name: str, default: int) -> int:
        script = self.codes_by_call.get((call, name), [default])
        return script.pop(0) if len(script) > 1 else script[0]


def offer(number: int, kind: Kind = Kind.PAGE, num_bytes: int = BODY_BYTES) -> tuple[ObjectKey, memoryview]:
    return page(number, kind), memoryview(random_body(number, num_bytes))


def wanted(*numbers: int) -> list[tuple[ObjectKey, memoryview]]:
    return [(page(number), memoryview(bytearray(BODY_BYTES))) for number in numbers]


@asynccontextmanager
async def opened(
    bytes_per_s: float = 1e12, lease_s: float = 10.0
) -> AsyncGenerator[tuple[ScriptedClient, RemoteStore]]:
    client = ScriptedClient(bytes_per_s)
    store = RemoteStore(client, lease_s=lease_s)
    yield client, store
    await store.close()


@pytest.mark.parametrize(
    ("codes", "exists", "outcome"),
    [
        ([0], [0, 1], Put.STORED),
        ([0], [1, 1], Put.EXISTED),
        ([0], [0, 0], Put.UNCONFIRMED),
        ([0], [0, -900], Put.UNREACHABLE),
        ([0], [-900, 1], Put.UNREACHABLE),
        ([-705], [0, 1], Put.STORED),
        ([-200], [0, 0], Put.FULL),
        ([-200, -200, 0], [0, 1], Put.STORED),
        ([-200], [0, 1], Put.EXISTED),  # another writer stored it
        ([-600], [0, 0], Put.FULL),
        ([-800], [0, 0], Put.OWNER_DOWN),
        ([-200, -800], [0, 0], Put.OWNER_DOWN),
        ([-900], [0, 0], Put.UNREACHABLE),
        ([-901], [0, 1], Put.UNREACHABLE),
        ([-1], [0, 0], Put.UNREACHABLE),
        ([-12345], [0, 0], Put.UNREACHABLE),
    ],
)
async def test_remote_store_maps_each_code_of_a_put(
    codes: list[int], exists: list[int], outcome: Put
) -> None:
    async with opened() as (client, store):
        name = str(page(2))
        client.codes_by_call = {("put", name): codes, ("exist", name): exists}
        if outcome is Put.UNREACHABLE and exists != [
            0,
            -900,
        ]:  # otherwise no object of the batch can be confirmed
            expected = [Put.UNREACHABLE, Put.SKIPPED, Put.SKIPPED]
        else:
            expected = [Put.STORED, outcome, Put.STORED if outcome.is_there else Put.SKIPPED]
        assert await store.put([offer(1), offer(2), offer(3)]) == expected
        assert store.stats().put[Put.STORED] == expected.count(Put.STORED)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (-703, Got.MISS),
        (-704, Got.MISS),
        (-600, Got.TRUNCATED),
        (-707, Got.EXPIRED),
        (-800, Got.OWNER_DOWN),
        (-801, Got.CORRUPT),
        (-900, Got.UNREACHABLE),
        (-901, Got.UNREACHABLE),
        (-1, Got.UNREACHABLE),
        (-12345, Got.UNREACHABLE),
    ],
)
async def test_remote_store_maps_each_code_of_a_get(code: int, outcome: Got) -> None:
    async with opened() as (client, store):
        await store.put([offer(1), offer(2), offer(3)])
        client.codes_by_call = {("get", str(page(2))): [code]}
        found = wanted(1, 2, 3)
        assert await store.get(found) == [Got.HIT, outcome, Got.HIT]
        assert [bytes(view) for _, view in found[::2]] == [bytes(offer(number)[1]) for number in (1, 3)]
        assert store.stats().got == {Got.HIT: 2, outcome: 1}
        damaged = [[str(page(2))]] if outcome in {Got.TRUNCATED, Got.CORRUPT} else []
        assert client.names("remove") == damaged


async def test_remote_store_puts_a_checkpoint_after_its_pages_are_confirmed() -> None:
    async with opened() as (client, store):
        pages, checkpoint = [str(page(1)), str(page(2))], str(page(2, Kind.CHECKPOINT))
        objects = [offer(1), offer(2), offer(2, Kind.CHECKPOINT)]
        client.codes_by_call = {("exist", pages[0]): [0, 0]}
        assert await store.put(objects) == [Put.UNCONFIRMED, Put.SKIPPED, Put.SKIPPED]
        assert client.names("put") == [pages]
        client.codes_by_call = {}
        client.calls.clear()
        assert await store.put(objects) == [Put.EXISTED, Put.EXISTED, Put.STORED]
        assert client.calls == [
            ("exist", [*pages, checkpoint]),
            ("put", [checkpoint]),
            ("exist", [checkpoint]),
        ]


async def test_remote_store_retries_only_objects_without_space() -> None:
    async with opened() as (client, store):
        names = [str(page(number)) for number in (1, 2, 3)]
        client.codes_by_call = {("put", names[1]): [-200, 0], ("put", names[2]): [-200, -200, -200, 0]}
        assert await store.put([offer(1), offer(2), offer(3)]) == [Put.STORED, Put.STORED, Put.FULL]
        assert client.names("put") == [names, names[1:], names[2:]]


@pytest.mark.parametrize(("code", "outcome"), [(-800, Got.OWNER_DOWN), (-900, Got.UNREACHABLE)])
async def test_remote_store_bounds_a_batch_and_does_not_retry_after_a_loss(code: int, outcome: Got) -> None:
    """Each call to a crashed master takes 4 s."""
    async with opened() as (client, store):
        numbers = range(3 * BATCH_OBJECTS_MAX)
        assert await store.put([offer(number) for number in numbers]) == [Put.STORED] * len(numbers)
        assert [len(names) for names in client.names("put")] == [BATCH_OBJECTS_MAX] * 3
        client.codes_by_call = {("get", str(page(BATCH_OBJECTS_MAX + 1))): [code]}
        found = await store.get(wanted(*numbers))
        assert [len(names) for names in client.names("get")] == [BATCH_OBJECTS_MAX] * 2
        good = [Got.HIT] * BATCH_OBJECTS_MAX
        assert found == [*good, Got.HIT, outcome, *good[2:], *[outcome] * BATCH_OBJECTS_MAX]


async def test_remote_store_moves_a_repeated_key_once() -> None:
    async with opened() as (client, store):
        outcomes = await store.put([offer(1), offer(1), offer(2), offer(1)])
        assert outcomes == [Put.STORED, Put.EXISTED, Put.STORED, Put.EXISTED]
        assert sorted(name for names in client.names("put") for name in names) == [str(page(1)), str(page(2))]
        assert await store.get(wanted(1, 1, 9, 1)) == [Got.HIT, Got.HIT, Got.MISS, Got.HIT]


async def test_remote_store_registers_the_memory_of_seals_once() -> None:
    async with opened(bytes_per_s=1e3) as (client, store):
        await asyncio.gather(*(store.put([offer(number)]) for number in range(4)))
        blocks = len(client.registered)
        assert blocks <= 8
        for number in range(20):
            assert await store.get(wanted(number % 4)) == [Got.HIT]
        assert len(client.registered) == blocks


async def test_remote_store_limits_a_batch_to_half_a_lease() -> None:
    """A larger object is a batch alone: it may still arrive in time."""
    lease_s, bytes_per_s, body_bytes = 2.0, 10e6, 1 << 20
    async with opened(bytes_per_s, lease_s) as (client, store):
        objects = [offer(number, num_bytes=body_bytes) for number in range(40)]
        views = [(page(number), memoryview(bytearray(body_bytes))) for number in range(40)]
        await store.put(objects)
        for _ in range(3):
            client.calls.clear()
            assert await store.get(views) == [Got.HIT] * 40
        largest = max(len(names) for names in client.names("get")) * body_bytes
        assert 0.2 < largest / bytes_per_s / lease_s < 0.6
        client.bytes_per_s = body_bytes / 10
        for _ in range(3):
            client.calls.clear()
            await store.get(views)
        assert client.names("get") == [[str(page(number))] for number in range(40)]


async def test_remote_store_touches_no_memory_after_a_cancelled_call() -> None:
    async with opened(bytes_per_s=1.0) as (client, store):
        await store.put([offer(1)])
        for call in (lambda: store.get(wanted(1)), lambda: store.put([offer(2)])):
            for turns in range(12):
                task = asyncio.ensure_future(call())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                task.cancel()
                await asyncio.wait({task})
                assert not client.moving
        assert await store.get(wanted(1)) == [Got.HIT]


@IN_REAL_TIME
async def test_remote_store_lists_only_our_objects() -> None:
    async def listing() -> Listing:
        await asyncio.sleep(0)
        return Listing([(str(page(1)), 164), ("foreign", 7), ("00.0000.p", 8)], 1000)

    store = RemoteStore(ScriptedClient(), listing=listing)
    assert await store.list_objects() == [StoredObject(page(1), BODY_BYTES + SEAL_BYTES)]
    stats = store.stats()
    assert (stats.objects, stats.bytes, stats.capacity_bytes) == (3, 179, 1000)
    with pytest.raises(StoreError):
        await RemoteStore(ScriptedClient()).list_objects()


Codes = st.lists(st.sampled_from([0, 0, 0, -200, -600, -705, -800, -900]), min_size=1, max_size=3)
Exists = st.lists(st.sampled_from([0, 1, 1, -900]), min_size=2, max_size=2)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(Kind)), min_size=1, max_size=10),
    st.dictionaries(st.tuples(st.integers(0, 5), st.sampled_from(Kind)), st.tuples(Codes, Exists)),
)
@run_by(partial(simulate, 1))
async def test_remote_store_reports_only_confirmed_objects(
    objects: list[tuple[int, Kind]], script: dict[tuple[int, Kind], tuple[list[int], list[int]]]
) -> None:
    async with opened() as (client, store):
        for (number, kind), (codes, exists) in script.items():
            name = str(page(number, kind))
            client.codes_by_call |= {("put", name): list(codes), ("exist", name): list(exists)}
        outcomes = await store.put([offer(number, kind) for number, kind in objects])
        exist = [outcome.is_there for outcome in outcomes]
        assert exist == sorted(exist, reverse=True), "an object after a missing one is not SKIPPED"
        assert set(outcomes[exist.count(True) + 1 :]) <= {Put.SKIPPED}
        for position, ((number, kind), outcome) in enumerate(zip(objects, outcomes, strict=True)):
            exists = script.get((number, kind), ([], [0, 1]))[1]
            assert not outcome.is_there or 1 in exists
            offered = any(str(page(number, kind)) in names for names in client.names("put"))
            if kind is Kind.CHECKPOINT and offered:
                first = objects.index((number, kind))
                assert all(exist[before] for before in range(first) if objects[before][1] is Kind.PAGE), (
                    position
                )


TOGETHER = threading.Barrier(2)


class TogetherSealing(Sealing):
    """Seals only while another thread seals too."""

    def seal(self, key: ObjectKey, body: memoryview) -> bytes:
        TOGETHER.wait(30)
        return super().seal(key, body)


@IN_REAL_TIME
async def test_threads_share_the_seals_of_a_large_batch() -> None:
    bodies = [memoryview(bytearray([number]) * SHARE_BYTES_MIN) for number in range(2)]
    views = [memoryview(bytearray(SHARE_BYTES_MIN)) for _ in bodies]
    with ThreadPoolExecutor(2) as threads:
        store = RemoteStore(ScriptedClient(), sealing=TogetherSealing(), executor=threads)
        assert await store.put([(page(n), body) for n, body in enumerate(bodies)]) == [Put.STORED] * 2
        assert await store.get([(page(n), view) for n, view in enumerate(views)]) == [Got.HIT] * 2
        await store.close()
    assert views == bodies
