"""The circuit breaker: bounded waits for a store that is down or slow, and safe memory of calls."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kvstore.scripted_store import Fault, Scripted, now
from tests.support.loops import IN_VIRTUAL_TIME
from tests.support.sim.loop import simulate
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.circuit_breaker import PROBE_S_MAX, RATE_AT_START, GuardedStore, Rate
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.page_store import Got, PageStore, Put

pytestmark = IN_VIRTUAL_TIME

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
TIMEOUT_S = 0.25
EPSILON_S = 1e-6
KEYS = [ObjectKey(Kind.PAGE, PageKey(bytes([number + 1] * 16))) for number in range(20)]
BODY = bytes(range(100))


async def took_s(call: Awaitable[object]) -> float:
    started = now()
    await call
    return now() - started


def one_put(store: PageStore, number: int = 0, count: int = 1) -> Awaitable[list[Put]]:
    return store.put([(key, memoryview(BODY)) for key in KEYS[number : number + count]])


def one_get(store: PageStore, memory: bytearray, number: int = 0) -> Awaitable[list[Got]]:
    return store.get([(KEYS[number], memoryview(memory))])


@asynccontextmanager
async def guarded(*faults: Fault) -> AsyncGenerator[tuple[Scripted, GuardedStore]]:
    store = Scripted(*faults)
    guard = GuardedStore(store, TIMEOUT_S)
    try:
        yield store, guard
    finally:
        await guard.close()
        await guard.close()
    assert store.probes_out == 0
    assert len(asyncio.all_tasks()) == 1, "a task of the guard still runs"


async def test_guard_changes_nothing_of_a_store_without_faults() -> None:
    async with guarded() as (store, guard):
        memory = bytearray(100)
        guard.register(memoryview(memory))
        assert await one_put(guard, count=2) == [Put.STORED] * 2
        assert await one_put(guard) == [Put.EXISTED]
        assert await one_get(guard, memory) == [Got.HIT]
        assert memory == BODY
        assert await guard.contains(KEYS[:3]) == [True, True, False]
        assert await guard.list_objects() == await store.list_objects()
        await guard.remove(KEYS[:1])
        assert await guard.contains(KEYS[:2]) == [False, True]
        assert guard.stats() == store.stats()


@pytest.mark.parametrize("blocks_s", [0.0, 4.3, 30.0])
async def test_guard_fails_calls_immediately_while_open(blocks_s: float) -> None:
    async with guarded(Fault(0, 1000, blocks_s)) as (store, guard):
        memory = bytearray(100)
        await one_get(guard, memory)
        assert guard.stats().is_down
        reached = store.calls.copy()
        for _ in range(100):
            started = now()
            assert await one_put(guard, count=3) == [Put.UNREACHABLE, Put.SKIPPED, Put.SKIPPED]
            assert await guard.put([]) == []
            assert await one_get(guard, memory) == [Got.UNREACHABLE]
            assert await guard.contains(KEYS[:2]) == [False, False]
            await guard.remove(KEYS)
            with pytest.raises(StoreError, match="try again"):
                await guard.list_objects()
            assert now() == started
            await asyncio.sleep(0.5)
        assert store.calls == reached
        assert store.probes_out_max == 1
        stats = guard.stats()
        assert (stats.trips, stats.is_down) == (1, True)
        assert stats.put == {Put.UNREACHABLE: 100, Put.SKIPPED: 200}
        assert stats.got == {Got.UNREACHABLE: 1 + 100}


@pytest.mark.parametrize("call", [one_put, one_get])
@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("blocks_s", [0.0, 30.0])
async def test_guard_stays_open_while_only_the_metadata_answers(
    call: Callable[..., Awaitable[object]], *, knows: bool, blocks_s: float
) -> None:
    """Probes get a stored object, because an answer about a missing one proves nothing."""
    async with guarded(Fault(1, 20, blocks_s, frozen=True)) as (store, guard):
        await (guard if knows else store).put([(key, memoryview(BODY)) for key in KEYS[:3]])
        await asyncio.sleep(1)
        memory = memoryview(bytearray(100))
        while now() < 20:
            await (one_get(guard, bytearray(100)) if call is one_get else one_put(guard, 3))
            await asyncio.sleep(0.5)
        assert guard.stats().trips == 1 or (call is one_put and not knows)
        await asyncio.sleep(2 * PROBE_S_MAX)
        assert await guard.get([(KEYS[0], memory)]) == [Got.HIT]


async def test_guard_answers_running_queries_when_another_call_opens_it() -> None:
    async with guarded(Fault(0, 1000, 30.0)) as (_, guard):
        put = asyncio.ensure_future(one_put(guard))
        await asyncio.sleep(TIMEOUT_S - 0.01)
        assert await took_s(guard.contains(KEYS)) == pytest.approx(0.01, abs=1e-3)
        assert await put == [Put.UNREACHABLE]
        assert now() == pytest.approx(30, abs=0.01)


async def test_guard_opens_at_the_deadline_and_keeps_the_memory_of_a_late_call() -> None:
    async with guarded(Fault(0, 30, 30.0)) as (_, guard):
        memory = bytearray(100)
        get = asyncio.ensure_future(one_get(guard, memory))
        await asyncio.sleep(guard.patience_s(100) - EPSILON_S)
        assert not guard.stats().is_down
        await asyncio.sleep(2 * EPSILON_S)
        assert guard.stats().is_down
        for _cancelled in range(2):
            get.cancel()
            await asyncio.sleep(1)
            assert not get.done()
        with suppress(asyncio.CancelledError):
            await get
        assert now() == pytest.approx(30, abs=0.01)
        memory[:] = BODY
        await asyncio.sleep(60)
        assert memory == BODY


async def test_guard_does_not_reset_waits_after_a_late_transfer() -> None:
    async with guarded(Fault(0, 1000, 1.0, slow=True)) as (store, guard):
        pauses_s: list[float] = []
        for number in range(6):
            put = asyncio.ensure_future(one_put(guard, number))
            tripped_s = now() + guard.patience_s(100)
            await asyncio.sleep(2 * PROBE_S_MAX)
            pauses_s.append(store.probed_at[-1] - tripped_s)
            assert await put == [Put.STORED]
        assert pauses_s == pytest.approx([0.75, 0.75, 1, 2, 4, PROBE_S_MAX], abs=0.01)


async def test_guard_stays_open_while_a_late_transfer_runs() -> None:
    """A Mooncake that offers the memory of a killed owner answers probes, and holds every other put."""
    async with guarded(Fault(0, 8.0, 8.0, slow=True)) as (store, guard):
        put = asyncio.ensure_future(one_put(guard))
        await asyncio.sleep(2 * TIMEOUT_S)
        while not put.done():
            assert guard.stats().is_down
            assert guard.patience_s(100) == 0
            assert not store.probed_at
            await asyncio.sleep(0.1)
        await asyncio.sleep(PROBE_S_MAX)
        assert not guard.stats().is_down


class FailingPuts(MemoryStore):
    """A store whose first put fails after 2 s, the second after 0.1 s, and later ones succeed."""

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        fails_after_s = {KEYS[1]: 2.0, KEYS[2]: 0.1}.get(objects[0][0])
        if fails_after_s is None:
            return await super().put(objects)
        await asyncio.sleep(fails_after_s)
        return [Put.UNREACHABLE]


async def test_guard_ignores_failures_from_before_the_last_trip() -> None:
    guard = GuardedStore(FailingPuts(1 << 20), TIMEOUT_S)
    puts = [asyncio.ensure_future(one_put(guard, number)) for number in (1, 2)]
    assert await puts[1] == [Put.UNREACHABLE]
    assert await puts[0] == [Put.UNREACHABLE]
    await asyncio.sleep(1)
    assert not guard.stats().is_down
    assert await one_put(guard, 3) == [Put.STORED]
    stats = guard.stats()
    assert (stats.trips, stats.put) == (1, {Put.UNREACHABLE: 2, Put.STORED: 1})
    assert not stats.gets, "probes are no calls"
    await guard.close()


@pytest.mark.parametrize("seed", range(20))
def test_guard_does_not_open_when_the_event_loop_was_busy(seed: int) -> None:
    async def main() -> None:
        guard = GuardedStore(Scripted(), TIMEOUT_S)
        loop = asyncio.get_running_loop()
        put = asyncio.ensure_future(one_put(guard))
        await asyncio.sleep(0.0005)
        cast("Any", loop)._now += 2.0  # the event loop was blocked
        assert await put == [Put.STORED]
        assert guard.stats().trips == 0
        await guard.close()

    simulate(seed, main())


async def test_guard_close_waits_for_running_calls_and_stops_probes() -> None:
    async with guarded(Fault(0, 1000, 4.0)) as (store, guard):
        memory = bytearray(100)
        get = asyncio.ensure_future(one_get(guard, memory))
        await asyncio.sleep(0.1)
        asked = asyncio.ensure_future(guard.contains(KEYS))
        await asyncio.sleep(0.01)
        close = asyncio.ensure_future(guard.close())
        await asyncio.wait({get, asked, close})
        probes = len(store.probed_at)
        await asyncio.sleep(10)
        assert len(store.probed_at) == probes


FAULTS = st.lists(st.tuples(st.floats(0.01, 20), st.floats(0.01, 40), st.floats(0, 40)), max_size=4)
REQUESTS = st.lists(
    st.tuples(st.floats(0, 5), st.sampled_from(["put", "get", "contains", "remove"]), st.integers(0, 9)),
    max_size=30,
)


@PROPERTY
@given(FAULTS, REQUESTS, st.integers(0, 1000))
def test_guard_bounds_waits_under_any_faults(
    outages: list[tuple[float, float, float]], requests: list[tuple[float, str, int]], seed: int
) -> None:
    faults: list[Fault] = []
    start = 0.0
    for gap, length, blocks_s in outages:
        faults.append(Fault(start + gap, start + gap + length, blocks_s))
        start = faults[-1].end

    async def request(guard: GuardedStore, kind: str, number: int) -> None:
        """Send a request, and reuse its memory as soon as the call has ended."""
        memory = bytearray(BODY)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "put": lambda: guard.put([(KEYS[number], memoryview(memory))]),
            "get": lambda: one_get(guard, memory, number),
            "contains": lambda: guard.contains([KEYS[number]]),
            "remove": lambda: guard.remove([KEYS[number]]),
        }
        patience_s = guard.patience_s(100)
        was_down = guard.stats().is_down
        call = asyncio.ensure_future(calls[kind]())
        elapsed_s = await took_s(call)
        assert not was_down or elapsed_s == 0
        assert kind in {"put", "get"} or elapsed_s <= patience_s + EPSILON_S
        assert elapsed_s <= patience_s + EPSILON_S or guard.stats().trips
        outcome = call.result()
        if outcome == [Got.HIT]:
            assert memory == BODY
        memory[:] = b"\x11" * 100
        await asyncio.sleep(50)
        assert memory == b"\x11" * 100, "the transfer was still writing"

    async def main() -> None:
        store = Scripted(*faults)
        guard = GuardedStore(store, TIMEOUT_S)
        async with asyncio.TaskGroup() as group:
            for pause_s, kind, number in requests:
                await asyncio.sleep(pause_s)
                group.create_task(request(guard, kind, number))
        healed = max([fault.end for fault in faults], default=0.0)
        await asyncio.sleep(max(0.0, healed - now()) + 2 * PROBE_S_MAX + 0.1)
        assert not guard.stats().is_down
        assert store.probes_out_max <= 1
        await guard.close()

    simulate(seed, main())


async def test_guard_adapts_to_a_permanently_slow_link() -> None:
    """The first transfers are late; then the rate has adapted."""
    size = 1 << 24

    class Slow(MemoryStore):
        async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
            await asyncio.sleep(sum(body.nbytes for _, body in objects) / 1e7)
            return await super().put(objects)

    guard = GuardedStore(Slow(1 << 30), TIMEOUT_S)
    body = memoryview(bytes(size))
    for key in KEYS[:8]:
        await guard.put([(key, body)])
        await asyncio.sleep(10)
    assert 0 < guard.stats().trips < 4
    assert not guard.stats().is_down
    await guard.close()


class OneLinkStore(MemoryStore):
    """A store whose transfers share a link of `bytes_per_s`, one after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__(1 << 30)
        self._bytes_per_s = bytes_per_s
        self._link = asyncio.Lock()

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        async with self._link:
            await asyncio.sleep(sum(body.nbytes for _, body in objects) / self._bytes_per_s)
        return [Put.STORED] * len(objects)


@pytest.mark.parametrize(("bytes_per_s", "num_bytes", "count"), [(1e8, 24 << 20, 10), (1e9, 2 << 20, 120)])
async def test_guard_does_not_open_when_calls_queue_behind_others(
    bytes_per_s: float, num_bytes: int, count: int
) -> None:
    guard = GuardedStore(OneLinkStore(bytes_per_s), TIMEOUT_S)
    body = memoryview(bytes(num_bytes))
    puts = [guard.put([(KEYS[number % len(KEYS)], body)]) for number in range(count)]
    assert await asyncio.gather(*puts) == [[Put.STORED]] * count
    assert guard.stats().trips == 0
    patience_s = TIMEOUT_S + 3 * num_bytes / bytes_per_s
    assert guard.patience_s(num_bytes) == pytest.approx(patience_s, rel=0.2)
    await guard.close()


def test_rate_ignores_instant_transfers_and_hardly_counts_small_ones() -> None:
    rate = Rate()
    rate.add(0, 5.0)
    rate.add(1 << 20, 0.0)
    assert rate.bytes_per_s == RATE_AT_START
    for _ in range(100):
        rate.add(1000, 0.001)
    assert rate.bytes_per_s > RATE_AT_START * 0.95
