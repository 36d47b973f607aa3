"""Objects pass through the ring: right bytes, right order, and memory that is not reused too early."""

import asyncio
from collections.abc import Sequence
from random import Random
from threading import Event

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sim.faulty_store import FaultyStore
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, Put, finish
from tidemill.workers.messages import WorkerGone
from tidemill.workers.settings import SettingsError
from tidemill.workers.transfer.arena_io import StagedObject
from tidemill.workers.transfer.staging import Lane, StagingRing

CAPACITY_BYTES = 1 << 20
NOISE = 0xEE


def key(number: int) -> ObjectKey:
    return ObjectKey(Kind.PAGE, PageKey(number.to_bytes(16, "little")))


def placed(sizes: Sequence[int], gap: int = 0) -> list[StagedObject]:
    """Objects one after another, `gap` bytes apart, from `gap` on."""
    return [
        StagedObject(key(index), sum(sizes[:index]) + (index + 1) * gap, size)
        for index, size in enumerate(sizes)
    ]


def device(num_bytes: int, seed: int | None = None) -> torch.Tensor:
    if seed is None:
        return torch.full((num_bytes,), NOISE, dtype=torch.uint8)
    return torch.frombuffer(bytearray(Random(seed).randbytes(num_bytes)), dtype=torch.uint8)


def bytes_at(memory: torch.Tensor, one: StagedObject) -> bytes:
    return memory[one.offset : one.offset + one.num_bytes].numpy().tobytes()


class Gated(MemoryStore):
    """A store whose calls end when the test lets them. Until then their memory must not be reused."""

    def __init__(self, capacity_bytes: int = CAPACITY_BYTES) -> None:
        super().__init__(capacity_bytes)
        self.entered: list[list[ObjectKey]] = []
        self.gate = asyncio.Event()
        self.loses: frozenset[ObjectKey] = frozenset()
        self._in_use: list[tuple[int, int]] = []
        self._arrival = asyncio.Event()

    async def calls(self, count: int) -> None:
        """Wait until this many calls have come."""
        while len(self.entered) < count:
            self._arrival.clear()
            await self._arrival.wait()

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        await self._pass(objects)
        lost = [index for index, (key, _) in enumerate(objects) if key in self.loses]
        if not lost:
            return await super().put(objects)
        stored = await super().put(objects[: lost[0]])
        return [*stored, Put.UNREACHABLE, *[Put.SKIPPED] * (len(objects) - lost[0] - 1)]

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        await self._pass(wanted)
        return await super().get(wanted)

    async def _pass(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> None:
        spans = [_span(view) for _, view in objects]
        for start, end in spans:
            assert all(end <= other or stop <= start for other, stop in self._in_use), "memory is in use"
        self._in_use += spans
        self.entered.append([key for key, _ in objects])
        self._arrival.set()
        try:
            await finish(asyncio.ensure_future(self.gate.wait()))
        finally:
            for span in spans:
                self._in_use.remove(span)


def _span(view: memoryview) -> tuple[int, int]:
    start = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    return start, start + view.nbytes


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    ring_bytes=st.integers(300, 2000),
    seed=st.integers(0, 1 << 16),
)
def test_objects_arrive_unchanged_whatever_the_store_does(
    sizes: list[int], ring_bytes: int, seed: int
) -> None:
    """Concurrent puts and gets, to other places, with a store that refuses, drops, evicts and corrupts."""

    async def main() -> None:
        rng = Random(seed)
        store = FaultyStore(rng, drop=0.1, evict=0.2, corrupt=0.2, refuse=0.05, delay_s_max=1e-4)
        source, objects, there = device(sum(sizes), seed), placed(sizes), placed(sizes, gap=13)
        targets = [device(sum(sizes) + 13 * (len(sizes) + 1)) for _ in range(3)]
        rings = [StagingRing(store, memory, ring_bytes, 300) for memory in (source, *targets)]
        putting = asyncio.create_task(rings[0].put(objects))
        await asyncio.gather(*(ring.get(there) for ring in rings[1:]))
        put = await putting
        found = [await ring.get(there) for ring in rings[1:]]
        lost = [index for index, outcome in enumerate(put) if not outcome.is_there]
        if lost:
            assert all(outcome is Put.SKIPPED for outcome in put[lost[0] + 1 :])
        for target, outcomes in zip(targets, found, strict=True):
            expected = device(len(target))
            for mine, theirs, outcome in zip(objects, there, outcomes, strict=True):
                span = slice(theirs.offset, theirs.offset + theirs.num_bytes)
                expected[span] = target[span]
                if outcome is Got.HIT:
                    assert bytes_at(target, theirs) == bytes_at(source, mine)
            assert torch.equal(target, expected), "other memory was written"
        for ring in rings:
            assert ring.used_bytes == 0
            await ring.close()

    asyncio.run(main())


async def test_outcomes_are_in_order_and_behind_a_loss_all_is_skipped() -> None:
    store = Gated()
    store.gate.set()
    store.loses = frozenset({key(5)})
    memory, objects = device(10 * 100, seed=3), placed([100] * 10)
    ring = StagingRing(store, memory, 400, 200)  # two objects make a piece
    outcomes = await ring.put(objects)
    assert outcomes == [Put.STORED] * 5 + [Put.UNREACHABLE] + [Put.SKIPPED] * 4
    assert store.entered == [[key(0), key(1)], [key(2), key(3)], [key(4), key(5)]]
    target = device(1000)
    other = StagingRing(store, target, 400, 200)
    wanted = [objects[9], *objects[:6], objects[0]]
    assert await other.get(wanted) == [Got.MISS, *[Got.HIT] * 5, Got.MISS, Got.HIT]
    assert bytes(target[500:].numpy()) == bytes([NOISE]) * 500
    await ring.close()
    await other.close()


async def test_pieces_of_a_get_are_in_flight_together_and_within_the_ring() -> None:
    store = Gated()
    memory, objects = device(1000, seed=3), placed([100] * 10)
    ring = StagingRing(store, memory, 450, 100)
    wanted = asyncio.create_task(ring.get(objects))
    await store.calls(4)
    assert store.entered == [[key(0)], [key(1)], [key(2)], [key(3)]]
    store.gate.set()
    assert await wanted == [Got.MISS] * 10
    await ring.close()


async def test_next_piece_is_copied_while_one_is_stored_but_stored_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    all_copied, lane_copy, left = asyncio.Event(), Lane.copy, [4]

    async def copy(lane: Lane, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        await lane_copy(lane, pairs)
        left[0] -= 1
        if not left[0]:
            all_copied.set()

    monkeypatch.setattr(Lane, "copy", copy)
    store = Gated()
    ring = StagingRing(store, device(400, seed=3), 400, 100)
    putting = asyncio.create_task(ring.put(placed([100] * 4)))
    await store.calls(1)
    await all_copied.wait()
    assert store.entered == [[key(0)]]
    store.gate.set()
    assert await putting == [Put.STORED] * 4
    assert store.entered == [[key(index)] for index in range(4)]
    await ring.close()


@pytest.mark.parametrize("kind", ["put", "get"])
@pytest.mark.parametrize("cancels", [1, 3])
async def test_cancelled_call_keeps_its_memory_until_its_transfer_has_ended(kind: str, cancels: int) -> None:
    store = Gated()
    memory, objects = device(400, seed=3), placed([100] * 4)
    ring = StagingRing(store, memory, 200, 100)
    call = asyncio.ensure_future(ring.put(objects) if kind == "put" else ring.get(objects))
    await store.calls(1 if kind == "put" else 2)
    behind = asyncio.create_task(ring.get(objects[:1]))
    for _ in range(cancels):
        call.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
    assert not call.done()
    store.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await behind
    begun = [[key(0)]] if kind == "put" else [[key(0)], [key(1)]]
    assert store.entered == [*begun, [key(0)]], "a piece started after the cancellation"
    assert ring.used_bytes == 0
    await ring.close()


async def test_call_cancelled_while_it_copies_ends_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), Event()

    def copy(_lane: Lane, _pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)

    monkeypatch.setattr(Lane, "_copy", copy)
    ring = StagingRing(MemoryStore(CAPACITY_BYTES), device(100, seed=1), 100, 100)
    call = asyncio.create_task(ring.put(placed([100])))
    await begun.wait()
    call.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not call.done()
    assert ring.used_bytes == 100
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert ring.used_bytes == 0
    await ring.close()


async def test_call_cancelled_while_it_waits_lets_those_behind_it_go_on() -> None:
    store = Gated()
    memory = device(400, seed=3)
    ring = StagingRing(store, memory, 200, 200)
    first = asyncio.create_task(ring.get([StagedObject(key(0), 0, 120)]))
    await store.calls(1)
    large = asyncio.create_task(ring.get([StagedObject(key(1), 0, 200)]))
    small = asyncio.create_task(ring.get([StagedObject(key(2), 0, 80)]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(store.entered) == 1, "first come, first served: the large one would starve"
    large.cancel()
    await store.calls(2)
    store.gate.set()
    assert await first == await small == [Got.MISS]
    assert large.cancelled()
    await ring.close()


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("CUDA error: an illegal memory access"), WorkerGone),
        (ZeroDivisionError(), ZeroDivisionError),
    ],
)
def test_device_that_fails_in_a_copy_is_a_lost_worker(
    monkeypatch: pytest.MonkeyPatch, error: Exception, wanted: type[Exception]
) -> None:
    def fails(_lane: Lane, _pairs: object) -> None:
        raise error

    async def main() -> None:
        ring = StagingRing(MemoryStore(CAPACITY_BYTES), device(300, seed=1), 300, 100)
        await ring.put(placed([100]))
        monkeypatch.setattr(Lane, "_copy", fails)
        with pytest.raises(wanted):
            await ring.put(placed([100] * 3))
        with pytest.raises(wanted):
            await ring.get(placed([100]))
        assert ring.used_bytes == 0
        await ring.close()

    asyncio.run(main())


def test_object_that_does_not_pass_is_refused_before_anything_moves() -> None:
    with pytest.raises(SettingsError, match=r"3,000,000 bytes .* ring of 2,097,152: make the ring 3 MiB"):
        StagingRing(MemoryStore(CAPACITY_BYTES), device(1), 2 << 20, 3_000_000)
