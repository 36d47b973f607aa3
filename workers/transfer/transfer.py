"""Move pages and checkpoints between leases and the store; a loss is an ordinary outcome.

The leader of a group decides what is moved, by key and id. Every rank moves the shards that lie in its own
arena, between that arena and the store. An object is good when it is good on every rank.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.shards import WHOLE, Shards, Share, rank_share
from tidemill.kvstore.stores.page_store import Got, finish, wait_within
from tidemill.workers.transfer.arena_io import ArenaIO, StagedObject
from tidemill.workers.transfer.speed_model import Throughput

IN_FLIGHT_BYTES_MAX = 256 << 20
"""The limit of bytes in flight on one rank, for fetching and for publishing each: enough to fill any link."""


class Moved(NamedTuple):
    """A page, window page or state, and its id in the arena of each rank."""

    kind: Kind
    key: PageKey
    memory_id: int


class Mate(Protocol):
    """Another rank of the group, as its leader sees it: a RankTransfer at the end of a link.

    Both calls return how many of the first `objects` are good on that rank, 0 when the link is broken. Also
    when cancelled, they end only after the rank has stopped using its memory for them.
    """

    async def put(self, objects: Sequence[Moved]) -> int: ...

    async def get(self, objects: Sequence[Moved]) -> int: ...


class ShardedObject(NamedTuple):
    """The store's view of one kind of objects in the arena of a rank: the shards of each, whether this rank
    publishes them, the bytes from one object to the next, and the stored ones of each slice."""

    shards: range
    publishes: bool
    stride_bytes: int
    slice_bytes: tuple[int, ...]


class RankTransfer:
    """The part of one rank: `share` names the shards of each page and state in its arena."""

    def __init__(self, layout: Layout, arena_io: ArenaIO, share: Share) -> None:
        self._arena_io = arena_io
        self._kinds = {
            Kind.PAGE: ShardedObject(
                share.pages, share.publishes_pages, layout.page_bytes, layout.slice_bytes
            ),
            Kind.WINDOW: ShardedObject(
                share.windows, share.publishes_windows, layout.window_bytes, (layout.window_bytes,)
            ),
            Kind.CHECKPOINT: ShardedObject(
                share.states, bool(share.states), layout.saved_stride_bytes, (layout.saved_bytes,)
            ),
        }

    async def put(self, objects: Sequence[Moved]) -> int:
        """Store the objects in order, and return how many of the first ones are there. A page that another
        rank publishes counts as there."""
        offered = [self._shards(moved) if self._kinds[moved.kind].publishes else [] for moved in objects]
        outcomes = await self._arena_io.put([shard for shards in offered for shard in shards])
        return _unbroken(_intact(offered, (outcome.is_there for outcome in outcomes)))

    async def get(self, objects: Sequence[Moved], page_slice: int | None = None) -> int:
        """Fill the memory of the objects, and return how many of the first ones arrived whole. With
        `page_slice` get that slice of each page, and other objects with the first one."""
        wanted = [self._shards(moved, page_slice) for moved in objects]
        outcomes = await self._arena_io.get([shard for shards in wanted for shard in shards])
        return _unbroken(_intact(wanted, (outcome is Got.HIT for outcome in outcomes)))

    def _shards(self, moved: Moved, page_slice: int | None = None) -> list[StagedObject]:
        """Return the shards of an object on this rank, or those of one slice."""
        shards, _, stride_bytes, slice_bytes = self._kinds[moved.kind]
        found: list[StagedObject] = []
        start = moved.memory_id * stride_bytes
        for number, num_bytes in enumerate(slice_bytes):
            size = num_bytes // len(shards)
            for shard in shards if page_slice in {None, number} else ():
                key = ObjectKey(moved.kind, moved.key, shard * len(slice_bytes) + number)
                found.append(StagedObject(key, start + (shard - shards.start) * size, size))
            start += num_bytes
        return found


@dataclass(slots=True)
class Moves:
    """Totals of what arrived whole or was stored, and its time. Concurrent transfers add up."""

    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes
        self.seconds += seconds


OnLate = Callable[[asyncio.Future[int]], None]
"""Called with a transfer that its caller no longer waits for. It uses its memory until it has ended."""

OnSlice = Callable[[int], None]
"""Called with the number of each slice when it is here and verified in all pages."""


class Transfer:
    """The leader's transfers: it is rank 0 of a group of which the others are `mates`."""

    def __init__(
        self,
        layout: Layout,
        arena_io: ArenaIO,
        shards: Shards = WHOLE,
        mates: Sequence[Mate] = (),
        in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX,
    ) -> None:
        self.store = arena_io.store
        self.throughput = Throughput()  # of fetches, on all ranks together
        self.fetched = Moves()  # likewise
        self.published = Moves()
        self._own = RankTransfer(layout, arena_io, rank_share(shards, 0, 1 + len(mates)))
        self._mates = mates
        self._layout = layout
        self._sizes = {
            Kind.PAGE: layout.page_bytes,
            Kind.WINDOW: layout.window_bytes,
            Kind.CHECKPOINT: layout.saved_bytes,
        }
        page_shards = shards.pages * len(layout.slice_bytes)
        self._shards = {Kind.PAGE: page_shards, Kind.WINDOW: shards.windows, Kind.CHECKPOINT: shards.states}
        self._fetching = Quota(in_flight_bytes_max)
        self._publishing = Quota(in_flight_bytes_max)

    async def restorable_depths(self, keys: Sequence[PageKey], above_pages: int) -> list[int]:
        """Return the depths above `above_pages` that the store can probably restore, in pages, ascending.

        In a hybrid only checkpoints are looked up: they are stored after the pages below them. A checkpoint
        exists when its state and all its window pages do.
        """
        depths = range(above_pages + 1, len(keys) + 1)
        if self._layout.hybrid:
            parts = [self._checkpoint(keys, depth) for depth in depths]
            requested = list(dict.fromkeys(chain.from_iterable(parts)))
            answers = zip(requested, await self._held(requested), strict=True)
            held = {held_key for held_key, is_held in answers if is_held}
            return [depth for depth, some in zip(depths, parts, strict=True) if held.issuperset(some)]
        return list(range(above_pages + 1, above_pages + await self.num_stored(keys[above_pages:]) + 1))

    async def num_stored(self, keys: Sequence[PageKey]) -> int:
        """Return how many of these pages the store holds before the first that it does not."""
        return _unbroken(await self._held([(Kind.PAGE, key) for key in keys]))

    @property
    def num_slices(self) -> int:
        """The slices in which pages can be fetched while a step runs; 1: all layers arrive together. In a
        group a rank that lacks one would have to end the step of all, and a copy of a checkpoint needs its
        entry in the index."""
        return 1 if self._mates or self._layout.converts else len(self._layout.slice_bytes)

    async def fetch(
        self,
        lease: Lease,
        keys: Sequence[PageKey],
        num_pages: int,
        on_late: OnLate,
        on_slice: OnSlice | None = None,
    ) -> int:
        """Fill the lease's own pages up to `num_pages` and, if it runs, its `fetched_windows` and its
        `fetch_slot`. Return how many pages are good.

        The result is `num_pages` only when the checkpoint arrived too. Nothing is committed here. When this
        is cancelled, or the store exceeds its patience, `on_late` gets the transfer. With `on_slice` the
        slices of all pages arrive one after the other, the checkpoint with the first, and none of them is
        good before the last.
        """
        first = len(lease.shared_entries)
        wanted = [
            Moved(Kind.PAGE, keys[index], lease.private_pages[index - first])
            for index in range(first, num_pages)
        ]
        wanted += [
            Moved(Kind.WINDOW, keys[position], lease.windows[position - lease.first_window])
            for position in lease.fetched_windows
        ]
        if self._layout.has_states and lease.runs:
            wanted.append(Moved(Kind.CHECKPOINT, keys[num_pages - 1], lease.fetch_slot))
        num_bytes = self._num_bytes(wanted)
        patience_s = self._patience_s(num_bytes)
        try:
            async with asyncio.timeout(patience_s):  # transfers before it may be late
                await self._fetching.take(num_bytes)
        except TimeoutError:
            return min(first, num_pages - 1)
        began_s = asyncio.get_running_loop().time()
        moving = asyncio.ensure_future(self._get(wanted, on_slice))
        moving.add_done_callback(lambda _: self._fetching.give_back(num_bytes))
        late = False
        try:
            await wait_within(lambda: self._patience_s(num_bytes), moving)
        finally:
            if not moving.done():
                late = True
                moving.add_done_callback(_look_at)
                on_late(moving)
        good = 0 if late else moving.result()
        if good == len(wanted):
            now_s = asyncio.get_running_loop().time()
            seconds = now_s - began_s
            self.throughput.fetched(num_bytes * (1 + len(self._mates)), seconds, now_s)
            self.fetched.add(num_bytes * (1 + len(self._mates)), seconds)
        return num_pages if good == len(wanted) else min(first + good, num_pages - 1)

    async def publish(self, lease: Lease, keys: Sequence[PageKey], first: int, *, checkpoint: bool) -> bool:
        """Store the lease's shared pages from `first` on, in order, then the checkpoint at their end if it is
        wanted. Return whether all are there. Those before `first` are there."""
        pages = [
            Moved(Kind.PAGE, keys[index], entry.page)
            for index, entry in enumerate(lease.shared_entries[first:], start=first)
        ]
        last: list[Moved] = []
        if checkpoint and lease.source is not None and lease.source.checkpoint is not None:
            windows, saved = lease.source.checkpoint.windows, lease.source.checkpoint.saved
            positions = range(len(lease.shared_entries) - len(windows), len(lease.shared_entries))
            last = [
                Moved(Kind.WINDOW, keys[position], window)
                for position, window in zip(positions, windows, strict=True)
            ]
            last += [Moved(Kind.CHECKPOINT, lease.source.key, state) for state in saved]
        num_bytes = self._num_bytes([*pages, *last])
        await self._publishing.take(num_bytes)
        began_s = asyncio.get_running_loop().time()
        try:
            if not self._mates:  # one put, which is ordered and evicts none of its own objects
                stored = await self._put(pages + last)
            else:
                stored = await self._put(pages) and await self._put(last)
        finally:
            self._publishing.give_back(num_bytes)
        if stored:
            seconds = asyncio.get_running_loop().time() - began_s
            self.published.add(num_bytes * (1 + len(self._mates)), seconds)
        return stored

    @property
    def is_down(self) -> bool:
        """True while the store does not answer."""
        return self.store.patience_s(0) == 0

    @property
    def has_room(self) -> bool:
        """True if the store takes a checkpoint without an eviction, also when another worker puts one now."""
        num_bytes = self._layout.checkpoint_bytes * (1 + len(self._mates))
        return self.store.stats().free_bytes > 2 * num_bytes

    async def publish_last(self, lease: Lease, keys: Sequence[PageKey], *, spare: bool) -> bool:
        """Store the checkpoint at the end of the lease, whose pages are there, if the store has room for it.
        Return whether it is there. A spare one is the first to be evicted from the store."""
        objects = self._checkpoint(keys, len(lease.shared_entries))
        held = await self._held(objects)
        if not self.has_room:
            return False
        stored = await self.publish(lease, keys, len(lease.shared_entries), checkpoint=True)
        if stored and spare:
            missed = [found for found, is_held in zip(objects, held, strict=True) if not is_held]
            await self.store.demote([shard for kind, key in missed for shard in self._shards_of(kind, key)])
        return stored

    async def holds(self, keys: Sequence[PageKey]) -> bool:
        """Return whether the store holds every page of `keys` and, for a hybrid, the checkpoint at their
        end."""
        pages = [(Kind.PAGE, key) for key in keys]
        return all(await self._held([*pages, *self._checkpoint(keys, len(keys))]))

    def _checkpoint(self, keys: Sequence[PageKey], num_pages: int) -> list[tuple[Kind, PageKey]]:
        """Return the objects of the checkpoint at the end of the first `num_pages`."""
        windows = [(Kind.WINDOW, keys[position]) for position in self._layout.last_window(num_pages)]
        states = [(Kind.CHECKPOINT, keys[num_pages - 1])] if self._layout.has_states else []
        return [*windows, *states]

    def patience_s(self, num_pages: int) -> float | None:
        """Return the patience for publishing these pages and a checkpoint after all earlier publications, in
        seconds; 0 while the store is down, None without a limit."""
        num_bytes = num_pages * self._sizes[Kind.PAGE] + self._layout.checkpoint_bytes
        return self._patience_s(num_bytes + self._publishing.wanted_bytes)

    async def wait_published(self, publishing: asyncio.Future[Any], num_pages: int) -> None:
        """Wait for a publication of these pages and a checkpoint, at most for the patience, and no longer
        than the store is up."""
        await wait_within(lambda: self.patience_s(num_pages), publishing)

    def _patience_s(self, num_bytes: int) -> float | None:
        """Return the patience for a transfer in which all ranks move their parts together."""
        patience_s = self.store.patience_s(num_bytes * (1 + len(self._mates)))
        return None if math.isinf(patience_s) else patience_s

    def _num_bytes(self, objects: Sequence[Moved]) -> int:
        """Return the bytes on each rank."""
        return sum(self._sizes[moved.kind] for moved in objects)

    async def _get(self, wanted: Sequence[Moved], on_slice: OnSlice | None) -> int:
        """Return how many of the first objects are good."""
        if on_slice is None:
            return await self._least(lambda rank: rank.get(wanted))
        for number in range(self.num_slices):
            if await self._own.get(wanted, number) < len(wanted):
                return 0
            on_slice(number)
        return len(wanted)

    async def _put(self, objects: Sequence[Moved]) -> bool:
        """Return whether all objects are there."""
        return await self._least(lambda rank: rank.put(objects)) == len(objects)

    async def _held(self, objects: Sequence[tuple[Kind, PageKey]]) -> list[bool]:
        """Return of which objects the store holds every shard, with those of other ranks."""
        shards = [self._shards_of(kind, key) for kind, key in objects]
        return _intact(shards, await self.store.contains([shard for whole in shards for shard in whole]))

    def _shards_of(self, kind: Kind, key: PageKey) -> list[ObjectKey]:
        return [ObjectKey(kind, key, shard) for shard in range(self._shards[kind])]

    async def _least(self, call: Callable[[Mate], Awaitable[int]]) -> int:
        """Return the least answer in the group after all ranks have answered: until then memory is in use,
        even if this is cancelled."""
        answers = [asyncio.ensure_future(call(rank)) for rank in (*self._mates, self._own)]
        await finish(asyncio.gather(*answers, return_exceptions=True))
        return min(answer.result() for answer in answers)


class Quota:
    """A limit of bytes in flight, in order of arrival. A larger transfer goes alone."""

    def __init__(self, bytes_max: int) -> None:
        self.wanted_bytes = 0  # in flight and waiting
        self._used_bytes = 0
        self._bytes_max = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_bytes: int) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wanted_bytes += num_bytes
        self._waiting.append((num_bytes, granted))
        self._admit()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.cancelled():
                self.wanted_bytes -= num_bytes
                self._admit()
            else:
                self.give_back(num_bytes)
            raise

    def give_back(self, num_bytes: int) -> None:
        self.wanted_bytes -= num_bytes
        self._used_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            num_bytes, granted = self._waiting[0]
            if not granted.cancelled():
                if self._used_bytes and self._used_bytes + num_bytes > self._bytes_max:
                    return
                self._used_bytes += num_bytes
                granted.set_result(None)
            self._waiting.popleft()


def _look_at(moving: asyncio.Future[int]) -> None:
    """Retrieve the error: otherwise asyncio would log that it was never retrieved."""
    moving.exception()


def _intact(wholes: Sequence[Sequence[object]], good: Iterable[bool]) -> list[bool]:
    """Return which wholes have only good parts; `good` has one item per part, in order."""
    left = iter(good)
    return [False not in list(islice(left, len(whole))) for whole in wholes]


def _unbroken(flags: Sequence[bool]) -> int:
    """Return how many flags are true before the first that is not."""
    return flags.index(False) if False in flags else len(flags)
