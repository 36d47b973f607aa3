"""The arena and the prefix index together: cached objects fill the memory that leases do not use.

An object is pinned while a lease owns it or pins its entry, and cached while only the index has it.
Cached objects are evicted when a lease needs memory, in an order that loses least (`eviction.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId, WindowId
from tidemill.kvstore.memory import eviction
from tidemill.kvstore.memory.arena import Arena, Id, Pool
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.retention import Retention
from tidemill.kvstore.memory.spare_value import SpareValue
from tidemill.kvstore.memory.windows import WindowCounts

ChooseVictim = Callable[[PrefixIndex, Arena, Layout], eviction.Victim | None]
"""Chooses the entries to evict for an allocation; None when no eviction would help."""


class Cache:
    """Allocates pages, states and window pages for leases, and caches those of the prefix index."""

    def __init__(self, layout: Layout, arena: Arena, index: PrefixIndex) -> None:
        self.layout = layout
        self.arena = arena
        self.index = index
        self.retention = Retention(index, layout, lambda: arena.budget_extents * layout.extent_bytes)
        self.spares = SpareValue(index, layout)
        self.counters: Counter[str] = Counter()
        self.windows = WindowCounts(arena.windows)
        self.promised_pages = 0  # to leases that take them later; until then the cache may use their memory

    def take_page(self) -> PageId:
        """Allocate a pinned page, or evict for it. Raises OutOfMemory if all is pinned."""
        return self._take(self.arena.pages, eviction.for_page, "pages")

    def take_state(self) -> StateId:
        """Allocate a pinned state, or evict for it. Raises OutOfMemory if no extent has room."""
        return self._take(self.arena.states, eviction.for_state, "states")

    def take_window(self) -> WindowId:
        """Allocate a pinned window page, or evict for it. Raises OutOfMemory."""
        window = self._take(self.arena.windows, eviction.for_state, "windows")
        self.windows.pin_new(window)
        return window

    def free_state_below(self, price: float) -> bool:
        """Return whether a state can be taken without eviction. If need be, evict what costs less than
        `price`."""
        while not self.state_is_free():
            victim = eviction.for_state(self.index, self.arena, self.layout)
            if victim is None or victim.price >= price:
                return False
            self._evict(victim, "states")
        return True

    def free_page(self, page: PageId) -> None:
        self.arena.pages.free(page)

    def free_state(self, state: StateId) -> None:
        self.arena.states.free(state)

    def could_hold(self, pages: int, states: int, windows: int = 0) -> bool:
        """Return whether these numbers of objects would fit, beside the promised pages, after evicting all
        that is cached."""
        left = self._reclaimable_extents()
        left -= _extents_for(self.arena.states, states) + _extents_for(self.arena.windows, windows)
        return (
            left >= 0
            and pages + self.promised_pages
            <= _room_beside_pinned(self.arena.pages) + left * self.arena.pages.objects_per_extent
        )

    def promise(self, lease: Lease, num_pages: int) -> None:
        """Promise `num_pages` more pages to `lease`; fewer when it takes them, or needs them no more."""
        lease.promised_pages += num_pages
        self.promised_pages += num_pages

    def clear(self) -> None:
        """Evict everything that is cached."""
        while (leaf := self.index.cheapest_leaf()) is not None:
            self._evict(eviction.Victim(entries=(leaf,)), "clear")
        while (entry := self.index.cheapest_checkpoint()) is not None:
            self.drop_checkpoint(entry, "clear")

    def state_is_free(self) -> bool:
        """Return whether a state can be taken without eviction, now or for a promised page."""
        pages = self.arena.pages
        promised_extents = -(-max(0, self.promised_pages - pages.num_free) // pages.objects_per_extent)
        return bool(self.arena.states.num_free) or self.arena.num_empty > promised_extents

    def resize(self, budget_extents: int) -> bool:
        """Change the budget of the arena and evict; return whether the budget is met."""
        self.arena.resize(budget_extents)
        while self.arena.excess:
            victim = eviction.for_extent(self.index, self.arena, self.layout)
            if victim is None:
                return False
            self._evict(victim, "resize")
        return True

    def insert(self, parent: Entry | None, key: PageKey, page: PageId) -> tuple[Entry, bool]:
        """Insert a pinned page into the index, see `PrefixIndex.insert`; its entry is pinned."""
        entry, taken_over = self.index.insert(parent, key, page)
        if not taken_over and entry.pins == 1:
            self.arena.pages.pin(entry.page)
        return entry, taken_over

    def keep_checkpoint(
        self, entry: Entry, checkpoint: Checkpoint, *, spare: bool = False, credit: float = 0.0
    ) -> None:
        """Move the pinned state of a checkpoint to the index, and share its window pages."""
        self.index.keep_checkpoint(entry, checkpoint, spare=spare, credit=credit)
        if checkpoint.state is not None:
            self.arena.states.unpin(checkpoint.state)
        self.windows.cache(checkpoint.windows)

    def drop_checkpoint(self, entry: Entry, reason: str) -> None:
        """Evict the checkpoint of `entry`. The name of a metric contains `reason`."""
        self.retention.forget(entry)
        self._free_checkpoint(self.index.drop_checkpoint(entry), reason)

    def reclaim_checkpoint(self, entry: Entry) -> StateId | None:
        """Remove the checkpoint of `entry`; return the slot of its state, pinned."""
        self.retention.forget(entry)
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
        leased_pages: Sequence[PageId],
        leased_states: Sequence[StateId],
        leased_windows: Sequence[WindowId] = (),
    ) -> None:
        """Prove that each page and state is free, or has exactly one owner: a lease or the index.

        Prove also that each window page is counted once for each lease and each checkpoint that has
        it.
        """
        pinned_pages, cached_pages = list(leased_pages), list[PageId]()
        pinned_states, cached_states = list(leased_states), list[StateId]()
        pinned, cached = Counter(leased_windows), Counter[WindowId]()
        for entry in self.index:
            (pinned_pages if entry.pins else cached_pages).append(entry.page)
            if entry.checkpoint is None:
                continue
            if entry.checkpoint.state is not None:
                (pinned_states if entry.checkpoint_pins else cached_states).append(entry.checkpoint.state)
            cached.update(entry.checkpoint.windows)
            pinned.update(entry.checkpoint.windows if entry.checkpoint_pins else ())
        self.windows.check(pinned, cached)
        windows = (list(pinned), [window for window in cached if window not in pinned])
        self.arena.check((pinned_pages, cached_pages), (pinned_states, cached_states), windows)
        self.index.check()
        self.retention.check()

    def _free_checkpoint(self, checkpoint: Checkpoint, reason: str) -> None:
        if checkpoint.state is not None:
            self.arena.states.free(checkpoint.state)
        self.windows.drop(checkpoint.windows)
        self.counters[f"evicted_checkpoints_for_{reason}"] += 1

    def _reclaimable_extents(self) -> int:
        """Return the number of extents within the budget that are empty or can be emptied."""
        arena = self.arena
        extents = arena.num_empty + sum(
            len(pool.reclaimable) for pool in (arena.pages, arena.states, arena.windows)
        )
        return max(0, extents - arena.excess)

    def _take(self, pool: Pool[Id], choose: ChooseVictim, reason: str) -> Id:
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
            self.retention.forget(entry)
            self.index.remove(entry)
            self.arena.pages.free(entry.page)
            if entry.checkpoint is not None:
                self._free_checkpoint(entry.checkpoint, reason)
        for entry in victim.checkpoints_only:
            self.drop_checkpoint(entry, reason)
        self.counters[f"evicted_pages_for_{reason}"] += len(victim.entries)


def _room_beside_pinned(pool: Pool[Id]) -> int:
    """Return the number of free or cached ids in extents that have pinned ids too."""
    return (pool.num_extents - len(pool.reclaimable)) * pool.objects_per_extent - pool.num_pinned


def _extents_for(pool: Pool[Id], count: int) -> int:
    """Return the number of further extents that `count` objects need."""
    return -(-max(0, count - _room_beside_pinned(pool)) // pool.objects_per_extent)
