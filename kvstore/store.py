"""The contract of page stores: what the engine may rely on, whatever is behind it."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock
from typing import Protocol, TypeVar

from tidemill.kvstore.keys import ObjectKey

_Result = TypeVar("_Result")


class Put(Enum):
    """What became of an object that was offered. Publishing is best effort."""

    STORED = "stored"
    EXISTED = "existed"  # an earlier writer's object is kept; its bytes may differ from these
    REFUSED = "refused"  # the store is full, failed, or refused an object before this one


class Got(Enum):
    """What became of an object that was wanted. The bytes of its view are defined for HIT alone."""

    HIT = "hit"
    MISS = "miss"
    CORRUPT = "corrupt"  # its seal did not fit; it is deleted, so the next answer is MISS


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """What a store holds, as far as this user knows of all of them, and what this user did since it opened.

    puts = stored + existed + refused, gets = hits + misses + corrupt; put_bytes and get_bytes are the bodies
    of stored objects and of hits. `bytes` counts seals too.
    """

    objects: int
    bytes: int
    capacity_bytes: int
    puts: int = 0
    gets: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    refused: int = 0
    evicted: int = 0
    put_bytes: int = 0
    get_bytes: int = 0


class PageStore(Protocol):
    """Immutable objects by key. Losing one is legal at any time; returning other bytes than were put is not.

    - The first writer of a key wins; nobody ever sees a part of an object, or a mixture of two.
    - Every object carries a seal (see seal.py), checked by each get.
    - Results are in the order of the arguments. A full, failed or absent store answers REFUSED and MISS: no
      call raises for it.
    - The objects of one put are stored in order, and after a REFUSED one all that follow are refused, so that
      a checkpoint put behind its pages says that they were stored before it. A put that is cancelled may have
      stored any number of its first objects. No put evicts its own objects.
    - Views are contiguous bytes, and for get writable; nobody else writes them during a call. No call touches
      a view after it has returned: a cancelled call ends when its transfer has ended.
    - Calls may overlap, in one event loop and in several processes that share the store.
    """

    async def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        """Offer objects. Their views may be reused as soon as this returns."""
        ...

    async def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        """Fill each view with the object of its key; one of another length is CORRUPT."""
        ...

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Which are held. A hint: a later get may miss, and nothing is verified."""
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


class Tally:
    """What a store did since it opened. May be used from several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def put(self, objects: Sequence[tuple[ObjectKey, memoryview]], outcomes: Sequence[Put]) -> None:
        stored = sum(
            body.nbytes for (_, body), outcome in zip(objects, outcomes, strict=True) if outcome is Put.STORED
        )
        self.add(puts=len(outcomes), refused=outcomes.count(Put.REFUSED), put_bytes=stored)

    def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]], outcomes: Sequence[Got]) -> None:
        self.add(
            gets=len(outcomes),
            hits=outcomes.count(Got.HIT),
            misses=outcomes.count(Got.MISS),
            corrupt=outcomes.count(Got.CORRUPT),
            get_bytes=sum(
                view.nbytes for (_, view), outcome in zip(wanted, outcomes, strict=True) if outcome is Got.HIT
            ),
        )

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def stats(self, *, objects: int, num_bytes: int, capacity_bytes: int) -> StoreStats:
        with self._lock:
            return StoreStats(objects=objects, bytes=num_bytes, capacity_bytes=capacity_bytes, **self._counts)
