"""What is evicted when memory is needed: the least that is lost for each byte that comes free. Pure.

    a page is needed     the least worthy leaf  ...or all kept checkpoints of one extent of states
    a state is needed    the least worthy checkpoint  ...or all kept pages of one extent, and what hangs below
    the budget shrinks   all that is kept in one extent

An extent is emptied whole or left alone, so that eviction does not leave holes behind. Pages that lead to no
checkpoint of a hybrid cost nothing and go first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from tidemill.kvstore.arena import Arena
from tidemill.kvstore.index import Entry, PrefixIndex
from tidemill.kvstore.layout import Layout

CANDIDATES_MAX = 4
OTHERS_MAX = 16
"""Extents of pages that are looked at before one is chosen: those of what is worth least (often in use), and
some of those that can be emptied."""

SUBTREE_FACTOR_MAX = 8
"""An extent whose pages have more than this many times as many below them goes only when nothing else can."""


@dataclass(frozen=True, slots=True)
class Victim:
    """`entries` go whole, leaves first; of `bare` only the checkpoint. `price` is what is lost per byte."""

    entries: tuple[Entry, ...] = ()
    bare: tuple[Entry, ...] = ()
    price: float = 0.0


def for_page(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """What goes so that a page can be taken; None when nothing that is kept would help."""
    leaf = index.cheapest_leaf()
    if leaf is None:
        return _any_extent(index, arena, layout, states=True)
    price = index.credit(leaf) if index.is_restorable(leaf) else 0.0
    direct = Victim(entries=(leaf,), price=price)
    return min([direct, *_state_extents(index, arena, layout)], key=_price) if price else direct


def for_state(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """What goes so that a state can be taken; None when nothing that is kept would help."""
    checkpoint = index.cheapest_checkpoint()
    best = None
    if checkpoint is not None:
        best = Victim(bare=(checkpoint,), price=index.credit(checkpoint))
    for extent in _page_extents(index, arena, layout):
        if best is None or extent.price <= best.price:
            best = extent
        if not best.price:
            break
    return best or _any_extent(index, arena, layout, states=False)


def for_extent(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """What goes so that an extent becomes empty; None when each one holds something that is in use."""
    extents = [*_state_extents(index, arena, layout), *_page_extents(index, arena, layout)]
    if extents:
        return min(extents, key=_price)
    states = _any_extent(index, arena, layout, states=True)
    return states or _any_extent(index, arena, layout, states=False)


def _price(victim: Victim) -> float:
    return victim.price


def _state_extents(index: PrefixIndex, arena: Arena, layout: Layout) -> Iterator[Victim]:
    """The extent of the least worthy checkpoint, if it can be emptied."""
    cheapest = index.cheapest_checkpoint()
    if cheapest is not None and cheapest.checkpoint is not None:
        extent = arena.states.extent_of(cheapest.checkpoint)
        if extent in arena.states.loose:
            yield _state_extent(index, arena, layout, extent)


def _page_extents(index: PrefixIndex, arena: Arena, layout: Layout) -> Iterator[Victim]:
    """The extents of the least worthy leaves that can be emptied, each with what hangs below its pages."""
    leaves = index.cheapest_leaves(CANDIDATES_MAX)
    likely = (arena.pages.extent_of(leaf.page) for leaf in leaves)
    others = islice(arena.pages.loose, OTHERS_MAX)
    for extent in dict.fromkeys((*likely, *others)):
        if extent in arena.pages.loose:
            size_max = SUBTREE_FACTOR_MAX * layout.pages_per_extent
            victim = _page_extent(index, arena, layout, extent, size_max)
            if victim is not None:
                yield victim


def _any_extent(index: PrefixIndex, arena: Arena, layout: Layout, *, states: bool) -> Victim | None:
    """The first that can be emptied, whatever it costs."""
    if states:
        extent = next(iter(arena.states.loose), None)
        return None if extent is None else _state_extent(index, arena, layout, extent)
    extent = next(iter(arena.pages.loose), None)
    return None if extent is None else _page_extent(index, arena, layout, extent, len(index))


def _state_extent(index: PrefixIndex, arena: Arena, layout: Layout, extent: int) -> Victim:
    owners = [index.owner_of_state(state) for state in arena.states.taken_in(extent)]
    bare = tuple(owner for owner in owners if owner is not None)
    assert len(bare) == len(owners), "a state is kept without an owner"
    return Victim(bare=bare, price=_lost_per_byte(index, layout, bare))


def _page_extent(
    index: PrefixIndex, arena: Arena, layout: Layout, extent: int, size_max: int
) -> Victim | None:
    """None when more than `size_max` entries would go."""
    found: dict[Entry, None] = {}
    stack: list[Entry] = []
    for page in arena.pages.taken_in(extent):
        owner = index.owner_of_page(page)
        assert owner is not None, "a page is kept without an owner"
        stack.append(owner)
    while stack:
        entry = stack.pop()
        if entry not in found:
            found[entry] = None
            stack += entry.children
        if len(found) > size_max:
            return None
    entries = tuple(sorted(found, key=lambda entry: -entry.depth_pages))
    return Victim(entries=entries, price=_lost_per_byte(index, layout, entries))


def _lost_per_byte(index: PrefixIndex, layout: Layout, entries: tuple[Entry, ...]) -> float:
    """What goes with the checkpoints (or, without states, the pages) of `entries`, per byte of an extent or
    more."""
    worthy = [entry for entry in entries if index.is_restorable(entry)]
    lost = sum(index.credit(entry) * entry.freed_bytes for entry in worthy)
    return lost / max(layout.extent_bytes, sum(entry.freed_bytes for entry in worthy))
