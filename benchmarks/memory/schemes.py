"""Schemes that divide a memory between pages and states, by the names of their owners.

    name            a state takes memory from                a page takes memory from
    split           the share of states                      the share of pages
    sglang-ends     free memory, cached states               free memory, cached pages
    sglang-unified  the same, then cached pages              the same, then cached states
    vllm            free blocks, then whatever was used least recently

They are our implementations of published rules with their defaults, under the ledger and the engine of the
product; no other engine's code runs. Memory is counted in pages. Moves that close holes cost nothing, nor do
tables of addresses. So each is as good as its owner's, or better. What differs from that is in
docs/side_by_side.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.memory.served_model import NoBytes
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import PAGES, STATES, WINDOWS, Layout, ObjectClass
from tidemill.kvstore.memory.arena import Arena, ArenaUsage, Pool
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.demand import Demand
from tidemill.kvstore.memory.eviction import Victim
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme and its owner's order of eviction.

    page_share      the share of extents for pages, the rest is for states; None: both have all
    crosses         a class without cached objects evicts those of the other one
    mixes           both classes evict whichever cached object was used least recently
    page_tokens     the size of a page, if it follows from that of a state
    """

    name: str
    source: str = ""
    page_share: float | None = None
    crosses: bool = False
    mixes: bool = False
    page_tokens: int | None = None
    policy: Policy = "lru"


def split(page_share: float) -> Scheme:
    """Return a split once and for all with the order of the product, which is better than an owner's."""
    return Scheme(name=f"static {page_share:.0%}", page_share=page_share, policy="value")


SCHEMES = (
    Scheme(
        name="sglang-ratio",
        source="SGLang's default: --mamba-full-memory-ratio 0.9, states : pages",
        page_share=1 / 1.9,
    ),
    Scheme(
        name="sglang-ends",
        source="SGLang's --enable-unified-memory as of June 2026, sgl-project/sglang#29678, #34441",
    ),
    Scheme(
        name="sglang-unified",
        source="SGLang's --enable-unified-memory as of September 2026, #33091, #36713",
        crosses=True,
    ),
    Scheme(
        name="vllm",
        source="vLLM's hybrid KV cache manager: blocks of one size, here a third of a state",
        mixes=True,
        page_tokens=1088,
    ),
)


class SchemeArena(Arena):
    """An arena whose objects lie side by side: only their sizes count."""

    def __init__(self, layout: Layout, num_extents: int, scheme: Scheme) -> None:
        super().__init__(layout, num_extents, NoBytes())
        self.scheme = scheme
        self._state_pages = layout.state_stride_bytes // layout.page_bytes
        self._pages_max = num_extents * layout.pages_per_extent
        share = scheme.page_share
        self._share = None if share is None else round(num_extents * share) * layout.pages_per_extent
        pages, states, *_ = layout.classes
        self.pools |= {PAGES: self._pool(pages, 1, 0), STATES: self._pool(states, 0, 1)}

    def fits(self, pages: int, states: int) -> bool:
        """Return whether the memory holds these numbers of objects."""
        of_states = states * self._state_pages
        if self._share is None:
            return pages + of_states <= self._pages_max
        return pages <= self._share and of_states <= self._pages_max - self._share

    def has_room(self, pages: int, states: int) -> bool:
        """Return whether it has room for these numbers beside all that is pinned or cached."""
        return self.fits(self.pools[PAGES].num_extents + pages, self.pools[STATES].num_extents + states)

    def usage(self) -> ArenaUsage:
        usage = super().usage()
        extents = {PAGES: self.num_extents, STATES: 0}  # all is open to pages
        return replace(usage, extents=extents, empty_extents=0, unmapped_extents=0)

    def check(self, extents: Iterable[int]) -> None:
        """Prove that the scheme has room for the objects, whose pools were checked."""
        assert len(list(extents)) == sum(pool.num_extents for pool in self.pools.values())
        assert self.has_room(0, 0), "more memory than there is"

    def _pool(self, row: ObjectClass, pages: int, states: int) -> Pool[Any]:
        ids = list(range(self._pages_max - 1, -1, -1))

        def open_one() -> int:
            if not self.has_room(pages, states):
                raise OutOfMemory(f"{self.scheme.name} has no room for this class")
            return ids.pop()

        return Pool(replace(row, per_extent=1), open_one, ids.append)


class SchemeCache(Cache):
    """A cache in a SchemeArena. A state that only pages could make room for, in a scheme that does not evict
    them for states, empties the cache; its owner's server ended then. `dead_ends` counts these."""

    def __init__(self, layout: Layout, arena: SchemeArena, index: PrefixIndex) -> None:
        super().__init__(layout, arena, index)
        self._arena = arena
        self._scheme = arena.scheme

    def could_hold(self, demand: Demand) -> bool:
        """Return whether these numbers would fit after evicting all that is cached, of either class."""
        assert not demand.get(WINDOWS)
        pages = self.pools[PAGES].num_pinned + self.promised_pages + demand.get(PAGES, 0)
        return self._arena.fits(pages, self.pools[STATES].num_pinned + demand.get(STATES, 0))

    def is_free(self, name: str) -> bool:
        assert name == STATES
        promised = 0 if self._scheme.page_share is not None else self.promised_pages
        return self._arena.has_room(promised, 1)

    def clear(self, tenant: str = "") -> None:
        self.counters["dead_ends"] += 1
        super().clear(tenant)

    def _victim_for(self, name: str) -> Victim | None:
        leaf, checkpoint = _leaf(self.index), _checkpoint(self.index)
        return self._first(leaf, checkpoint) if name == PAGES else self._first(checkpoint, leaf)

    def _first(self, own: Victim | None, other: Victim | None) -> Victim | None:
        """Return the object of the same class, or that of the other one where the scheme allows it."""
        if self._scheme.mixes and own is not None and other is not None:
            return min(own, other, key=self._last_use)
        return own if own is not None or not (self._scheme.crosses or self._scheme.mixes) else other

    def _last_use(self, victim: Victim) -> tuple[float, int]:
        [entry] = victim.entries or victim.checkpoints_only
        return self.index.rank(entry) if self.index.is_restorable(entry) else (0.0, 0)


def _leaf(index: PrefixIndex) -> Victim | None:
    leaf = index.cheapest_leaf()
    if leaf is None:
        return None
    return Victim(entries=(leaf,), price=index.credit(leaf) if index.is_restorable(leaf) else 0.0)


def _checkpoint(index: PrefixIndex) -> Victim | None:
    owner = index.cheapest_checkpoint()
    return None if owner is None else Victim(checkpoints_only=(owner,), price=index.credit(owner))
