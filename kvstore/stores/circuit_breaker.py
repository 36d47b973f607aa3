"""Keeps a store that is down or slow from costing time on every call: a deadline and a circuit breaker.

    closed     every call goes to the store; a late one, or an answer UNREACHABLE, opens the breaker
    open       every call is answered here, at once; one probe at a time asks the store again

A late call is not given up where it uses the caller's memory: it ends when the store has ended it. Who cannot
wait so long waits `patience_s` and leaves that memory alone until then.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, TypeVar

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import DIGEST_BYTES, Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.page_store import Got, Held, PageStore, Put, StoreStats

_Result = TypeVar("_Result")

Objects = Sequence[tuple[ObjectKey, memoryview]]
Sizes = Sequence[tuple[int, ObjectKey]]
Transfer = Callable[[Objects], Coroutine[Any, Any, list[_Result]]]

TIMEOUT_S = 0.25
PROBE_S_MIN = 0.25
PROBE_S_MAX = 5.0

RATE_AT_START = 100e6  # bytes per second
RATE_BYTES = 8 << 20  # a transfer of so many counts for half of the rate from then on
PATIENCE = 3  # a transfer is late when it takes this many times as long as the measured rate says

BUSY_S = 0.05
"""An event loop that is so late for a deadline was busy with something else."""

PROBE = "probe of the store"
ABSENT = ObjectKey(Kind.PAGE, PageKey(bytes(DIGEST_BYTES)))
"""No chain of tokens ends here: whether it is missing can be asked of every store."""


@dataclass(slots=True)
class Breaker:
    """When the store is left alone, and when it is asked again. Pure."""

    trips: int = 0
    is_open: bool = False
    _wait_s: float = PROBE_S_MIN

    def fail(self, trips: int) -> bool:
        """A call failed that began after so many trips: whether it opens the breaker. What began before the
        last trip is no news."""
        if self.is_open or trips != self.trips:
            return False
        self.is_open = True
        self.trips += 1
        return True

    def next_wait_s(self) -> float:
        """Until the next probe; twice as long each time."""
        wait_s = self._wait_s
        self._wait_s = min(2 * wait_s, PROBE_S_MAX)
        return wait_s

    def answered(self) -> None:
        """A probe was answered in time. It moved nothing: if the next transfer fails, the waits go on
        growing."""
        self.is_open = False

    def moved(self) -> None:
        """Bytes were moved in time."""
        if not self.is_open:
            self._wait_s = PROBE_S_MIN


@dataclass(slots=True)
class Rate:
    """Bytes per second of transfers: a moving mean in which a large transfer counts for more. Pure."""

    bytes_per_s: float = RATE_AT_START

    def add(self, num_bytes: int, took_s: float) -> None:
        if num_bytes and took_s > 0:
            weight = num_bytes / (num_bytes + RATE_BYTES)
            self.bytes_per_s += weight * (num_bytes / took_s - self.bytes_per_s)

    def patience_s(self, num_bytes: int) -> float:
        return PATIENCE * num_bytes / self.bytes_per_s


class GuardedStore:
    """A page store that answers UNREACHABLE at once while the one behind it is down or late."""

    def __init__(self, store: PageStore, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long a call may take that moves nothing."""
        self._store = store
        self._timeout_s = timeout_s
        self._breaker = Breaker()
        self._known: tuple[int, ObjectKey] = 1, ABSENT
        self._rate = Rate()
        self._asking: set[asyncio.Future[None]] = set()  # callers who are let go when the breaker opens
        self._asked: set[asyncio.Future[Any]] = set()  # calls to the store that nobody may be waiting for
        self._probing: asyncio.Task[None] | None = None
        self._closed = False
        self._moving_bytes = 0  # by calls that are under way
        self._moved_last_s = -math.inf
        self._refused_puts = Counter[Put]()
        self._refused_gets = Counter[Got]()

    async def put(self, objects: Objects) -> list[Put]:
        if self._breaker.is_open:
            outcomes = [Put.UNREACHABLE, *[Put.SKIPPED] * (len(objects) - 1)][: len(objects)]
            self._refused_puts.update(outcomes)
            return outcomes
        return await self._move(self._store.put, objects, moved=Put.STORED, lost=Put.UNREACHABLE)

    async def get(self, wanted: Objects) -> list[Got]:
        if self._breaker.is_open:
            outcomes = [Got.UNREACHABLE] * len(wanted)
            self._refused_gets.update(outcomes)
            return outcomes
        return await self._move(self._store.get, wanted, moved=Got.HIT, lost=Got.UNREACHABLE)

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return await self._ask(lambda: self._store.contains(keys), [False] * len(keys))

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        await self._ask(lambda: self._store.remove(keys), None)

    async def held(self) -> list[Held]:
        if self._breaker.is_open:
            raise StoreError("the store did not answer a moment ago and is left alone: ask again in seconds")
        return await self._store.held()

    def register(self, memory: memoryview) -> None:
        self._store.register(memory)

    def patience_s(self, num_bytes: int) -> float:
        return self._timeout_s + self._rate.patience_s(num_bytes)

    def stats(self) -> StoreStats:
        stats = self._store.stats()
        return replace(
            stats,
            put=Counter(stats.put) + self._refused_puts,
            got=Counter(stats.got) + self._refused_gets,
            trips=self._breaker.trips,
            is_down=self._breaker.is_open,
        )

    async def close(self) -> None:
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        if self._asked:
            await asyncio.wait(self._asked)
        await self._store.close()

    async def _move(
        self, call: Transfer[_Result], objects: Objects, *, moved: _Result, lost: _Result
    ) -> list[_Result]:
        sizes = [(view.nbytes, key) for key, view in objects]
        doubtful = sizes if moved is Got.HIT else []
        with self._deadline(sum(num_bytes for num_bytes, _ in sizes), doubtful) as fail:
            started = asyncio.get_running_loop().time()
            outcomes = await call(objects)
            if lost in outcomes:
                fail()
        done = [size for size, outcome in zip(sizes, outcomes, strict=True) if outcome is moved]
        self._moved(done, started)
        return outcomes

    async def _ask(self, call: Callable[[], Coroutine[Any, Any, _Result]], otherwise: _Result) -> _Result:
        """The answer of a call that uses no memory of the caller; `otherwise` as soon as the breaker is
        open. The call itself may end later."""
        if self._breaker.is_open:
            return otherwise
        asked = asyncio.ensure_future(call())
        self._asked.add(asked)
        asked.add_done_callback(self._asked.discard)
        let_go: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking.add(let_go)
        try:
            with self._deadline(0):
                await asyncio.wait({asked, let_go}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else otherwise
        finally:
            self._asking.discard(let_go)
            asked.cancel()

    @contextmanager
    def _deadline(self, num_bytes: int, doubtful: Sizes = ()) -> Generator[Callable[[], None]]:
        """Opens the breaker when the body takes longer than such a call may, or calls what it is given. One
        of the `doubtful` objects is asked for then."""
        trips = self._breaker.trips

        def fail() -> None:
            self._fail(trips, doubtful)

        self._moving_bytes += num_bytes
        alarm = Alarm(self.patience_s(self._moving_bytes), fail)  # they share the link
        try:
            yield fail
        finally:
            self._moving_bytes -= num_bytes
            alarm.cancel()

    def _fail(self, trips: int, doubtful: Sizes) -> None:
        if not self._breaker.fail(trips):
            return
        self._known = min(doubtful, key=itemgetter(0), default=self._known)
        for let_go in self._asking:
            if not let_go.done():
                let_go.set_result(None)
        if not self._closed:
            self._probing = asyncio.create_task(self._probe(), name=PROBE)

    def _moved(self, sizes: Sizes, started: float) -> None:
        """A late transfer tells the rate too: a link that is slow for good is not found down for ever. Its
        time begins with the end of the one before: until then others may have had the link."""
        now_s = asyncio.get_running_loop().time()
        if num_bytes := sum(size for size, _ in sizes):
            self._known = min(sizes, key=itemgetter(0))
            if now_s - started <= self.patience_s(num_bytes):
                self._breaker.moved()
            self._rate.add(num_bytes, now_s - max(started, self._moved_last_s))
            self._moved_last_s = now_s

    async def _probe(self) -> None:
        """Ask for a known object until an answer comes in time: what knows of the bytes may answer for what
        has them. An answer that does not come keeps the breaker open, and is the only one out."""
        loop = asyncio.get_running_loop()
        while self._breaker.is_open:
            await asyncio.sleep(self._breaker.next_wait_s())
            started, (num_bytes, key) = loop.time(), self._known
            [got] = await self._store.get([(key, memoryview(bytearray(num_bytes)))])
            if got is not Got.UNREACHABLE and loop.time() - started <= self.patience_s(num_bytes):
                self._breaker.answered()


class Alarm:
    """Calls `ring` when `after_s` have passed. A loop that was busy meanwhile is given as much again as it
    came late: what was waited for may have been there, with nobody to notice."""

    def __init__(self, after_s: float, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._set(after_s)

    def cancel(self) -> None:
        self._timer.cancel()

    def _set(self, after_s: float) -> None:
        self._due = self._loop.time() + after_s
        self._timer = self._loop.call_at(self._due, self._rings)

    def _rings(self) -> None:
        behind_s = self._loop.time() - self._due
        if behind_s > BUSY_S:
            self._set(behind_s)
        else:
            self._ring()
