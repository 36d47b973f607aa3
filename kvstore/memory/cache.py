"""The arena and the prefix index as one: what is kept fills the memory, and is given up when it is needed.

An object is held while a lease owns it or pins its entry, and kept while the index alone has it. Whatever is
kept can be evicted, in an order that loses least (`eviction.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId, WindowId
from tidemill.kvstore.memory import eviction
from tidemill.kvstore.memory.arena import Arena, Id, Pool
from tidemill.kvstore.memory.prefix_index import Checkpoint, Entry, PrefixIndex
from tidemill.kvstore.memory.windows import WindowCounts

Choose = Callable[[PrefixIndex, Arena, Layout], eviction.Victim | None]
"""What goes so that something can be taken; None when nothing that is kept would help."""


class Cache:
    def __init__(self, layout: Layout, arena: Arena, index: PrefixIndex) -> None:
        self.layout = layout
        self.arena = arena
        self.index = index
        self.counters: Counter[str] = Counter()
        self.windows = WindowCounts(arena.windows)

    def take_page(self) -> PageId:
        """A page, held; evicts what it takes. Raises OutOfMemory when everything is held."""
        return self._take(self.arena.pages, eviction.for_page, "pages")

    def take_state(self) -> StateId:
        """A state, held; evicts what it takes. Raises OutOfMemory when all extents hold what is held."""
        return self._take(self.arena.states, eviction.for_state, "states")

    def take_window(self) -> WindowId:
        """A window page, held; evicts what it takes. Raises OutOfMemory as `take_state` does."""
        window = self._take(self.arena.windows, eviction.for_state, "windows")
        self.windows.taken(window)
        return window

    def free_page(self, page: PageId) -> None:
        self.arena.pages.free(page)

    def free_state(self, state: StateId) -> None:
        self.arena.states.free(state)

    def could_hold(self, pages: int, states: int, windows: int = 0) -> bool:
        """Whether so many more could be held if everything that is kept was given up."""
        left = self._reclaimable_extents()
        left -= _extents_for(self.arena.states, states) + _extents_for(self.arena.windows, windows)
        return (
            left >= 0
            and pages <= _objects_per_extent(self.arena.pages) + left * self.arena.pages.objects_per_extent
        )

    def clear(self) -> None:
        """Give up everything that is kept."""
        while (leaf := self.index.cheapest_leaf()) is not None:
            self._evict(eviction.Victim(entries=(leaf,)), "clear")
        while (entry := self.index.cheapest_checkpoint()) is not None:
            self.drop_checkpoint(entry, "clear")

    def state_is_free(self) -> bool:
        """Whether a state can be taken without evicting anything."""
        return bool(self.arena.states.num_free or self.arena.num_empty)

    def resize(self, budget_extents: int) -> bool:
        """Change what the arena may map; evicts what is kept, and answers whether that was enough."""
        self.arena.resize(budget_extents)
        while self.arena.excess:
            victim = eviction.for_extent(self.index, self.arena, self.layout)
            if victim is None:
                return False
            self._evict(victim, "resize")
        return True

    def insert(self, parent: Entry | None, key: PageKey, page: PageId) -> tuple[Entry, bool]:
        """`PrefixIndex.insert` of a page that is held; the entry is pinned."""
        entry, taken_over = self.index.insert(parent, key, page)
        if not taken_over and entry.pins == 1:
            self.arena.pages.pin(entry.page)
        return entry, taken_over

    def keep_checkpoint(self, entry: Entry, checkpoint: Checkpoint) -> None:
        """The caller holds it: its state is the index's from now on, its window pages both have."""
        self.index.keep_checkpoint(entry, checkpoint)
        if checkpoint.state is not None:
            self.arena.states.unpin(checkpoint.state)
        self.windows.cache(checkpoint.windows)

    def drop_checkpoint(self, entry: Entry, reason: str) -> None:
        """`reason` ends up in the name of a metric."""
        self._free_checkpoint(self.index.drop_checkpoint(entry), reason)

    def reclaim_checkpoint(self, entry: Entry) -> StateId | None:
        """Take the checkpoint out of the index; the caller holds the slot, if there is one, and can write to
        it."""
        state, windows = self.index.drop_checkpoint(entry)
        self.windows.drop(windows)
        if state is not None:
            self.arena.states.pin(state)
        return state

    def pin(self, entry: Entry) -> None:
        if not entry.pins:
            self.arena.pages.pin(entry.page)
        self.index.pin(entry)

    def unpin(self, entry: Entry) -> None:
        self.index.unpin(entry)
        if not entry.pins:
            self.arena.pages.unpin(entry.page)

    def pin_checkpoint(self, entry: Entry) -> Entry:
        assert entry.checkpoint is not None
        if not entry.checkpoint_pins:
            if entry.checkpoint.state is not None:
                self.arena.states.pin(entry.checkpoint.state)
            self.windows.pin(entry.checkpoint.windows)
        self.index.pin_checkpoint(entry)
        return entry

    def unpin_checkpoint(self, entry: Entry) -> None:
        self.index.unpin_checkpoint(entry)
        if not entry.checkpoint_pins:
            assert entry.checkpoint is not None
            if entry.checkpoint.state is not None:
                self.arena.states.unpin(entry.checkpoint.state)
            self.windows.unpin(entry.checkpoint.windows)

    def check(
        self,
        own_pages: Sequence[PageId],
        own_states: Sequence[StateId],
        own_windows: Sequence[WindowId] = (),
    ) -> None:
        """Prove that every byte is free, or held by these owners, or held or kept by the index: by exactly
        one, window pages aside, which are as often held and kept as there are reasons."""
        held_pages, kept_pages = list(own_pages), list[PageId]()
        held_states, kept_states = list(own_states), list[StateId]()
        holders, keepers = Counter(own_windows), Counter[WindowId]()
        for entry in self.index:
            (held_pages if entry.pins else kept_pages).append(entry.page)
            if entry.checkpoint is None:
                continue
            if entry.checkpoint.state is not None:
                (held_states if entry.checkpoint_pins else kept_states).append(entry.checkpoint.state)
            keepers.update(entry.checkpoint.windows)
            holders.update(entry.checkpoint.windows if entry.checkpoint_pins else ())
        self.windows.check(holders, keepers)
        windows = (list(holders), [window for window in keepers if window not in holders])
        self.arena.check((held_pages, kept_pages), (held_states, kept_states), windows)
        self.index.check()

    def _free_checkpoint(self, checkpoint: Checkpoint, reason: str) -> None:
        if checkpoint.state is not None:
            self.arena.states.free(checkpoint.state)
        self.windows.drop(checkpoint.windows)
        self.counters[f"evicted_checkpoints_for_{reason}"] += 1

    def _reclaimable_extents(self) -> int:
        """Extents in which nothing is held; above the budget they cannot be used again."""
        arena = self.arena
        extents = arena.num_empty + sum(
            len(pool.reclaimable) for pool in (arena.pages, arena.states, arena.windows)
        )
        return max(0, extents - arena.excess)

    def _take(self, pool: Pool[Id], choose: Choose, reason: str) -> Id:
        while True:
            try:
                return pool.take()
            except OutOfMemory:
                victim = choose(self.index, self.arena, self.layout)
                if victim is None:
                    raise
                self._evict(victim, reason)

    def _evict(self, victim: eviction.Victim, reason: str) -> None:
        self.index.age(victim.price)
        for entry in victim.entries:
            self.index.remove(entry)
            self.arena.pages.free(entry.page)
            if entry.checkpoint is not None:
                self._free_checkpoint(entry.checkpoint, reason)
        for entry in victim.checkpoints_only:
            self.drop_checkpoint(entry, reason)
        self.counters[f"evicted_pages_for_{reason}"] += len(victim.entries)


def _objects_per_extent(pool: Pool[Id]) -> int:
    """In extents where something is held, places that are free or kept."""
    return (pool.num_extents - len(pool.reclaimable)) * pool.objects_per_extent - pool.num_pinned


def _extents_for(pool: Pool[Id], count: int) -> int:
    """How many extents more it takes to hold so many."""
    return -(-max(0, count - _objects_per_extent(pool)) // pool.objects_per_extent)
