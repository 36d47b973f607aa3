"""The arena and the prefix index together: cached objects fill the memory that leases do not use.

An object is pinned while a lease has it or pins its entry, and cached while only the index has it.
Cached objects are evicted when a lease needs memory, in an order that loses least (`eviction.py`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PAGES, Layout, PageId
from tidemill.kvstore.memory import eviction
from tidemill.kvstore.memory.arena import Arena, Pool
from tidemill.kvstore.memory.demand import Demand
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.evictions import Evicted, Evictions
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.retention import Retention
from tidemill.kvstore.memory.spare_value import SpareValue


class Cache:
    """Allocates the objects of leases, and caches those of the prefix index."""

    def __init__(self, layout: Layout, arena: Arena, index: PrefixIndex) -> None:
        self.layout = layout
        self.arena = arena
        self.index = index
        self.retention = Retention(index, layout, lambda: arena.budget_extents * layout.extent_bytes)
        self.spares = SpareValue(index, layout)
        self.counters: Counter[str] = Counter()
        self.evictions = Evictions()
        self.pools = arena.pools
        self.promised_pages = 0  # to leases that take them later; until then the cache may use their memory

    def take(self, name: str, tenant: str = "") -> Any:  # noqa: ANN401  an id of that class
        """Allocate a pinned object of a class for a request of `tenant`, or evict for it. Raises OutOfMemory
        if all is pinned, or if no extent has room."""
        pool = self.pools[name]
        while True:
            try:
                return pool.take()
            except OutOfMemory:
                victim = self._victim_for(name)
                if victim is None:
                    raise
                self._evict(victim, name, tenant)

    def free_below(self, price: float, name: str, tenant: str) -> bool:
        """Return whether an object of a class can be taken without eviction. If need be, evict what costs
        less than `price`."""
        while not self.is_free(name):
            victim = self._victim_for(name)
            if victim is None or victim.price >= price:
                return False
            self._evict(victim, name, tenant)
        return True

    def could_hold(self, demand: Demand) -> bool:
        """Return whether these numbers of objects would fit, beside the promised pages, after evicting all
        that is cached."""
        wanted = {**demand, PAGES: demand.get(PAGES, 0) + self.promised_pages}
        extents = sum(_extents_for(self.pools[name], count) for name, count in wanted.items())
        return extents <= self._reclaimable_extents()

    def promise(self, lease: Lease, num_pages: int) -> None:
        """Promise `num_pages` more pages to `lease`; fewer when it takes them, or needs them no more."""
        lease.promised_pages += num_pages
        self.promised_pages += num_pages

    def clear(self, tenant: str = "") -> None:
        """Evict everything that is cached, for a request of `tenant`."""
        while (leaf := self.index.cheapest_leaf()) is not None:
            self._evict(eviction.Victim(entries=(leaf,)), "clear", tenant)
        while (entry := self.index.cheapest_checkpoint()) is not None:
            self.drop_checkpoint(entry, "clear", tenant)

    def is_free(self, name: str) -> bool:
        """Return whether an object of a class other than pages can be taken without eviction, now or for a
        promised page."""
        pages = self.pools[PAGES]
        promised_extents = -(-max(0, self.promised_pages - pages.num_free) // pages.objects_per_extent)
        return bool(self.pools[name].num_free) or self.arena.num_empty > promised_extents

    def resize(self, budget_extents: int) -> bool:
        """Change the budget of the arena and evict; return whether the budget is met. If not, the caller
        preempts requests and calls again."""
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
        if taken_over:
            self.pools[PAGES].own(page, entry)
        elif entry.pins == 1:
            self.pools[PAGES].pin(entry.page)
        return entry, taken_over

    def keep_checkpoint(
        self, entry: Entry, checkpoint: Checkpoint, *, spare: bool = False, credit: float = 0.0
    ) -> None:
        """Move the pinned state of a checkpoint to the index, and share its window pages."""
        self.index.keep_checkpoint(entry, checkpoint, spare=spare, credit=credit)
        for name, ids in checkpoint.by_class():
            for part in ids:
                self.pools[name].own(part, entry)
        self.pools[self.layout.saved].unpin_all(checkpoint.saved)

    def drop_checkpoint(self, entry: Entry, reason: str, tenant: str = "") -> None:
        """Evict the checkpoint of `entry`. The name of a metric contains `reason`."""
        self.note(entry, reason, tenant)
        self.retention.forget(entry)
        self._disown(entry, self.index.drop_checkpoint(entry))
        self.counters[f"evicted_checkpoints_for_{reason}"] += 1

    def note(self, entry: Entry, reason: str, tenant: str) -> None:
        """Remember the eviction of a depth that could be restored."""
        expired = entry.retained_s > 0.0 and entry.retained_until_s <= self.index.now_s
        self.evictions.add(entry.key, Evicted(reason, self.index.now_s, tenant, expired))

    def reclaim_checkpoint(self, entry: Entry) -> tuple[Any, ...]:
        """Remove the checkpoint of `entry`; return the slot of its state, if it has one, pinned."""
        self.retention.forget(entry)
        checkpoint = self.index.drop_checkpoint(entry)
        for state in checkpoint.saved:
            self.pools[self.layout.saved].pin(state)
        self._disown(entry, checkpoint)
        return checkpoint.saved

    def pin(self, entry: Entry) -> None:
        if not entry.pins:
            self.pools[PAGES].pin(entry.page)
        self.index.pin(entry)

    def unpin(self, entry: Entry) -> None:
        self.index.unpin(entry)
        if not entry.pins:
            self.pools[PAGES].unpin(entry.page)

    def pin_checkpoint(self, entry: Entry) -> Entry:
        assert entry.checkpoint is not None
        if not entry.checkpoint_pins:
            for name, ids in entry.checkpoint.by_class():
                for part in ids:
                    self.pools[name].pin(part)
        self.index.pin_checkpoint(entry)
        return entry

    def unpin_checkpoint(self, entry: Entry) -> None:
        self.index.unpin_checkpoint(entry)
        if not entry.checkpoint_pins:
            assert entry.checkpoint is not None
            for name, ids in entry.checkpoint.by_class():
                self.pools[name].unpin_all(ids)

    def check(self, leased: Iterable[Mapping[str, Sequence[Any]]]) -> None:
        """Prove that each object is free or has its owners; `leased` are those of each lease, by class."""
        of_leases = {name: Counter[Any]() for name in self.pools}
        read = {name: Counter[Any]() for name in self.pools}
        owners = {name: dict[Any, dict[Entry, None]]() for name in self.pools}
        for name, ids in chain.from_iterable(owned.items() for owned in leased):
            of_leases[name].update(ids)
        for entry in self.index:
            parts = entry.checkpoint.by_class() if entry.checkpoint else ()
            for name, ids, pins in (
                (PAGES, (entry.page,), entry.pins),
                *((name, ids, entry.checkpoint_pins) for name, ids in parts),
            ):
                read[name].update(ids if pins else ())
                for part in ids:
                    owners[name].setdefault(part, {})[entry] = None
        checks = (pool.check(of_leases[name], read[name], owners[name]) for name, pool in self.pools.items())
        self.arena.check(chain.from_iterable(checks))
        self.index.check()
        self.retention.check()

    def _disown(self, entry: Entry, checkpoint: Checkpoint) -> None:
        for name, ids in checkpoint.by_class():
            for part in ids:
                self.pools[name].disown(part, entry)

    def _reclaimable_extents(self) -> int:
        """Return the number of extents within the budget that are empty or can be emptied."""
        extents = self.arena.num_empty + sum(len(pool.reclaimable) for pool in self.pools.values())
        return max(0, extents - self.arena.excess)

    def _victim_for(self, name: str) -> eviction.Victim | None:
        """Choose the entries to evict for an object of a class; None when no eviction would help."""
        choose = eviction.for_page if name == PAGES else eviction.for_other
        return choose(self.index, self.arena, self.layout)

    def _evict(self, victim: eviction.Victim, reason: str, tenant: str = "") -> None:
        self.index.age(victim.price)
        for entry in victim.entries:
            if self.index.is_restorable(entry):
                self.note(entry, reason, tenant)
            self.retention.forget(entry)
            self.index.remove(entry)
            self.pools[PAGES].disown(entry.page, entry)
            if entry.checkpoint is not None:
                self._disown(entry, entry.checkpoint)
                self.counters[f"evicted_checkpoints_for_{reason}"] += 1
        for entry in victim.checkpoints_only:
            self.drop_checkpoint(entry, reason, tenant)
        self.counters[f"evicted_pages_for_{reason}"] += len(victim.entries)


def _extents_for(pool: Pool[Any], count: int) -> int:
    """Return the number of further extents that `count` objects need, beside the free and the cached ones in
    extents that have pinned ones too."""
    beside = (pool.num_extents - len(pool.reclaimable)) * pool.objects_per_extent - pool.num_pinned
    return -(-max(0, count - beside) // pool.objects_per_extent)
