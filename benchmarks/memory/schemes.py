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

from dataclasses import dataclass

from benchmarks.memory.served_model import NoBytes
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Layout, PageId, StateId
from tidemill.kvstore.memory.arena import Arena, ArenaUsage, Id, Pool
from tidemill.kvstore.memory.cache import Cache
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
        self.pages: Pool[PageId] = self._pool(1, 0)
        self.states: Pool[StateId] = self._pool(0, 1)

    def fits(self, pages: int, states: int) -> bool:
        """Return whether the memory holds these numbers of objects."""
        of_states = states * self._state_pages
        if self._share is None:
            return pages + of_states <= self._pages_max
        return pages <= self._share and of_states <= self._pages_max - self._share

    def has_room(self, pages: int, states: int) -> bool:
        """Return whether it has room for these numbers beside all that is pinned or cached."""
        return self.fits(self.pages.num_extents + pages, self.states.num_extents + states)

    def usage(self) -> ArenaUsage:
        return ArenaUsage(
            page_extents=self.num_extents,  # all is open to pages
            state_extents=0,
            empty_extents=0,
            unmapped_extents=0,
            pages_pinned=self.pages.num_pinned,
            pages_cached=self.pages.num_cached,
            states_pinned=self.states.num_pinned,
            states_cached=self.states.num_cached,
        )

    def check(
        self,
        pages: tuple[list[PageId], list[PageId]],
        states: tuple[list[StateId], list[StateId]],
        windows: object = None,
    ) -> None:
        """Prove that exactly these ids are taken, and that the scheme has room for them."""
        del windows  # models have none here
        self.pages.check(*pages)
        self.states.check(*states)
        assert self.has_room(0, 0), "more memory than there is"

    def _pool(self, pages: int, states: int) -> Pool[Id]:
        ids = list(range(self._pages_max - 1, -1, -1))

        def open_one() -> int:
            if not self.has_room(pages, states):
                raise OutOfMemory(f"{self.scheme.name} has no room for this class")
            return ids.pop()

        return Pool(1, open_one, ids.append)


class SchemeCache(Cache):
    """A cache in a SchemeArena. A state that only pages could make room for, in a scheme that does not evict
    them for states, empties the cache; its owner's server ended then. `dead_ends` counts these."""

    def __init__(self, layout: Layout, arena: SchemeArena, index: PrefixIndex) -> None:
        super().__init__(layout, arena, index)
        self._arena = arena
        self._scheme = arena.scheme

    def take_page(self) -> PageId:
        return self._take(self.arena.pages, self._for_page, "pages")

    def take_state(self) -> StateId:
        return self._take(self.arena.states, self._for_state, "states")

    def free_state_below(self, price: float) -> bool:
        while not self.state_is_free():
            victim = self._for_state(self.index)
            if victim is None or victim.price >= price:
                return False
            self._evict(victim, "states")
        return True

    def could_hold(self, pages: int, states: int, windows: int = 0) -> bool:
        """Return whether these numbers would fit after evicting all that is cached, of either class."""
        assert not windows
        held = self._arena.pages.num_pinned + self.promised_pages
        return self._arena.fits(held + pages, self._arena.states.num_pinned + states)

    def state_is_free(self) -> bool:
        promised = 0 if self._scheme.page_share is not None else self.promised_pages
        return self._arena.has_room(promised, 1)

    def clear(self) -> None:
        self.counters["dead_ends"] += 1
        super().clear()

    def _for_page(self, index: PrefixIndex, *_: object) -> Victim | None:
        return self._first(_leaf(index), _checkpoint(index))

    def _for_state(self, index: PrefixIndex, *_: object) -> Victim | None:
        return self._first(_checkpoint(index), _leaf(index))

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
