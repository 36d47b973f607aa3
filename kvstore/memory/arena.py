"""The arena: one reservation cut into equal extents that hold pages, window pages or states.

    extent 0        extent 1        extent 2        extent 3        extent 4 ...
    [P p p . P .]   [s S s]         [. . . . . .]   [W W . w W W]   not mapped
     pages           states          empty           window pages

    P, S, W   pinned: a lease uses it     p, s, w   cached: can be evicted     .   free

An empty extent can be opened for any class, so memory moves between the classes in whole extents.
Allocation prefers the fullest extent that is not full, so that other extents become empty.
Allocating and freeing are amortised O(1). At most `budget_extents` extents are mapped at a time.
On a device, a number of extents stay mapped, extent 0 always: kernels get addresses inside it.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Layout, PageId, StateId, WindowId
from tidemill.kvstore.memory.backing import Backing

Id = TypeVar("Id", PageId, StateId, WindowId)

SPARE_EXTENTS_MAX = 8
"""Empty extents that stay mapped, so that a fluctuating load does not keep remapping them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUsage:
    """The number of extents by class, and of objects that are pinned or cached."""

    page_extents: int
    state_extents: int
    empty_extents: int  # mapped
    unmapped_extents: int  # of the budget
    pages_pinned: int
    pages_cached: int
    states_pinned: int
    states_cached: int
    window_extents: int = 0
    windows_pinned: int = 0
    windows_cached: int = 0


class Pool(Generic[Id]):
    """The objects of one class. Extents in `reclaimable` have no pinned ones."""

    def __init__(
        self, objects_per_extent: int, open_extent: Callable[[], int], close: Callable[[int], None]
    ) -> None:
        self.objects_per_extent = objects_per_extent
        self.reclaimable: dict[int, None] = {}
        self._open_extent = open_extent
        self._close = close
        self._free: dict[int, list[int]] = {}  # extent -> its free ids
        self._pinned: dict[int, int] = {}  # extent -> number of its pinned ids
        self._taken: set[int] = set()
        self._cached: set[int] = set()
        # Extents that are not full, by their number of taken ids.
        self._buckets: list[dict[int, None]] = [{} for _ in range(objects_per_extent + 1)]
        self._fullest = 0

    def take(self) -> Id:
        """Allocate an id; it is pinned. Raises OutOfMemory."""
        while self._fullest and not self._buckets[self._fullest]:
            self._fullest -= 1
        if not self._buckets[self._fullest]:
            self._open(self._open_extent())
        extent = next(iter(self._buckets[self._fullest]))
        del self._buckets[self._fullest][extent]
        taken = self._free[extent].pop()
        self._taken.add(taken)
        self._put_in_bucket(extent, self.objects_per_extent - len(self._free[extent]))
        self._count_pinned(extent, 1)
        return taken  # pyright: ignore[reportReturnType]  an id is a NewType of int

    def free(self, taken: Id) -> None:
        """Free a pinned or cached id. If its extent is empty then, the extent leaves the class."""
        assert taken in self._taken, f"{taken} is freed twice, or was never taken"
        extent = taken // self.objects_per_extent
        self._taken.remove(taken)
        if taken in self._cached:
            self._cached.remove(taken)
        else:
            self._count_pinned(extent, -1)
        before = self.objects_per_extent - len(self._free[extent])
        self._buckets[before].pop(extent, None)
        self._free[extent].append(taken)
        if before > 1:
            self._put_in_bucket(extent, before - 1)
            return
        del self._free[extent], self._pinned[extent], self.reclaimable[extent]
        self._close(extent)

    def unpin(self, taken: Id) -> None:
        """Turn a pinned id into a cached one: no lease uses it any more."""
        assert taken in self._taken
        assert taken not in self._cached
        self._cached.add(taken)
        self._count_pinned(taken // self.objects_per_extent, -1)

    def pin(self, taken: Id) -> None:
        """Turn a cached id into a pinned one: a lease uses it again."""
        self._cached.remove(taken)
        self._count_pinned(taken // self.objects_per_extent, 1)

    def extent_of(self, taken: Id) -> int:
        return taken // self.objects_per_extent

    def taken_in(self, extent: int) -> list[Id]:
        """Return the ids of `extent` that are pinned or cached."""
        first = extent * self.objects_per_extent
        taken = self._taken
        return [number for number in range(first, first + self.objects_per_extent) if number in taken]  # pyright: ignore[reportReturnType]  ids are NewTypes of int

    @property
    def num_extents(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        return len(self._taken) - len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """The number of ids that can be taken without opening another extent."""
        return len(self._free) * self.objects_per_extent - len(self._taken)

    def check(self, pinned: Iterable[Id], cached: Iterable[Id]) -> list[int]:
        """Prove that exactly `pinned` and `cached` are taken; return the extents of this class."""
        pinned_ids, cached_ids = sorted(pinned), sorted(cached)
        assert cached_ids == sorted(self._cached), "an object is cached without an owner, or has two"
        assert sorted([*pinned_ids, *cached_ids]) == sorted(self._taken), "an object leaked or has two owners"
        num_pinned = Counter(number // self.objects_per_extent for number in pinned_ids)
        for extent, free in self._free.items():
            assert len(self.taken_in(extent)) + len(free) == self.objects_per_extent
            assert self._taken.isdisjoint(free)
            assert self._pinned[extent] == num_pinned[extent]
            assert (extent in self.reclaimable) == (not num_pinned[extent])
            assert (extent in self._buckets[self.objects_per_extent - len(free)]) == bool(free)
        assert self.reclaimable.keys() <= self._free.keys()
        return list(self._free)

    def _open(self, extent: int) -> None:
        first = extent * self.objects_per_extent
        self._free[extent] = list(range(first + self.objects_per_extent - 1, first - 1, -1))
        self._pinned[extent] = 0
        self._put_in_bucket(extent, 0)

    def _put_in_bucket(self, extent: int, num_taken: int) -> None:
        if num_taken < self.objects_per_extent:  # nothing can be taken from a full extent
            self._buckets[num_taken][extent] = None
            self._fullest = max(self._fullest, num_taken)

    def _count_pinned(self, extent: int, change: int) -> None:
        self._pinned[extent] += change
        assert self._pinned[extent] >= 0
        if self._pinned[extent]:
            self.reclaimable.pop(extent, None)
        else:
            self.reclaimable[extent] = None


class Arena:
    """The extents, and the pools of pages, window pages and states that share them. `take` of a pool raises
    OutOfMemory, which is expected under load."""

    def __init__(
        self,
        layout: Layout,
        num_extents: int,
        backing: Backing,
        budget_extents: int | None = None,
        ahead_extents: int = 0,
        kept_extents: int = 0,
    ) -> None:
        """Reserve `num_extents`, of which `budget_extents` (default: all) may be mapped. From the
        first extent or budget on, the backing maps `ahead_extents` of them ahead of need.

        At least `kept_extents`, which are mapped now, stay mapped, and extent 0 is one of them. Raises
        OutOfMemory.
        """
        assert num_extents > 0
        self.num_extents = num_extents
        self.budget_extents = num_extents if budget_extents is None else budget_extents
        self._extent_bytes = layout.extent_bytes
        self._backing = backing
        self.pages: Pool[PageId] = Pool(layout.pages_per_extent, self._open, self._close)
        self.states: Pool[StateId] = Pool(max(1, layout.states_per_extent), self._open, self._close)
        self.windows: Pool[WindowId] = Pool(max(1, layout.windows_per_extent), self._open, self._close)
        assert kept_extents <= self.budget_extents
        self._kept_extents = kept_extents
        for extent in range(kept_extents):
            backing.map(extent * layout.extent_bytes, layout.extent_bytes)
        self._unmapped = list(range(num_extents - 1, kept_extents - 1, -1))
        self._spare = list(range(kept_extents - 1, -1, -1))  # empty, but still mapped
        self._ahead_extents = ahead_extents
        self._ahead: set[int] = set()  # not mapped, but with the backing's memory

    def resize(self, budget_extents: int) -> None:
        """Change the budget and unmap empty extents above it immediately; see `excess`."""
        assert max(1, self._kept_extents) <= budget_extents <= self.num_extents
        self.budget_extents = budget_extents
        while self.excess and self._unmap_spare():
            pass
        self._map_ahead()

    @property
    def excess(self) -> int:
        """The number of mapped extents above the budget; they have to be emptied."""
        return max(0, self._mapped - self.budget_extents)

    @property
    def num_empty(self) -> int:
        """The number of extents that any class can still open."""
        return len(self._spare) + max(0, self.budget_extents - self._mapped)

    def usage(self) -> ArenaUsage:
        return ArenaUsage(
            page_extents=self.pages.num_extents,
            state_extents=self.states.num_extents,
            empty_extents=len(self._spare),
            unmapped_extents=max(0, self.budget_extents - self._mapped),
            pages_pinned=self.pages.num_pinned,
            pages_cached=self.pages.num_cached,
            states_pinned=self.states.num_pinned,
            states_cached=self.states.num_cached,
            window_extents=self.windows.num_extents,
            windows_pinned=self.windows.num_pinned,
            windows_cached=self.windows.num_cached,
        )

    def check(
        self,
        pages: tuple[list[PageId], list[PageId]],
        states: tuple[list[StateId], list[StateId]],
        windows: tuple[list[WindowId], list[WindowId]] = ([], []),
    ) -> None:
        """Prove that exactly these ids are taken, each class as (pinned, cached). Prove also that each extent
        is in one class, empty or unmapped."""
        extents = [*self.pages.check(*pages), *self.states.check(*states), *self.windows.check(*windows)]
        extents += [*self._spare, *self._unmapped]
        assert sorted(extents) == list(range(self.num_extents)), "an extent is lost or counted twice"
        assert len(self._ahead) <= max(0, self.budget_extents - self._mapped), "memory beyond the budget"
        assert self._mapped >= self._kept_extents, "memory that a device granted was given back"
        assert not (self._kept_extents and 0 in self._unmapped), "extent 0 was unmapped"
        unmappable = [extent for extent in self._spare if extent or not self._kept_extents]
        assert not (self.excess and unmappable), "an empty extent above the budget was not unmapped"

    @property
    def _mapped(self) -> int:
        return self.num_extents - len(self._unmapped)

    def _open(self) -> int:
        if self._spare:
            return self._spare.pop()
        if self._mapped >= self.budget_extents:
            raise OutOfMemory("no extent of this class has room and no extent is empty")
        extent = self._unmapped[-1]
        self._backing.map(extent * self._extent_bytes, self._extent_bytes)
        self._unmapped.pop()
        self._ahead.discard(extent)
        self._map_ahead()
        return extent

    def _map_ahead(self) -> None:
        """Let the backing map the extents that will be opened next, within the budget, and return others.
        It begins when half of them are left: starting its thread costs more than this walk."""
        count = min(self._ahead_extents, max(0, self.budget_extents - self._mapped))
        if count < 2 * len(self._ahead) <= 2 * count:
            return
        wanted = set(self._unmapped[len(self._unmapped) - count :])
        for extent in self._ahead - wanted:
            self._backing.unmap(extent * self._extent_bytes, self._extent_bytes)
        for extent in sorted(wanted - self._ahead):
            self._backing.map_ahead(extent * self._extent_bytes, self._extent_bytes)
        self._ahead = wanted

    def _close(self, extent: int) -> None:
        self._spare.append(extent)
        if self.excess or (len(self._spare) > SPARE_EXTENTS_MAX and self._mapped > self._kept_extents):
            self._unmap_spare()

    def _unmap_spare(self) -> bool:
        """Unmap an empty extent, other than 0 if some are kept; return whether there was one."""
        extent = next((extent for extent in self._spare if extent or not self._kept_extents), None)
        if extent is None:
            return False
        self._spare.remove(extent)
        self._backing.unmap(extent * self._extent_bytes, self._extent_bytes)
        self._unmapped.insert(0, extent)  # the others may be mapped ahead
        return True
