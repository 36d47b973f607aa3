"""What is evicted when memory is needed: the least that is lost for each byte that comes free. Pure.

    a page is needed     the least worthy leaf  ...or all kept checkpoints of one extent of states or windows
    a state is needed    the least worthy checkpoint  ...or all kept pages of one extent, and what hangs below
    ...or a window page  the same: a checkpoint goes whole, its state and what nobody else has of its window
    the budget shrinks   all that is kept in one extent

An extent is emptied whole or left alone, so that eviction does not leave holes behind. Pages that lead to no
checkpoint of a hybrid cost nothing and go first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.prefix_index import Entry, PrefixIndex

CANDIDATES_MAX = 4
OTHERS_MAX = 16
"""Extents of pages that are looked at before one is chosen: those of what is worth least (often in use), and
some of those that can be emptied, for one that costs nothing."""

SUBTREE_FACTOR_MAX = 8
"""An extent whose pages have more than this many times as many below them goes only when nothing else can."""


@dataclass(frozen=True, slots=True)
class Victim:
    """`entries` go whole, leaves first; of `bare` only the checkpoint. `price` is what is lost per byte."""

    entries: tuple[Entry, ...] = ()
    checkpoints_only: tuple[Entry, ...] = ()
    price: float = 0.0


def for_page(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """What goes so that a page can be taken; None when nothing that is kept would help."""
    leaf = index.cheapest_leaf()
    if leaf is None:
        return _any_checkpoints(index, arena, layout)
    price = index.credit(leaf) if index.is_restorable(leaf) else 0.0
    direct = Victim(entries=(leaf,), price=price)
    return min([direct, *_checkpoint_extents(index, arena, layout)], key=_price) if price else direct


def for_state(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """What goes so that a state, or a window page, can be taken; None when nothing that is kept would help.
    What goes may not suffice: others have its window pages."""
    checkpoint = index.cheapest_checkpoint()
    best = None
    if checkpoint is not None:
        best = Victim(checkpoints_only=(checkpoint,), price=index.credit(checkpoint))
    for extent in _page_extents(index, arena, layout):
        if best is None or extent.price <= best.price:
            best = extent
        if not best.price:
            break
    return best or _any_pages(index, arena)


def for_extent(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """What goes so that an extent becomes empty; None when each one holds something that is in use."""
    extents = [*_checkpoint_extents(index, arena, layout), *_page_extents(index, arena, layout)]
    if extents:
        return min(extents, key=_price)
    return _any_checkpoints(index, arena, layout) or _any_pages(index, arena)


def _price(victim: Victim) -> float:
    return victim.price


def _checkpoint_extents(index: PrefixIndex, arena: Arena, layout: Layout) -> Iterator[Victim]:
    """The extents of the least worthy checkpoint, those that can be emptied."""
    cheapest = index.cheapest_checkpoint()
    if cheapest is None or cheapest.checkpoint is None:
        return
    state, windows = cheapest.checkpoint
    if state is not None and arena.states.extent_of(state) in arena.states.reclaimable:
        yield _state_extent(index, arena, layout, arena.states.extent_of(state))
    for extent in dict.fromkeys(map(arena.windows.extent_of, windows)):
        if extent in arena.windows.reclaimable:
            yield _window_extent(index, arena, layout, extent)


def _page_extents(index: PrefixIndex, arena: Arena, layout: Layout) -> Iterator[Victim]:
    """Extents that can be emptied, each with what hangs below its pages: those of the least worthy leaves,
    and the first one that is found to cost nothing."""
    size_max = SUBTREE_FACTOR_MAX * layout.pages_per_extent
    leaves = index.cheapest_leaves(CANDIDATES_MAX)
    likely = dict.fromkeys(arena.pages.extent_of(leaf.page) for leaf in leaves)
    for extent in likely:
        if extent in arena.pages.reclaimable:
            entries = _subtree(index, arena, extent, size_max)
            if entries:
                yield Victim(entries=entries, price=_lost_per_byte(index, layout, entries))
    for extent in islice(arena.pages.reclaimable, OTHERS_MAX):
        entries = () if extent in likely else _subtree(index, arena, extent, size_max, worthless=True)
        if entries:
            yield Victim(entries=entries)
            return


def _any_checkpoints(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """The first extent of states, or of window pages, that can be emptied, whatever it costs."""
    for extent in arena.states.reclaimable:
        return _state_extent(index, arena, layout, extent)
    for extent in arena.windows.reclaimable:
        return _window_extent(index, arena, layout, extent)
    return None


def _any_pages(index: PrefixIndex, arena: Arena) -> Victim | None:
    """The first extent of pages that can be emptied, whatever it costs."""
    extent = next(iter(arena.pages.reclaimable), None)
    return None if extent is None else Victim(entries=_subtree(index, arena, extent, len(index)))


def _state_extent(index: PrefixIndex, arena: Arena, layout: Layout, extent: int) -> Victim:
    owners = [index.owner_of_state(state) for state in arena.states.taken_in(extent)]
    bare = tuple(owner for owner in owners if owner is not None)
    assert len(bare) == len(owners), "a state is kept without an owner"
    return Victim(checkpoints_only=bare, price=_lost_per_byte(index, layout, bare))


def _window_extent(index: PrefixIndex, arena: Arena, layout: Layout, extent: int) -> Victim:
    owners = [index.owners_of_window(window) for window in arena.windows.taken_in(extent)]
    assert all(owners), "a window page is kept without an owner"
    bare = tuple(dict.fromkeys(chain.from_iterable(owners)))
    return Victim(checkpoints_only=bare, price=_lost_per_byte(index, layout, bare))


def _subtree(
    index: PrefixIndex, arena: Arena, extent: int, size_max: int, *, worthless: bool = False
) -> tuple[Entry, ...]:
    """The entries whose pages are in `extent` and all below them, leaves first. Empty when they are more than
    `size_max`, or shall be `worthless` and one of them is not."""
    owners = [index.owner_of_page(page) for page in arena.pages.taken_in(extent)]
    stack = [owner for owner in owners if owner is not None]
    assert len(stack) == len(owners), "a page is kept without an owner"
    found: dict[Entry, None] = {}  # in an order that a run can repeat
    while stack:
        entry = stack.pop()
        if worthless and index.is_restorable(entry) and index.credit(entry):
            return ()
        if entry not in found:
            found[entry] = None
            stack += entry.children
        if len(found) > size_max:
            return ()
    return tuple(sorted(found, key=lambda entry: -entry.depth_pages))


def _lost_per_byte(index: PrefixIndex, layout: Layout, entries: tuple[Entry, ...]) -> float:
    """What goes with the checkpoints (or, without states, the pages) of `entries`, per byte of an extent or
    more."""
    worthy = [entry for entry in entries if index.is_restorable(entry)]
    lost = sum(index.credit(entry) * entry.freed_bytes for entry in worthy)
    return lost / max(layout.extent_bytes, sum(entry.freed_bytes for entry in worthy))
