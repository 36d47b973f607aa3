"""The contract of page stores: what the engine may rely on, whatever is behind it."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import NamedTuple, Protocol, TypeVar

from tidemill.kvstore.keys import ObjectKey

_Result = TypeVar("_Result")


class Put(Enum):
    """What became of an object that was offered. Publishing is best effort."""

    STORED = "stored"  # and still there when the store was asked again
    EXISTED = "existed"  # an earlier writer's object is kept; its bytes may differ from these
    FULL = "full"
    UNCONFIRMED = "unconfirmed"  # taken, but not there afterwards: evicted, or a dead writer holds its key
    OWNER_DOWN = "owner_down"  # the process that lends the memory does not answer
    UNREACHABLE = "unreachable"  # down, broken or late, or left alone for having been so a moment ago
    SKIPPED = "skipped"  # an object before it is not there

    @property
    def is_there(self) -> bool:
        return self in {Put.STORED, Put.EXISTED}


class Got(Enum):
    """What became of an object that was wanted. The bytes of its view are defined for HIT alone.

    CORRUPT, TRUNCATED and OTHER_VERSION are deleted, so the next answer is MISS.
    """

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # its seal does not fit
    TRUNCATED = "truncated"  # it is not as long as its view
    OTHER_VERSION = "other_version"  # sealed by a version of Tidemill that lays bytes out differently
    EXPIRED = "expired"  # its lease ran out before the transfer ended
    OWNER_DOWN = "owner_down"
    UNREACHABLE = "unreachable"


DAMAGED = frozenset({Got.CORRUPT, Got.TRUNCATED, Got.OTHER_VERSION})


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds, as far as this user knows of all of them, and what this user did since it opened.

    put_bytes and get_bytes are the bodies of stored objects and of hits. `bytes` counts seals too. A store
    that cannot tell what it holds says 0.
    """

    objects: int
    bytes: int
    capacity_bytes: int
    put: Mapping[Put, int] = field(default_factory=Counter[Put])
    got: Mapping[Got, int] = field(default_factory=Counter[Got])
    evicted: int = 0
    put_bytes: int = 0
    get_bytes: int = 0
    trips: int = 0  # how often it was found down or late, and left alone: see guard.py
    is_down: bool = False  # at this moment

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


class Held(NamedTuple):
    """An object that a store holds, for operators. `used_s`: seconds since its last use, if it is known."""

    key: ObjectKey
    bytes: int  # with its seal
    used_s: float | None = None


class PageStore(Protocol):
    """Immutable objects by key. Losing one is legal at any time; returning other bytes than were put is not.

    - The first writer of a key wins; nobody ever sees a part of an object, or a mixture of two.
    - Every object carries a seal (see seal.py), checked by each get.
    - Results are in the order of the arguments. A full, failed or absent store is an outcome: no call raises
      for it.
    - The objects of one put are stored in order, and behind one that is not there all are SKIPPED, so that
      a checkpoint put behind its pages says that they were stored before it. A put that is cancelled may have
      stored any number of its first objects. No put evicts its own objects.
    - Views are contiguous bytes, and for get writable; nobody else writes them during a call. No call touches
      a view after it has returned: a cancelled call ends when its transfer has ended, and so does a late one.
    - Calls may overlap, in one event loop and in several processes that share the store.
    """

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        """Offer objects. Their views may be reused as soon as this returns."""
        ...

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        """Fill each view with the object of its key."""
        ...

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which are held. A hint: a later get may miss, and nothing is verified."""
        ...

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        """Forget them, as an eviction would. Best effort."""
        ...

    async def held(self) -> list[Held]:
        """Everything that it holds, for operators: slow. Raises StoreError when it cannot tell."""
        ...

    def register(self, memory: memoryview) -> None:
        """Views inside of `memory` will be used with this store for as long as it is open: it may move them
        without a copy. Not needed, and blocking."""
        ...

    def patience_s(self, num_bytes: int) -> float:
        """How long a call that moves so many bytes is worth waiting for; inf without a limit."""
        ...

    def stats(self) -> StoreStats: ...

    async def close(self) -> None:
        """Wait for the transfers under way and let go. No call may follow; closing again does nothing."""
        ...


async def finish(transfer: asyncio.Future[_Result]) -> _Result:
    """Result of `transfer`. Cancellation waits until it has ended, for it uses the caller's memory."""
    cancelled: asyncio.CancelledError | None = None
    while not transfer.done():
        try:
            await asyncio.wait({transfer})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return transfer.result()
    if not transfer.cancelled():
        transfer.exception()  # marks it as seen: the caller asked not to hear of it
    try:
        raise cancelled
    finally:
        cancelled = None  # its traceback holds this frame, and with it the caller's memory


def fitting(sizes: Sequence[int], capacity_bytes: int) -> int:
    """How many of the first `sizes` fit together into an empty store."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if total > capacity_bytes:
            return count
    return len(sizes)


def full_after(outcomes: Sequence[Put], objects: Sequence[object]) -> list[Put]:
    """Outcomes of the rest of `objects`, the first of which finds the store full."""
    left = len(objects) - len(outcomes)
    return [Put.FULL, *[Put.SKIPPED] * (left - 1)] if left else []


class StoreCounters:
    """What a store did since it opened. May be used from several threads."""

    def __init__(self) -> None:
        self._put = Counter[Put]()
        self._got = Counter[Got]()
        self._put_bytes = 0
        self._get_bytes = 0
        self._evicted = 0
        self._lock = Lock()

    def put(self, objects: Sequence[tuple[ObjectKey, memoryview]], outcomes: Sequence[Put]) -> None:
        moved = zip(objects, outcomes, strict=True)
        num_bytes = sum(body.nbytes for (_, body), outcome in moved if outcome is Put.STORED)
        with self._lock:
            self._put.update(outcomes)
            self._put_bytes += num_bytes

    def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]], outcomes: Sequence[Got]) -> None:
        moved = zip(wanted, outcomes, strict=True)
        num_bytes = sum(view.nbytes for (_, view), outcome in moved if outcome is Got.HIT)
        with self._lock:
            self._got.update(outcomes)
            self._get_bytes += num_bytes

    def evicted(self, count: int) -> None:
        with self._lock:
            self._evicted += count

    def stats(self, *, objects: int, num_bytes: int, capacity_bytes: int) -> StoreStats:
        with self._lock:
            return StoreStats(
                objects=objects,
                bytes=num_bytes,
                capacity_bytes=capacity_bytes,
                put=self._put.copy(),
                got=self._got.copy(),
                evicted=self._evicted,
                put_bytes=self._put_bytes,
                get_bytes=self._get_bytes,
            )
