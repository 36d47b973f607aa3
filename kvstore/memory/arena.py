"""One reservation cut into equal extents that hold pages, or window pages, or states, or nothing.

    extent 0        extent 1        extent 2        extent 3        extent 4 ...
    [P p p . P .]   [s S s]         [. . . . . .]   [W W . w W W]   not mapped
     pages           states          nothing         window pages

    P, S, W   held: a lease writes or reads it     p, s, w   kept: cache, can be taken back     .   free

An empty extent changes class freely: that is the whole of the elasticity between the classes. Taking prefers
the fullest extent that is not full, so that extents empty out; taking and giving are amortised O(1). At most
`budget_extents` are mapped at a time; which of them, and where the holes are, does not matter.
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
"""Empty extents that stay mapped, so that a workload that breathes does not map and unmap at every breath."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUsage:
    """Extents by what they hold, and objects by who holds them."""

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
    """The objects of one class. `loose` are its extents in which nothing is held: they can be emptied."""

    def __init__(
        self, objects_per_extent: int, open_extent: Callable[[], int], close: Callable[[int], None]
    ) -> None:
        self.objects_per_extent = objects_per_extent
        self.reclaimable: dict[int, None] = {}
        self._open_extent = open_extent
        self._close = close
        self._free: dict[int, list[int]] = {}  # extent -> its free ids
        self._pinned: dict[int, int] = {}  # extent -> how many of its ids are held
        self._taken: set[int] = set()
        self._cached: set[int] = set()
        self._buckets: list[dict[int, None]] = [
            {} for _ in range(objects_per_extent + 1)
        ]  # extents by ids taken
        self._fullest = 0

    def take(self) -> Id:
        """A free id, held now. Raises OutOfMemory."""
        while self._fullest and not self._buckets[self._fullest]:
            self._fullest -= 1
        if not self._buckets[self._fullest]:
            self._open(self._open_extent())
        extent = next(iter(self._buckets[self._fullest]))
        del self._buckets[self._fullest][extent]
        taken = self._free[extent].pop()
        self._taken.add(taken)
        self._file(extent, self.objects_per_extent - len(self._free[extent]))
        self._count_pinned(extent, 1)
        return taken  # pyright: ignore[reportReturnType]  an id is an int with a name

    def free(self, given: Id) -> None:
        """Return an id, held or kept. An extent that is empty now leaves the class."""
        assert given in self._taken, f"{given} is given back twice, or was never taken"
        extent = given // self.objects_per_extent
        self._taken.remove(given)
        if given in self._cached:
            self._cached.remove(given)
        else:
            self._count_pinned(extent, -1)
        before = self.objects_per_extent - len(self._free[extent])
        self._buckets[before].pop(extent, None)
        self._free[extent].append(given)
        if before > 1:
            self._file(extent, before - 1)
            return
        del self._free[extent], self._pinned[extent], self.reclaimable[extent]
        self._close(extent)

    def unpin(self, kept: Id) -> None:
        """No lease uses it any more: it can be taken back."""
        assert kept in self._taken
        assert kept not in self._cached
        self._cached.add(kept)
        self._count_pinned(kept // self.objects_per_extent, -1)

    def pin(self, kept: Id) -> None:
        """A lease uses it again."""
        self._cached.remove(kept)
        self._count_pinned(kept // self.objects_per_extent, 1)

    def extent_of(self, taken: Id) -> int:
        return taken // self.objects_per_extent

    def taken_in(self, extent: int) -> list[Id]:
        """The ids of `extent` that are held or kept."""
        first = extent * self.objects_per_extent
        taken = self._taken
        return [number for number in range(first, first + self.objects_per_extent) if number in taken]  # pyright: ignore[reportReturnType]  ids are ints with a name

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
        """Places that can be taken without another extent."""
        return len(self._free) * self.objects_per_extent - len(self._taken)

    def check(self, held: Iterable[Id], kept: Iterable[Id]) -> list[int]:
        """Prove that exactly `held` and `kept` are taken; answers the extents of this class."""
        held_ids, kept_ids = sorted(held), sorted(kept)
        assert kept_ids == sorted(self._cached), "an object is kept without an owner, or has two"
        assert sorted([*held_ids, *kept_ids]) == sorted(self._taken), "an object leaked or has two owners"
        holders = Counter(number // self.objects_per_extent for number in held_ids)
        for extent, free in self._free.items():
            assert len(self.taken_in(extent)) + len(free) == self.objects_per_extent
            assert self._taken.isdisjoint(free)
            assert self._pinned[extent] == holders[extent]
            assert (extent in self.reclaimable) == (not holders[extent])
            assert (extent in self._buckets[self.objects_per_extent - len(free)]) == bool(free)
        assert self.reclaimable.keys() <= self._free.keys()
        return list(self._free)

    def _open(self, extent: int) -> None:
        first = extent * self.objects_per_extent
        self._free[extent] = list(range(first + self.objects_per_extent - 1, first - 1, -1))
        self._pinned[extent] = 0
        self._file(extent, 0)

    def _file(self, extent: int, taken: int) -> None:
        if taken < self.objects_per_extent:  # nothing can be taken from a full extent
            self._buckets[taken][extent] = None
            self._fullest = max(self._fullest, taken)

    def _count_pinned(self, extent: int, change: int) -> None:
        self._pinned[extent] += change
        assert self._pinned[extent] >= 0
        if self._pinned[extent]:
            self.reclaimable.pop(extent, None)
        else:
            self.reclaimable[extent] = None


class Arena:
    """The extents, and the pools that share them. `pages.take()`, `windows.take()` and `states.take()` hand
    out ids and raise OutOfMemory, which is expected under load."""

    def __init__(
        self, layout: Layout, num_extents: int, backing: Backing, budget_extents: int | None = None
    ) -> None:
        """`num_extents` are reserved, `budget_extents` of them (default: all) may be mapped at a time."""
        assert num_extents > 0
        self.num_extents = num_extents
        self.budget_extents = num_extents if budget_extents is None else budget_extents
        self._extent_bytes = layout.extent_bytes
        self._backing = backing
        self.pages: Pool[PageId] = Pool(layout.pages_per_extent, self._open, self._close)
        self.states: Pool[StateId] = Pool(max(1, layout.states_per_extent), self._open, self._close)
        self.windows: Pool[WindowId] = Pool(max(1, layout.windows_per_extent), self._open, self._close)
        self._unmapped = list(range(num_extents - 1, -1, -1))
        self._spare: list[int] = []  # empty and mapped

    def resize(self, budget_extents: int) -> None:
        """Change the budget while everything runs. Empty extents are given back at once; see `excess`."""
        assert 0 < budget_extents <= self.num_extents
        self.budget_extents = budget_extents
        while self._spare and self.excess:
            self._unmap(self._spare.pop())

    @property
    def excess(self) -> int:
        """Mapped extents above the budget, which have to be emptied."""
        return max(0, self._mapped - self.budget_extents)

    @property
    def num_empty(self) -> int:
        """Extents that any class can still open."""
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
        """Prove that exactly these are taken, as (held, kept), and that every extent is in one place."""
        extents = [*self.pages.check(*pages), *self.states.check(*states), *self.windows.check(*windows)]
        extents += [*self._spare, *self._unmapped]
        assert sorted(extents) == list(range(self.num_extents)), "an extent is lost or in two places"
        assert not (self.excess and self._spare), "an empty extent was not given back"

    @property
    def _mapped(self) -> int:
        return self.num_extents - len(self._unmapped)

    def _open(self) -> int:
        if self._spare:
            return self._spare.pop()
        if self._mapped >= self.budget_extents:
            raise OutOfMemory("no extent of this class has a free place and none is empty")
        extent = self._unmapped[-1]
        self._backing.map(extent * self._extent_bytes, self._extent_bytes)
        return self._unmapped.pop()

    def _close(self, extent: int) -> None:
        self._spare.append(extent)
        if self.excess or len(self._spare) > SPARE_EXTENTS_MAX:
            self._unmap(self._spare.pop(0))

    def _unmap(self, extent: int) -> None:
        self._backing.unmap(extent * self._extent_bytes, self._extent_bytes)
        self._unmapped.append(extent)
