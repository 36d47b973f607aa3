"""A chain of page stores, the nearest first: what one lacks is asked of the next.

A get is answered as soon as it can be. What it found in one tier is offered to the others behind its back,
from a copy, for the memory is the caller's again: a copy costs a fraction of a put, and a put may be late.
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
    Held,
    PageStore,
    Put,
    StoreCounters,
    StoreStats,
    finish,
    full_after,
)

COPY_BYTES_MAX = 128 << 20
"""Hits that are on their way to other tiers; while there are any, further ones stay where they are."""

INLINE_BYTES_MAX = 1 << 20
"""More are copied on a thread: the event loop has other things to do."""

KNOWN_S = 300.0
KNOWN_MAX = 1 << 16
"""A farther tier is not offered an object again so soon, if it is among so many; later it is, so that what is
read from nearer ones alone counts as used there, and comes back to a store that was restarted empty."""

Objects = Sequence[tuple[ObjectKey, memoryview]]


class Write(Enum):
    """What a tier takes."""

    ALL = "all"  # every put, and what a get has found in another tier
    HITS = "hits"  # the latter alone: what was asked for again
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
    """Owns its tiers. Each keeps the order of every put: a checkpoint goes into a tier only behind its pages.

    An object is there when any tier has it; the outcome of its put is that of the nearest which has. A get
    answers HIT, or else the first tier that had something to say about its MISS. Of the counts, those of
    objects and bytes held and of trips are sums, and one tier that is down makes it down.
    """

    def __init__(self, tiers: Sequence[Tier], copy_bytes_max: int = COPY_BYTES_MAX) -> None:
        self._tiers = tiers
        self._known = [_Known() for _ in tiers]
        self._memory = np.empty(copy_bytes_max, np.uint8).data  # for copies; empty while there are any
        self._offering: asyncio.Task[None] | None = None
        self._tally = StoreCounters()

    async def put(self, objects: Objects) -> list[Put]:
        takers = [index for index, tier in enumerate(self._tiers) if tier.write is Write.ALL]
        answers = await finish(asyncio.gather(*(self._put(index, objects) for index in takers)))
        outcomes = [_nearest(told) for told in zip(*answers or [full_after([], objects)], strict=True)]
        self._tally.put(objects, outcomes)
        return outcomes

    async def get(self, wanted: Objects) -> list[Got]:
        outcomes = [Got.MISS] * len(wanted)
        hits: dict[int, _Hit] = {}
        for tier, store in enumerate(tier.store for tier in self._tiers):
            left = [index for index in range(len(wanted)) if index not in hits]
            if not left:
                break
            for index, got in zip(left, await store.get([wanted[index] for index in left]), strict=True):
                if got is Got.HIT:
                    hits[index] = _Hit(*wanted[index], tier)
                if got is Got.HIT or outcomes[index] is Got.MISS:
                    outcomes[index] = got
        self._tally.get(wanted, outcomes)
        for hit in hits.values():
            self._known[hit.tier].learn([hit.key])
        await self._offer([hits[index] for index in sorted(hits)])
        return outcomes

    async def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        held = [False] * len(keys)
        for tier in self._tiers:
            left = [index for index, is_held in enumerate(held) if not is_held]
            if not left:
                break
            for index, answer in zip(left, await tier.store.contains([keys[i] for i in left]), strict=True):
                held[index] = answer
        return held

    async def remove(self, keys: Sequence[ObjectKey]) -> None:
        for known in self._known:
            known.forget(keys)
        await asyncio.gather(*(tier.store.remove(keys) for tier in self._tiers))

    async def held(self) -> list[Held]:
        """An object of several tiers is told as the nearest of them has it."""
        found: dict[ObjectKey, Held] = {}
        for tier in self._tiers:
            for held in await tier.store.held():
                found.setdefault(held.key, held)
        return list(found.values())

    def register(self, memory: memoryview) -> None:
        for tier in self._tiers:
            tier.store.register(memory)

    def patience_s(self, num_bytes: int) -> float:
        limits_s = [tier.store.patience_s(num_bytes) for tier in self._tiers]
        return sum(limit_s for limit_s in limits_s if limit_s < math.inf) or math.inf

    def stats(self) -> StoreStats:
        stats = [tier.store.stats() for tier in self._tiers]
        whole = self._tally.stats(
            objects=sum(tier.objects for tier in stats),
            num_bytes=sum(tier.bytes for tier in stats),
            capacity_bytes=sum(tier.capacity_bytes for tier in stats),
        )
        return replace(
            whole,
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
        self._known[index].learn(
            key for (key, _), outcome in zip(objects, outcomes, strict=True) if outcome.is_there
        )
        return outcomes

    async def _offer(self, hits: Sequence[_Hit]) -> None:
        """Have the tiers that take hits, are up, and lack these put copies of them.

        The first that finds no memory for its copy ends it: what follows may be a checkpoint, which no tier
        takes before its pages.
        """
        if not self._memory:
            return
        takers = {
            index
            for index, tier in enumerate(self._tiers)
            if tier.write is not Write.NONE and not tier.store.stats().is_down
        }
        lacking = [{index for index in takers if self._lacks(index, hit)} for hit in hits]
        offers = [(hit, tiers) for hit, tiers in zip(hits, lacking, strict=True) if tiers]
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
        """A nearer tier has just said so; a farther one was not asked."""
        return index < hit.tier or (index > hit.tier and not self._known[index].has(hit.key))


class _Known:
    """Objects that a tier had a while ago."""

    def __init__(self) -> None:
        self._seen_s: OrderedDict[ObjectKey, float] = OrderedDict()

    def has(self, key: ObjectKey) -> bool:
        return asyncio.get_running_loop().time() - self._seen_s.get(key, -math.inf) < KNOWN_S

    def learn(self, keys: Iterable[ObjectKey]) -> None:
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._seen_s[key] = now_s
            self._seen_s.move_to_end(key)
        while len(self._seen_s) > KNOWN_MAX:
            self._seen_s.popitem(last=False)

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._seen_s.pop(key, None)


def _nearest(told: Sequence[Put]) -> Put:
    """Of what the tiers say, nearest first: the first that has the object, or the first that tried to."""
    there = (outcome for outcome in told if outcome.is_there)
    tried = (outcome for outcome in told if outcome is not Put.SKIPPED)
    return next(chain(there, tried), Put.SKIPPED)


async def _copy(pairs: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Each second one into the first; numpy lets other threads run meanwhile."""

    def copy() -> None:
        for target, source in pairs:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    if sum(source.nbytes for _, source in pairs) <= INLINE_BYTES_MAX:
        copy()
    else:
        await finish(asyncio.ensure_future(asyncio.to_thread(copy)))
