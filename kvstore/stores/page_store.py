"""The contract of page stores: the guarantees that each of them gives to the engine."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

from tidemill.kvstore.keys import ObjectKey

_Result = TypeVar("_Result")

Objects = Sequence[tuple[ObjectKey, memoryview]]
"""Objects of a call: the key of each one, and the view of its body."""

READ_THREADS = 4  # of a store: one hashes slower than a network delivers
SHARE_BYTES_MIN = 4 << 20
"""Fewer bytes are read faster than another thread wakes up."""

LOOK_S = 0.05
"""The interval in which a caller that waits for a transfer looks whether the store is still up."""


class Put(Enum):
    """The outcome for an object of a put. Publishing is best effort."""

    STORED = "stored"  # and confirmed to exist afterwards
    EXISTED = "existed"  # an earlier writer's object is kept; its bytes may differ from these
    FULL = "full"
    UNCONFIRMED = "unconfirmed"  # accepted, but missing now: evicted, or a crashed writer blocks its key
    OWNER_DOWN = "owner_down"  # the memory owner does not answer
    UNREACHABLE = "unreachable"  # the store is down, broken or late, or its breaker is open
    SKIPPED = "skipped"  # an earlier object of the put is missing

    @property
    def is_there(self) -> bool:
        return self in {Put.STORED, Put.EXISTED}


class Got(Enum):
    """The outcome for an object of a get. The bytes of its view are defined only for HIT. The store deletes
    CORRUPT, TRUNCATED and OTHER_VERSION objects, so the next outcome is MISS."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # its seal does not match
    TRUNCATED = "truncated"  # its length differs from that of its view
    OTHER_VERSION = "other_version"  # sealed by a version of Tidemill with another layout
    EXPIRED = "expired"  # its lease ran out before the transfer ended
    OWNER_DOWN = "owner_down"
    UNREACHABLE = "unreachable"


DAMAGED = frozenset({Got.CORRUPT, Got.TRUNCATED, Got.OTHER_VERSION})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The content of a store, as far as this client knows it, and the counts of this client.

    objects, bytes          seals included; 0 if the store cannot count them
    free_bytes              what more fits without an eviction, as far as known; 0 if the store cannot count
    put_bytes, get_bytes    bodies of stored objects and of hits, without seals
    """

    objects: int
    bytes: int
    capacity_bytes: int
    free_bytes: int = 0
    put: Mapping[Put, int] = field(default_factory=Counter[Put])
    got: Mapping[Got, int] = field(default_factory=Counter[Got])
    evicted: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    trips: int = 0  # how often its circuit breaker opened: see circuit_breaker.py
    is_down: bool = False  # its breaker is open now

    @property
    def puts(self) -> int:
        return sum(self.put.values())

    @property
    def gets(self) -> int:
        return sum(self.got.values())

    @property
    def refused(self) -> int:
        return sum(count for outcome, count in self.put.items() if not outcome.is_there)

    @property
    def hits(self) -> int:
        return self.got.get(Got.HIT, 0)

    @property
    def misses(self) -> int:
        return self.got.get(Got.MISS, 0)

    @property
    def corrupt(self) -> int:
        return sum(self.got.get(outcome, 0) for outcome in DAMAGED)


class StoredObject(NamedTuple):
    """An object in a store, for operators. `used_s` is the seconds since its last use, if known."""

    key: ObjectKey
    bytes: int  # with its seal
    used_s: float | None = None


class PageStore(Protocol):
    """Immutable objects by key. A store may lose an object, but never returns other bytes.

    - The first writer of a key wins. No reader sees a part of an object, or a mixture of two.
    - Every object carries a seal (see seal.py), and each get verifies it.
    - Results are in the order of the arguments. A full, failed or absent store is an outcome: no
      call raises for it.
    - The objects of one put are stored in order, and all objects after a missing one are SKIPPED.
      So a checkpoint that is put after its pages is stored only if they were.
    - A cancelled put may have stored any number of its first objects. No put evicts its own
      objects.
    - Views are contiguous bytes, writable for get. Only the call writes them while it runs.
    - No call touches a view after it has returned. A cancelled or late call returns when its
      transfer ends.
    - Calls may overlap, in one event loop and in several processes that share the store.
    """

    async def put(self, objects: Objects) -> list[Put]:
        """Store objects. Their views may be reused as soon as this returns."""
        ...

    async def get(self, wanted: Objects) -> list[Got]:
        """Fill each view with the object of its key."""
        ...

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return which keys exist. This is a hint: nothing is verified, and a later get may miss."""
        ...

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Remove objects, like an eviction. Best effort."""
        ...

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        """Make objects the first to be evicted, until the next get or put of them. Best effort."""
        ...

    async def list_objects(self) -> list[StoredObject]:
        """List all objects, for operators: slow. Raises StoreError when that is impossible."""
        ...

    def register(self, memory: memoryview) -> None:
        """Announce memory of later views, so that the store can move them without a copy. Optional and
        blocking. It holds until the store is closed."""
        ...

    def patience_s(self, num_bytes: int) -> float:
        """Return how long to wait for a call that moves `num_bytes`; inf without a limit."""
        ...

    def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Wait for running transfers and close. No call may follow, except another close."""
        ...


async def wait_within(patience_s: Callable[[], float | None], moving: asyncio.Future[Any]) -> None:
    """Wait for `moving`, at most for the patience at the start (None or inf: no limit), or until the patience
    is 0, because the store is down."""
    limit_s, now_s = patience_s(), asyncio.get_running_loop().time
    until_s = math.inf if limit_s is None else now_s() + max(LOOK_S, limit_s)
    while not moving.done() and now_s() < until_s:
        await asyncio.wait({moving}, timeout=min(LOOK_S, until_s - now_s()))
        if patience_s() == 0:
            return


async def finish(transfer: asyncio.Future[_Result]) -> _Result:
    """Return the result of `transfer`. Cancellation waits for its end: it uses memory of the caller."""
    cancelled: asyncio.CancelledError | None = None
    while not transfer.done():
        try:
            await asyncio.wait({transfer})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return transfer.result()
    if not transfer.cancelled():
        transfer.exception()  # retrieved, so that asyncio does not log it
    try:
        raise cancelled
    finally:
        cancelled = None  # its traceback references this frame, and so the memory of the caller


async def run_on(pool: Executor, work: Callable[[], _Result]) -> _Result:
    """Return the result of `work` on a thread of `pool`. Cancellation waits until it has ended."""
    return await finish(asyncio.wrap_future(pool.submit(work)))


def shares_of(objects: Objects) -> list[slice]:
    """Return runs of `objects`, one for each thread that reading their bytes is worth."""
    total_bytes = sum(view.nbytes for _, view in objects)
    count = max(1, min(READ_THREADS, len(objects), total_bytes // SHARE_BYTES_MIN))
    cuts = [len(objects) * share // count for share in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(cuts)]


def count_fitting(sizes: Sequence[int], capacity_bytes: int) -> int:
    """Return how many of the first `sizes` fit together into an empty store."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > capacity_bytes:
            return count
    return len(sizes)


def full_after(outcomes: Sequence[Put], objects: Sequence[object]) -> list[Put]:
    """Return the outcomes of the rest of `objects` if the store is full."""
    left = len(objects) - len(outcomes)
    return [Put.FULL, *[Put.SKIPPED] * (left - 1)] if left else []


class StoreCounters:
    """The counts of a store since it was opened. Thread-safe."""

    def __init__(self) -> None:
        self._put = Counter[Put]()
        self._got = Counter[Got]()
        self._put_bytes = 0
        self._get_bytes = 0
        self._evicted = 0
        self._lock = Lock()

    def add_put(self, objects: Objects, outcomes: Sequence[Put]) -> None:
        moved = zip(objects, outcomes, strict=True)
        num_bytes = sum(body.nbytes for (_, body), outcome in moved if outcome is Put.STORED)
        with self._lock:
            self._put.update(outcomes)
            self._put_bytes += num_bytes

    def add_get(self, wanted: Objects, outcomes: Sequence[Got]) -> None:
        moved = zip(wanted, outcomes, strict=True)
        num_bytes = sum(view.nbytes for (_, view), outcome in moved if outcome is Got.HIT)
        with self._lock:
            self._got.update(outcomes)
            self._get_bytes += num_bytes

    def add_evicted(self, count: int) -> None:
        with self._lock:
            self._evicted += count

    def stats(self, *, objects: int, num_bytes: int, capacity_bytes: int) -> StoreStats:
        stats = StoreStats(
            objects=objects,
            bytes=num_bytes,
            capacity_bytes=capacity_bytes,
            free_bytes=max(0, capacity_bytes - num_bytes),
            evicted=self._evicted,
        )
        return self.counted(stats)

    def counted(self, stats: StoreStats) -> StoreStats:
        """Return `stats` with these counts of calls."""
        with self._lock:
            return replace(
                stats,
                put=self._put.copy(),
                got=self._got.copy(),
                put_bytes=self._put_bytes,
                get_bytes=self._get_bytes,
            )
