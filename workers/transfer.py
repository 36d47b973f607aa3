"""Moves pages and checkpoints between leases and the store; a loss is an ordinary outcome here.

The leader of a group decides what is moved, by key and id; every rank moves the shards of it that lie in its
own arena, between that arena and the store. An object is good when it is good on every rank.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId
from tidemill.kvstore.lease import Lease
from tidemill.kvstore.shards import WHOLE, Shards, Share, mine
from tidemill.kvstore.store import Got, PageStore, Put, finish


class Moved(NamedTuple):
    """A page or checkpoint, and where it lies in the arena of each rank: its PageId or StateId."""

    kind: Kind
    key: PageKey
    place: int


class Mate(Protocol):
    """Another rank of the group, as its leader sees it: a RankTransfer at the end of a link.

    Both calls answer how many of the first `objects` are good on that rank, 0 when the link is broken. They
    do not end, also when cancelled, before the rank has stopped using its memory for them.
    """

    async def put(self, objects: Sequence[Moved]) -> int: ...

    async def get(self, objects: Sequence[Moved]) -> int: ...


class RankTransfer:
    """One rank's part: `share` names the shards that each page and state of its arena consists of."""

    def __init__(self, layout: Layout, memory: memoryview, store: PageStore, share: Share) -> None:
        self.store = store
        self._layout = layout
        self._memory = memory
        self._share = share

    async def put(self, objects: Sequence[Moved]) -> int:
        """Store them in order; how many of the first ones are there. A page that another rank publishes is
        there as far as this one is concerned."""
        offered = [
            [] if moved.kind is Kind.PAGE and not self._share.publishes_pages else self._shards(moved)
            for moved in objects
        ]
        outcomes = await self.store.put([shard for shards in offered for shard in shards])
        return _unbroken(_intact(offered, (outcome is not Put.REFUSED for outcome in outcomes)))

    async def get(self, objects: Sequence[Moved]) -> int:
        """Fill their places; how many of the first ones arrived whole."""
        wanted = [self._shards(moved) for moved in objects]
        outcomes = await self.store.get([shard for shards in wanted for shard in shards])
        return _unbroken(_intact(wanted, (outcome is Got.HIT for outcome in outcomes)))

    def _shards(self, moved: Moved) -> list[tuple[ObjectKey, memoryview]]:
        """Its shards on this rank, and the bytes of each."""
        match moved.kind:
            case Kind.PAGE:
                shards, num_bytes = self._share.pages, self._layout.page_bytes
                offset = self._layout.page_offset(PageId(moved.place))
            case Kind.CHECKPOINT:
                shards, num_bytes = self._share.states, self._layout.state_bytes
                offset = self._layout.state_offset(StateId(moved.place))
        size = num_bytes // len(shards)
        return [
            (ObjectKey(moved.kind, moved.key, shard), self._memory[start : start + size])
            for shard, start in zip(shards, range(offset, offset + num_bytes, size), strict=True)
        ]


class Transfer:
    """The leader's: rank 0 of a group of which the others are `mates`."""

    def __init__(
        self,
        layout: Layout,
        memory: memoryview,
        store: PageStore,
        shards: Shards = WHOLE,
        mates: Sequence[Mate] = (),
    ) -> None:
        """`layout` and `memory` are those of rank 0."""
        self.store = store
        self._hybrid = layout.hybrid
        self._shards = shards
        self._mates = mates
        self._own = RankTransfer(layout, memory, store, mine(shards, 0, 1 + len(mates)))

    async def restorable_depths(self, keys: Sequence[PageKey], above_pages: int) -> list[int]:
        """Depths in pages, above `above_pages` and up to all of `keys`, ascending, where the store can
        resume.

        For a hybrid these are the checkpoints it holds, each of which says that its pages were stored before
        it; without states every page of an unbroken run is one.
        """
        if self._hybrid:
            held = await self._held([(Kind.CHECKPOINT, key) for key in keys[above_pages:]])
            return [above_pages + index + 1 for index, is_held in enumerate(held) if is_held]
        held = await self._held([(Kind.PAGE, key) for key in keys[above_pages:]])
        return list(range(above_pages + 1, above_pages + _unbroken(held) + 1))

    async def fetch(self, lease: Lease, keys: Sequence[PageKey], num_pages: int) -> int:
        """Fill the lease's own pages up to `num_pages` and its `fetch_slot`; answers how many pages are good.

        `num_pages` is the answer only when the checkpoint arrived too. Nothing is committed here.
        """
        first = len(lease.entries)
        wanted = [
            Moved(Kind.PAGE, keys[index], lease.own[index - first]) for index in range(first, num_pages)
        ]
        if self._hybrid:
            wanted.append(Moved(Kind.CHECKPOINT, keys[num_pages - 1], lease.fetch_slot))
        good = await self._least(lambda rank: rank.get(wanted))
        return num_pages if good == len(wanted) else min(first + good, num_pages - 1)

    async def publish(self, lease: Lease, keys: Sequence[PageKey]) -> bool:
        """Store the lease's shared pages in order, then the checkpoint at their end; True when all are
        there."""
        pages = [Moved(Kind.PAGE, key, entry.page) for key, entry in zip(keys, lease.entries, strict=False)]
        checkpoint: list[Moved] = []
        if lease.source is not None and lease.source.checkpoint is not None:
            checkpoint = [Moved(Kind.CHECKPOINT, lease.source.key, lease.source.checkpoint)]
        if not self._mates:  # one put, which is ordered and evicts nothing of its own
            return await self._put(pages + checkpoint)
        return await self._put(pages) and await self._put(checkpoint)

    async def holds(self, keys: Sequence[PageKey]) -> bool:
        """Whether the store holds every page of `keys` and, for a hybrid, the checkpoint at their end."""
        objects = [(Kind.PAGE, key) for key in keys]
        if self._hybrid:
            objects.append((Kind.CHECKPOINT, keys[-1]))
        return all(await self._held(objects))

    async def _put(self, objects: Sequence[Moved]) -> bool:
        """Store those that the store lacks; True when all are there."""
        held = await self._held([(moved.kind, moved.key) for moved in objects])
        missing = [moved for moved, is_held in zip(objects, held, strict=True) if not is_held]
        return not missing or await self._least(lambda rank: rank.put(missing)) == len(missing)

    async def _held(self, objects: Sequence[tuple[Kind, PageKey]]) -> list[bool]:
        """Of which objects the store holds every shard, those of other ranks included."""
        counts = {Kind.PAGE: self._shards.pages, Kind.CHECKPOINT: self._shards.states}
        shards = [[ObjectKey(kind, key, shard) for shard in range(counts[kind])] for kind, key in objects]
        return _intact(shards, await self.store.contains([shard for whole in shards for shard in whole]))

    async def _least(self, call: Callable[[Mate], Awaitable[int]]) -> int:
        """The least answer in the group, when all ranks have answered: until then memory is in use, even if
        this is cancelled."""
        answers = [asyncio.ensure_future(call(rank)) for rank in (*self._mates, self._own)]
        await finish(asyncio.gather(*answers, return_exceptions=True))
        return min(answer.result() for answer in answers)


def _intact(wholes: Sequence[Sequence[object]], good: Iterable[bool]) -> list[bool]:
    """Which wholes have good parts alone; `good` speaks of all parts, in order."""
    left = iter(good)
    return [False not in list(islice(left, len(whole))) for whole in wholes]


def _unbroken(flags: Sequence[bool]) -> int:
    """How many are true before the first that is not."""
    return flags.index(False) if False in flags else len(flags)
