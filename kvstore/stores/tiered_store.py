"""A chain of page stores, the nearest first: a get asks the next tier for objects that one lacks.

A get returns as soon as it has the objects. In the background, hits of one tier are put into the
others from a copy, because the memory belongs to the caller again. A copy costs a fraction of a
put.
"""

import asyncio
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain

import numpy as np

from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.page_store import (
    Got,
    Objects,
    PageStore,
    Put,
    StoreCounters,
    StoredObject,
    StoreStats,
    finish,
    full_after,
)

COPY_BYTES_MAX = 128 << 20
"""The memory for copies of hits. While it is in use, further hits are not copied to other tiers."""

INLINE_BYTES_MAX = 1 << 20
"""More bytes are copied on a thread, to keep the event loop free."""

SEEN_S = 300.0
SEEN_MAX = 1 << 16
"""A farther tier gets a hit again after `SEEN_S`, or after `SEEN_MAX` other objects.

So an object that is read only from nearer tiers counts as used in the farther one, and returns to a
store that was restarted empty.
"""


class Write(Enum):
    """The objects that are written to a tier."""

    ALL = "all"  # every put, and hits of gets in other tiers
    HITS = "hits"  # only hits in other tiers
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Tier:
    store: PageStore
    write: Write = Write.ALL


@dataclass(frozen=True, slots=True)
class _Hit:
    key: ObjectKey
    view: memoryview
    tier: int


@dataclass(frozen=True, slots=True)
class _Offer:
    key: ObjectKey
    body: memoryview
    tiers: set[int]


class TieredStore:
    """Owns its tiers. Each keeps the order of every put: a checkpoint is stored after its pages.

    An object exists if any tier has it; the outcome of its put is that of the nearest such tier. A
    get returns HIT, or else the first outcome of a tier that is not MISS. In the stats, objects,
    bytes, evictions and trips are sums; one tier that is down makes all down.
    """

    def __init__(self, tiers: Sequence[Tier], copy_bytes_max: int = COPY_BYTES_MAX) -> None:
        self._tiers = tiers
        self._seen = [_SeenObjects() for _ in tiers]
        self._memory = np.empty(copy_bytes_max, np.uint8).data  # for copies; empty while in use
        self._offering: asyncio.Task[None] | None = None
        self._counters = StoreCounters()

    async def put(self, objects: Objects) -> list[Put]:
        written = [index for index, tier in enumerate(self._tiers) if tier.write is Write.ALL]
        by_tier = await finish(asyncio.gather(*(self._put(index, objects) for index in written)))
        by_object = zip(*by_tier or [full_after([], objects)], strict=True)
        outcomes = [_merge(of_tiers) for of_tiers in by_object]
        self._counters.add_put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Objects) -> list[Got]:
        outcomes = [Got.MISS] * len(wanted)
        hits: dict[int, _Hit] = {}
        for tier, store in enumerate(tier.store for tier in self._tiers):
            missing = [index for index in range(len(wanted)) if index not in hits]
            if not missing:
                break
            found = await store.get([wanted[index] for index in missing])
            for index, got in zip(missing, found, strict=True):
                if got is Got.HIT:
                    hits[index] = _Hit(*wanted[index], tier)
                if got is Got.HIT or outcomes[index] is Got.MISS:
                    outcomes[index] = got
        self._counters.add_get(wanted, outcomes)
        for hit in hits.values():
            self._seen[hit.tier].add([hit.key])
        await self._offer([hits[index] for index in sorted(hits)])
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        exist = [False] * len(keys)
        for tier in self._tiers:
            missing = [index for index, exists in enumerate(exist) if not exists]
            if not missing:
                break
            found = await tier.store.contains([keys[index] for index in missing])
            for index, exists in zip(missing, found, strict=True):
                exist[index] = exists
        return exist

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        for seen in self._seen:
            seen.remove(keys)
        await asyncio.gather(*(tier.store.remove(keys) for tier in self._tiers))

    async def demote(self, keys: Sequence[ObjectKey]) -> None:
        await asyncio.gather(*(tier.store.demote(keys) for tier in self._tiers))

    async def list_objects(self) -> list[StoredObject]:
        """List all objects; one in several tiers is listed as in the nearest."""
        found: dict[ObjectKey, StoredObject] = {}
        for tier in self._tiers:
            for stored in await tier.store.list_objects():
                found.setdefault(stored.key, stored)
        return list(found.values())

    def register(self, memory: memoryview) -> None:
        for tier in self._tiers:
            tier.store.register(memory)

    def patience_s(self, num_bytes: int) -> float:
        limits_s = [tier.store.patience_s(num_bytes) for tier in self._tiers]
        return sum(limit_s for limit_s in limits_s if limit_s < math.inf) or max(limits_s)

    def stats(self) -> StoreStats:
        stats = [tier.store.stats() for tier in self._tiers]
        whole = self._counters.stats(
            objects=sum(tier.objects for tier in stats),
            num_bytes=sum(tier.bytes for tier in stats),
            capacity_bytes=sum(tier.capacity_bytes for tier in stats),
        )
        return replace(
            whole,
            free_bytes=min(
                (
                    tier.free_bytes
                    for tier, opened in zip(stats, self._tiers, strict=True)
                    if opened.write is Write.ALL
                ),
                default=0,
            ),
            evicted=sum(tier.evicted for tier in stats),
            trips=sum(tier.trips for tier in stats),
            is_down=any(tier.is_down for tier in stats),
        )

    async def close(self) -> None:
        if self._offering is not None:
            await self._offering
        await asyncio.gather(*(tier.store.close() for tier in self._tiers))

    async def _put(self, index: int, objects: Objects) -> list[Put]:
        outcomes = await self._tiers[index].store.put(objects)
        self._seen[index].add(
            key for (key, _), outcome in zip(objects, outcomes, strict=True) if outcome.is_there
        )
        return outcomes

    async def _offer(self, hits: Sequence[_Hit]) -> None:
        """Put copies of hits into other tiers that are up and lack them, in the background.

        Copying ends with the first hit that does not fit into the memory for copies: a later one
        may be a checkpoint, which no tier stores before its pages.
        """
        if not self._memory:
            return
        written = {
            index
            for index, tier in enumerate(self._tiers)
            if tier.write is not Write.NONE and not tier.store.stats().is_down
        }
        without = [{index for index in written if self._lacks(index, hit)} for hit in hits]
        offers = [(hit, tiers) for hit, tiers in zip(hits, without, strict=True) if tiers]
        ends = list(accumulate(hit.view.nbytes for hit, _ in offers))
        del offers[bisect_right(ends, len(self._memory)) :]
        if not offers:
            return
        memory, self._memory = self._memory, memoryview(b"")
        copies = [
            _Offer(hit.key, memory[end - hit.view.nbytes : end], tiers)
            for (hit, tiers), end in zip(offers, ends, strict=False)
        ]
        try:
            await _copy([(copy.body, hit.view) for copy, (hit, _) in zip(copies, offers, strict=True)])
        except asyncio.CancelledError:
            self._memory = memory
            raise
        self._offering = asyncio.ensure_future(self._spread(copies, memory))

    async def _spread(self, copies: Sequence[_Offer], memory: memoryview) -> None:
        try:
            for index in range(len(self._tiers)):
                if objects := [(copy.key, copy.body) for copy in copies if index in copy.tiers]:
                    await self._put(index, objects)
        finally:
            self._memory = memory

    def _lacks(self, index: int, hit: _Hit) -> bool:
        """Return whether a tier lacks a hit: nearer tiers do, farther ones were not asked."""
        return index < hit.tier or (index > hit.tier and not self._seen[index].has(hit.key))


class _SeenObjects:
    """The objects that were recently seen in a tier."""

    def __init__(self) -> None:
        self._seen_s: OrderedDict[ObjectKey, float] = OrderedDict()

    def has(self, key: ObjectKey) -> bool:
        return asyncio.get_running_loop().time() - self._seen_s.get(key, -math.inf) < SEEN_S

    def add(self, keys: Iterable[ObjectKey]) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._seen_s[key] = now_s
            self._seen_s.move_to_end(key)
        while len(self._seen_s) > SEEN_MAX:
            self._seen_s.popitem(last=False)

    def remove(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._seen_s.pop(key, None)


def _merge(outcomes: Sequence[Put]) -> Put:
    """Return the outcome of the nearest tier that has the object, or of the first that tried."""
    there = (outcome for outcome in outcomes if outcome.is_there)
    tried = (outcome for outcome in outcomes if outcome is not Put.SKIPPED)
    return next(chain(there, tried), Put.SKIPPED)


async def _copy(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Copy the second view of each pair into the first; numpy releases the GIL meanwhile."""

    def copy() -> None:
        for target, source in pairs:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    if sum(source.nbytes for _, source in pairs) <= INLINE_BYTES_MAX:
        copy()
    else:
        await finish(asyncio.ensure_future(asyncio.to_thread(copy)))
