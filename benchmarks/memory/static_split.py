"""The baseline, as in other engines: the same memory, statically split between pages and states.

Each class has its own extents and evicts only its own objects. Within a class, eviction is like in
the elastic arena.
"""

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Layout, PageId, StateId
from tidemill.kvstore.memory.arena import Arena, Pool
from tidemill.kvstore.memory.backing import Backing
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.eviction import Victim
from tidemill.kvstore.memory.prefix_index import PrefixIndex


class StaticArena(Arena):
    """An arena with `page_extents` for pages and the rest for states."""

    def __init__(self, layout: Layout, num_extents: int, backing: Backing, page_extents: int) -> None:
        assert 0 < page_extents < num_extents
        super().__init__(layout, num_extents, backing)
        self.page_extents_max = page_extents
        self.state_extents_max = num_extents - page_extents
        self.pages: Pool[PageId] = Pool(layout.pages_per_extent, self._open_for_pages, self._close)
        self.states: Pool[StateId] = Pool(layout.states_per_extent, self._open_for_states, self._close)

    def _open_for_pages(self) -> int:
        return self._open_below(self.pages.num_extents, self.page_extents_max)

    def _open_for_states(self) -> int:
        return self._open_below(self.states.num_extents, self.state_extents_max)

    def _open_below(self, num_extents: int, extents_max: int) -> int:
        if num_extents >= extents_max:
            raise OutOfMemory("this class has all the extents of its share")
        return self._open()


class StaticCache(Cache):
    def __init__(self, layout: Layout, arena: StaticArena, index: PrefixIndex) -> None:
        super().__init__(layout, arena, index)
        self._split = arena

    def take_page(self) -> PageId:
        return self._take(self.arena.pages, _leaf, "pages")

    def take_state(self) -> StateId:
        return self._take(self.arena.states, _checkpoint, "states")

    def could_hold(self, pages: int, states: int, windows: int = 0) -> bool:
        """Return whether each class has room in its own share. Models have no windows here."""
        assert not windows
        split = self._split
        pages_max = split.page_extents_max * split.pages.objects_per_extent
        states_max = split.state_extents_max * split.states.objects_per_extent
        return split.pages.num_pinned + pages <= pages_max and split.states.num_pinned + states <= states_max

    def state_is_free(self) -> bool:
        states = self.arena.states
        return states.num_free > 0 or states.num_extents < self._split.state_extents_max


def _leaf(index: PrefixIndex, _arena: Arena, _layout: Layout) -> Victim | None:
    leaf = index.cheapest_leaf()
    if leaf is None:
        return None
    return Victim(entries=(leaf,), price=index.credit(leaf) if index.is_restorable(leaf) else 0.0)


def _checkpoint(index: PrefixIndex, _arena: Arena, _layout: Layout) -> Victim | None:
    owner = index.cheapest_checkpoint()
    return None if owner is None else Victim(checkpoints_only=(owner,), price=index.credit(owner))
