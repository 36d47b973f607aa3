"""The arena: one reservation cut into equal extents, each of which holds objects of one class.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Layout, ObjectClass, PageId, StateId, WindowId
from tidemill.kvstore.memory.backing import Backing
from tidemill.kvstore.memory.entry import Entry

Id = TypeVar("Id", PageId, StateId, WindowId)

SPARE_EXTENTS_MAX = 8
"""Empty extents that stay mapped, so that a fluctuating load does not keep remapping them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaUsage:
    """The number of extents, and of objects that are pinned or cached, by class."""

    extents: Mapping[str, int]
    pinned: Mapping[str, int]
    cached: Mapping[str, int]
    empty_extents: int  # mapped
    unmapped_extents: int  # of the budget


class Pool(Generic[Id]):
    """The objects of one class, and the pins and owners of each. Extents in `reclaimable` have no pins.

    A pin is a lease that has the object, or an entry of the index from which leases read it. An owner is an
    entry that has it, be it read or not. An object with owners alone is cached; with neither it is free.
    """

    def __init__(
        self, row: ObjectClass, open_extent: Callable[[], int], close: Callable[[int], None]
    ) -> None:
        self.shared = row.shared
        self.objects_per_extent = max(1, row.per_extent)
        self.reclaimable: dict[int, None] = {}
        self._open_extent = open_extent
        self._close = close
        self._free: dict[int, list[int]] = {}  # extent -> its free ids
        self._pinned: dict[int, int] = {}  # extent -> number of its pinned ids
        self._num_taken = 0
        self._pins: dict[int, int] = {}
        self._owners: dict[int, Any] = {}  # an entry, or of a shared class a dictionary of them
        # Extents that are not full, by their number of taken ids.
        self._buckets: list[dict[int, None]] = [{} for _ in range(self.objects_per_extent + 1)]
        self._fullest = 0

    def take(self) -> Id:
        """Allocate an id with one pin. Raises OutOfMemory."""
        while self._fullest and not self._buckets[self._fullest]:
            self._fullest -= 1
        if not self._buckets[self._fullest]:
            self._open(self._open_extent())
        extent = next(iter(self._buckets[self._fullest]))
        del self._buckets[self._fullest][extent]
        taken = self._free[extent].pop()
        self._num_taken += 1
        self._pins[taken] = 1
        self._put_in_bucket(extent, self.objects_per_extent - len(self._free[extent]))
        self._count_pinned(extent, 1)
        return taken  # pyrefly: ignore[bad-return]  an id is a NewType of int

    def pin(self, taken: Id) -> None:
        """Add a pin to an object that is pinned or cached."""
        pins = self._pins.get(taken, 0)
        if not pins:
            assert taken in self._owners, f"{taken} is pinned, but it is free"
            self._count_pinned(taken // self.objects_per_extent, 1)
        self._pins[taken] = pins + 1

    def unpin(self, taken: Id) -> None:
        """Remove a pin. Without pins and owners the object is freed."""
        pins = self._pins.pop(taken, 0)
        assert pins, f"{taken} is unpinned twice, or was never pinned"
        if pins > 1:
            self._pins[taken] = pins - 1
            return
        self._count_pinned(taken // self.objects_per_extent, -1)
        if taken not in self._owners:
            self._put_back(taken)

    def unpin_all(self, ids: Iterable[Id]) -> None:
        for taken in ids:
            self.unpin(taken)

    def own(self, taken: Id, owner: Entry) -> None:
        """Add an owner to a pinned object."""
        assert taken in self._pins, f"{taken} is cached without having been pinned"
        if self.shared:
            self._owners.setdefault(taken, {})[owner] = None
        else:
            assert taken not in self._owners, f"{taken} has an owner"
            self._owners[taken] = owner

    def disown(self, taken: Id, owner: Entry) -> None:
        """Remove an owner. Without pins and owners the object is freed."""
        if self.shared:
            del self._owners[taken][owner]
            if self._owners[taken]:
                return
        else:
            assert self._owners[taken] is owner
        del self._owners[taken]
        if taken not in self._pins:
            self._put_back(taken)

    def owners_of(self, taken: Id) -> tuple[Entry, ...]:
        """Return the entries that have an object, in the order in which they got it."""
        owners = self._owners.get(taken, ())
        return tuple(owners) if self.shared or not owners else (owners,)

    def extent_of(self, taken: Id) -> int:
        return taken // self.objects_per_extent

    def taken_in(self, extent: int) -> list[Id]:
        """Return the ids of `extent` that are pinned or cached."""
        first, free = extent * self.objects_per_extent, set(self._free[extent])
        return [number for number in range(first, first + self.objects_per_extent) if number not in free]  # pyrefly: ignore[bad-return]  ids are NewTypes of int

    @property
    def num_extents(self) -> int:
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        return self._num_taken - len(self._pins)

    @property
    def num_free(self) -> int:
        """The number of ids that can be taken without opening another extent."""
        return len(self._free) * self.objects_per_extent - self._num_taken

    def check(
        self, leased: Counter[Any], read: Counter[Any], owners: Mapping[Any, Mapping[Entry, None]]
    ) -> list[int]:
        """Prove that the pins are exactly those of leases and of entries that are read, that the owners are
        exactly `owners`, and that all else is free. Prove also that only objects of a shared class have more
        than one lease or owner. Return the extents of this class."""
        assert leased + read == self._pins, "an object is pinned without a reason, or has lost a pin"
        assert self._owners.keys() == owners.keys(), "an object is cached without an owner"
        assert all(dict.fromkeys(self.owners_of(taken)) == owners[taken] for taken in owners)
        if not self.shared:
            assert all(len(found) == 1 for found in owners.values()), "two entries own an object"
            assert all(count == 1 for count in leased.values()), "two leases own an object"
            assert leased.keys().isdisjoint(owners), "a lease and an entry own an object"
        taken = sorted({*self._pins, *self._owners})
        assert len(taken) == self._num_taken, "an object leaked"
        assert taken == sorted(number for extent in self._free for number in self.taken_in(extent))
        num_pinned = Counter(number // self.objects_per_extent for number in self._pins)
        for extent, free in self._free.items():
            assert len(self.taken_in(extent)) + len(free) == self.objects_per_extent
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

    def _put_back(self, taken: int) -> None:
        """Free an object. If its extent is empty then, the extent leaves the class."""
        extent = taken // self.objects_per_extent
        self._num_taken -= 1
        before = self.objects_per_extent - len(self._free[extent])
        self._buckets[before].pop(extent, None)
        self._free[extent].append(taken)
        if before > 1:
            self._put_in_bucket(extent, before - 1)
            return
        del self._free[extent], self._pinned[extent], self.reclaimable[extent]
        self._close(extent)

    def _put_in_bucket(self, extent: int, num_taken: int) -> None:
        if num_taken < self.objects_per_extent:  # nothing can be taken from a full extent
            self._buckets[num_taken][extent] = None
            self._fullest = max(self._fullest, num_taken)

    def _count_pinned(self, extent: int, change: int) -> None:
        self._pinned[extent] += change
        if self._pinned[extent]:
            self.reclaimable.pop(extent, None)
        else:
            self.reclaimable[extent] = None


class Arena:
    """The extents, and the pools that share them, by class. `take` of a pool raises OutOfMemory, which is
    expected under load."""

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
        self.pools: dict[str, Pool[Any]] = {
            row.name: Pool[Any](row, self._open, self._close) for row in layout.classes
        }
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
        pools = self.pools.items()
        return ArenaUsage(
            extents={name: pool.num_extents for name, pool in pools},
            pinned={name: pool.num_pinned for name, pool in pools},
            cached={name: pool.num_cached for name, pool in pools},
            empty_extents=len(self._spare),
            unmapped_extents=max(0, self.budget_extents - self._mapped),
        )

    def check(self, extents: Iterable[int]) -> None:
        """Prove that each extent is in one class, empty or unmapped; `extents` are those of all pools."""
        found = [*extents, *self._spare, *self._unmapped]
        assert sorted(found) == list(range(self.num_extents)), "an extent is lost or counted twice"
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
