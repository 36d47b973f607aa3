"""A deadline and a circuit breaker, so that a store that is down or slow does not delay every call.

    closed     Every call goes to the store. A late or UNREACHABLE outcome opens the breaker.
    open       Every call fails immediately. One probe at a time asks the store again.

No probe begins while a transfer from before still runs: a store that does not end transfers would not end the
next ones either, although it answers probes. A late call that uses memory of the caller is not abandoned: it
returns when the store has ended it. A caller that cannot wait for that waits `patience_s`, which is 0 while
the breaker is open, and does not reuse the memory until the call returns.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.periodic import every
from tidemill.kvstore.stores.page_store import (
    Got,
    Objects,
    PageStore,
    Put,
    StoreCounters,
    StoredObject,
    StoreStats,
)

_Result = TypeVar("_Result")

Sizes = Sequence[tuple[int, ObjectKey]]
Transfer = Callable[[Objects], Coroutine[Any, Any, list[_Result]]]

TIMEOUT_S = 0.25
PROBE_S_MIN = 0.25
PROBE_S_MAX = 5.0

RATE_AT_START = 100e6  # bytes per second
RATE_BYTES = 8 << 20  # a transfer of this size has a weight of one half in the rate
LATE_FACTOR = 3  # a transfer is late after this many times the duration at the measured rate

BUSY_S = 0.05
"""An event loop that is later than this for a deadline was busy with something else."""

PROBE = "probe of the store"
ABSENT = ObjectKey(Kind.PAGE, PageKey(bytes(DIGEST_BYTES)))
"""A key that no tokens have: every working store answers a probe for it with MISS."""


@dataclass(slots=True)
class Breaker:
    """The state of the circuit breaker, and the waits between probes. Pure."""

    trips: int = 0
    is_open: bool = False
    _wait_s: float = PROBE_S_MIN

    def fail(self) -> bool:
        """Record the failure of a call; return whether it opens the breaker."""
        if self.is_open:
            return False
        self.is_open = True
        self.trips += 1
        return True

    def next_wait_s(self) -> float:
        """Return the wait before the next probe; it doubles each time."""
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, PROBE_S_MAX)
        return wait_s

    def close(self) -> None:
        """Close the breaker after a probe in time. If the next transfer fails, the waits keep growing."""
        self.is_open = False

    def reset_wait(self) -> None:
        """Reset the waits after a transfer, unless it is late: those end before the breaker closes."""
        if not self.is_open:
            self._wait_s = PROBE_S_MIN


@dataclass(slots=True)
class Rate:
    """The moving mean of the bytes per second of transfers, weighted by their size. Pure."""

    bytes_per_s: float = RATE_AT_START

    def add(self, num_bytes: int, took_s: float) -> None:
        if num_bytes and took_s > 0:
            weight = num_bytes / (num_bytes + RATE_BYTES)
            self.bytes_per_s += weight * (num_bytes / took_s - self.bytes_per_s)

    def patience_s(self, num_bytes: int) -> float:
        return LATE_FACTOR * num_bytes / self.bytes_per_s


class GuardedStore:
    """A page store that fails calls immediately while the store behind it is down or late."""

    def __init__(self, store: PageStore, timeout_s: float = TIMEOUT_S) -> None:
        """Limit calls that move no bytes to `timeout_s`."""
        self._store = store
        self._timeout_s = timeout_s
        self._breaker = Breaker()
        self._probed: tuple[int, ObjectKey] = 1, ABSENT  # size and key of the object that probes get
        self._rate = Rate()
        self._waiters: set[asyncio.Future[None]] = set()  # callers that stop waiting when the breaker opens
        self._calls: set[asyncio.Future[Any]] = set()  # calls to the store, perhaps without a waiting caller
        self._probing: asyncio.Task[None] | None = None
        self._closed = False
        self._moving_bytes = 0  # of running calls
        self._transfers: set[asyncio.Future[None]] = set()  # that run
        self._last_moved_s = -math.inf
        self._counters = StoreCounters()  # of calls; the store behind it counts probes, too

    async def put(self, objects: Objects) -> list[Put]:
        if self._breaker.is_open:
            outcomes = [Put.UNREACHABLE, *[Put.SKIPPED] * (len(objects) - 1)][: len(objects)]
        else:
            outcomes = await self._move(self._store.put, objects, moved=Put.STORED, lost=Put.UNREACHABLE)
        self._counters.add_put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Objects) -> list[Got]:
        if self._breaker.is_open:
            outcomes = [Got.UNREACHABLE] * len(wanted)
        else:
            outcomes = await self._move(self._store.get, wanted, moved=Got.HIT, lost=Got.UNREACHABLE)
        self._counters.add_get(wanted, outcomes)
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self._ask(lambda: self._store.contains(keys), [False] * len(keys))

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        await self._ask(lambda: self._store.remove(keys), None)

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        await self._ask(lambda: self._store.demote(keys), None)

    async def list_objects(self) -> list[StoredObject]:
        if self._breaker.is_open:
            raise StoreError("the store did not answer a moment ago: try again in a few seconds")
        return await self._store.list_objects()

    def register(self, memory: memoryview) -> None:
        self._store.register(memory)

    def patience_s(self, num_bytes: int) -> float:
        return 0.0 if self._breaker.is_open else self._due_s(num_bytes)

    def stats(self) -> StoreStats:
        counted = self._counters.counted(self._store.stats())
        return replace(counted, trips=self._breaker.trips, is_down=self._breaker.is_open)

    async def close(self) -> None:
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        if self._calls:
            await asyncio.wait(self._calls)
        await self._store.close()

    async def _move(
        self, call: Transfer[_Result], objects: Objects, *, moved: _Result, lost: _Result
    ) -> list[_Result]:
        sizes = [(view.nbytes, key) for key, view in objects]
        probe_choices = sizes if moved is Got.HIT else []
        with self._deadline(sum(num_bytes for num_bytes, _ in sizes), probe_choices) as fail:
            loop = asyncio.get_running_loop()
            started = loop.time()
            self._transfers.add(ended := loop.create_future())
            try:
                outcomes = await call(objects)
            finally:
                self._transfers.discard(ended)
                ended.set_result(None)
            if lost in outcomes:
                fail()
        done = [size for size, outcome in zip(sizes, outcomes, strict=True) if outcome is moved]
        self._record_moved(done, started)
        return outcomes

    async def _ask(self, call: Callable[[], Coroutine[Any, Any, _Result]], otherwise: _Result) -> _Result:
        """Return the result of a call that uses no memory of the caller. Return `otherwise` as soon as the
        breaker is open; the call itself may end later."""
        if self._breaker.is_open:
            return otherwise
        called = asyncio.ensure_future(call())
        self._calls.add(called)
        called.add_done_callback(self._calls.discard)
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(opened)
        try:
            with self._deadline(0):
                await asyncio.wait({called, opened}, return_when=asyncio.FIRST_COMPLETED)
            return called.result() if called.done() else otherwise
        finally:
            self._waiters.discard(opened)
            called.cancel()

    @contextmanager
    def _deadline(self, num_bytes: int, probe_choices: Sizes = ()) -> Generator[Callable[[], None]]:
        """Open the breaker when the body is late, or calls the yielded function. Probes then get the smallest
        object of `probe_choices`."""
        fail = partial(self._fail, probe_choices)
        self._moving_bytes += num_bytes
        alarm = Alarm(self._due_s(self._moving_bytes), fail)  # concurrent calls share the link
        try:
            yield fail
        finally:
            self._moving_bytes -= num_bytes
            alarm.cancel()

    def _fail(self, probe_choices: Sizes) -> None:
        if not self._breaker.fail():
            return
        self._probed = min(probe_choices, key=itemgetter(0), default=self._probed)
        for opened in self._waiters:
            if not opened.done():
                opened.set_result(None)
        if not self._closed:
            self._probing = asyncio.create_task(self._probe(self._transfers.copy()), name=PROBE)

    def _record_moved(self, sizes: Sizes, started: float) -> None:
        """Record a transfer, in time or late: on a permanently slow link the rate must adapt.

        Its duration counts from the end of the previous one: until then others may have used the
        link.
        """
        now_s = asyncio.get_running_loop().time()
        if num_bytes := sum(size for size, _ in sizes):
            self._probed = min(sizes, key=itemgetter(0))
            self._breaker.reset_wait()
            self._rate.add(num_bytes, now_s - max(started, self._last_moved_s))
            self._last_moved_s = now_s

    async def _probe(self, held: set[asyncio.Future[None]]) -> None:
        """Get an object until the store answers in time, and then close the breaker. Wait for the `held`
        transfers before.

        It gets bytes of a stored object because metadata may be answered without the memory owner.
        A probe without an answer keeps the breaker open, and no other probe starts.
        """
        loop = asyncio.get_running_loop()

        async def probe() -> bool:
            await asyncio.sleep(self._breaker.next_wait_s())
            if held:
                await asyncio.wait(held)
            started, (num_bytes, key) = loop.time(), self._probed
            [got] = await self._store.get([(key, memoryview(bytearray(num_bytes)))])
            if got is not Got.UNREACHABLE and loop.time() - started <= self._due_s(num_bytes):
                self._breaker.close()
            return not self._breaker.is_open

        await every(0, probe, "probe of the store")

    def _due_s(self, num_bytes: int) -> float:
        """Return the time after which a transfer is late, in seconds."""
        return self._timeout_s + self._rate.patience_s(num_bytes)


class Alarm:
    """Calls `ring` after `after_s` seconds. If the event loop was busy then, it waits once more for as long
    as the loop was late: the awaited result may have arrived unnoticed."""

    def __init__(self, after_s: float, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._set(after_s)

    def cancel(self) -> None:
        self._timer.cancel()

    def _set(self, after_s: float) -> None:
        self._due = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._due, self._expire)

    def _expire(self) -> None:
        behind_s = self._loop.time() - self._due
        if behind_s > BUSY_S:
            self._set(behind_s)
        else:
            self._ring()
