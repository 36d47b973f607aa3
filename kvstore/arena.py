"""One reservation cut into equal extents that hold pages, or states, or nothing.

    extent 0        extent 1        extent 2        extent 3
    [p p p . p .]   [s s s]         [. . . . . .]   [p p p p p p]      p, s: taken    .: free
     pages           states          nothing         pages

An empty extent changes class freely: that is the whole of the elasticity between KV and state. Allocation
prefers the fullest extent that is not full, so that extents empty out; both directions are amortised O(1).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tidemill.kvstore.backing import Backing
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Layout, PageId, StateId

ExtentClass = Literal["pages", "states"]

SPARE_EXTENTS_MAX = 8
"""Empty extents that stay mapped, so that a workload that breathes does not map and unmap at every breath."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Extents by what they hold, and objects taken."""

    page_extents: int
    state_extents: int
    empty_extents: int
    pages_taken: int
    states_taken: int


class _Class:
    """The extents of one class, bucketed by how many of their places are taken."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.free: dict[int, list[int]] = {}  # extent -> its free ids
        self.taken: set[int] = set()
        self._buckets: list[dict[int, None]] = [{} for _ in range(places + 1)]
        self._fullest = 0

    def open(self, extent: int) -> None:
        """Take an empty extent into the class."""
        first = extent * self.places
        self.free[extent] = list(range(first + self.places - 1, first - 1, -1))
        self._place(extent, 0)

    def take(self) -> int | None:
        """An id from the fullest extent that has one, or None."""
        while self._fullest >= 0 and not self._buckets[self._fullest]:
            self._fullest -= 1
        if self._fullest < 0:
            self._fullest = 0
            return None
        extent = next(iter(self._buckets[self._fullest]))
        del self._buckets[self._fullest][extent]
        taken = self.free[extent].pop()
        self.taken.add(taken)
        self._place(extent, self.places - len(self.free[extent]))
        return taken

    def give(self, given: int) -> int | None:
        """Return an id; answers its extent when that is empty now and has left the class."""
        assert given in self.taken, f"{given} is given back twice, or was never taken"
        self.taken.remove(given)
        extent = given // self.places
        before = self.places - len(self.free[extent])
        self._buckets[before].pop(extent, None)
        self.free[extent].append(given)
        if before > 1:
            self._place(extent, before - 1)
            return None
        del self.free[extent]
        return extent

    def _place(self, extent: int, count: int) -> None:
        if count < self.places:  # a full extent is in no bucket: nothing can be taken from it
            self._buckets[count][extent] = None
            self._fullest = max(self._fullest, count)


class Arena:
    """Hands out page ids and state ids. Raises OutOfMemory, which is expected under load."""

    def __init__(self, layout: Layout, num_extents: int, backing: Backing) -> None:
        assert num_extents > 0
        self.num_extents = num_extents
        self._layout = layout
        self._backing = backing
        self._pages = _Class(layout.pages_per_extent)
        self._states = _Class(max(1, layout.states_per_extent))
        self._unmapped = list(range(num_extents - 1, -1, -1))
        self._spare: list[int] = []  # empty and mapped

    def take_page(self) -> PageId:
        return PageId(self._take(self._pages))

    def take_state(self) -> StateId:
        assert self._layout.hybrid
        return StateId(self._take(self._states))

    def give_page(self, page: PageId) -> None:
        self._give(self._pages, page)

    def give_state(self, state: StateId) -> None:
        self._give(self._states, state)

    def usage(self) -> Usage:
        return Usage(
            page_extents=len(self._pages.free),
            state_extents=len(self._states.free),
            empty_extents=self._empty(),
            pages_taken=len(self._pages.taken),
            states_taken=len(self._states.taken),
        )

    def check(self, pages: Iterable[PageId], states: Iterable[StateId]) -> None:
        """Prove that exactly `pages` and `states` are taken, and that every extent is in one place."""
        owned_pages, owned_states = list(pages), list(states)
        assert len(set(owned_pages)) == len(owned_pages), "a page has two owners"
        assert len(set(owned_states)) == len(owned_states), "a state has two owners"
        assert set(owned_pages) == self._pages.taken, "a page leaked or was freed under its owner"
        assert set(owned_states) == self._states.taken, "a state leaked or was freed under its owner"
        extents = [*self._pages.free, *self._states.free, *self._spare, *self._unmapped]
        assert sorted(extents) == list(range(self.num_extents)), "an extent is lost or in two places"
        for kind in (self._pages, self._states):
            free = [place for places in kind.free.values() for place in places]
            assert len(free) + len(kind.taken) == len(kind.free) * kind.places
            assert kind.taken.isdisjoint(free)

    def _empty(self) -> int:
        return len(self._spare) + len(self._unmapped)

    def _take(self, kind: _Class) -> int:
        taken = kind.take()
        if taken is not None:
            return taken
        if self._spare:
            extent = self._spare.pop()
        elif self._unmapped:
            extent = self._unmapped.pop()
            self._backing.map(extent * self._layout.extent_bytes, self._layout.extent_bytes)
        else:
            raise OutOfMemory("no extent of this class has a free place and none is empty")
        kind.open(extent)
        taken = kind.take()
        assert taken is not None
        return taken

    def _give(self, kind: _Class, given: int) -> None:
        emptied = kind.give(given)
        if emptied is None:
            return
        self._spare.append(emptied)
        if len(self._spare) > SPARE_EXTENTS_MAX:
            extent = self._spare.pop(0)
            self._backing.unmap(extent * self._layout.extent_bytes, self._layout.extent_bytes)
            self._unmapped.append(extent)
