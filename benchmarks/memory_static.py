"""What other engines do, as the baseline: the same memory, split at the start between pages and states.

Each class has its own extents and evicts its own: a page never gives way to a state, nor a state to a page.
Within its class eviction is as in the elastic arena.
"""

from tidemill.kvstore.arena import Arena, Pool
from tidemill.kvstore.backing import Backing
from tidemill.kvstore.cache import Cache
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.eviction import Victim
from tidemill.kvstore.index import PrefixIndex
from tidemill.kvstore.layout import Layout, PageId, StateId


class StaticArena(Arena):
    """An arena of which `page_extents` can hold pages, and the rest states."""

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
        while True:
            try:
                return self.arena.pages.take()
            except OutOfMemory:
                leaf = self.index.cheapest_leaf()
                if leaf is None:
                    raise
                price = self.index.credit(leaf) if self.index.is_restorable(leaf) else 0.0
                self._evict(Victim(entries=(leaf,), price=price), "pages")

    def take_state(self) -> StateId:
        while True:
            try:
                return self.arena.states.take()
            except OutOfMemory:
                owner = self.index.cheapest_checkpoint()
                if owner is None:
                    raise
                self._evict(Victim(bare=(owner,), price=self.index.credit(owner)), "states")

    def pages_available(self) -> int:
        pages = self.arena.pages
        closed = self._split.page_extents_max - pages.num_extents
        return pages.num_free + pages.num_kept + closed * self.layout.pages_per_extent

    def state_is_free(self) -> bool:
        states = self.arena.states
        return states.num_free > 0 or states.num_extents < self._split.state_extents_max
