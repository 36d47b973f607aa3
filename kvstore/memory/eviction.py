"""Chooses what to evict when memory is needed: the victim with the least loss per freed byte. Pure.

    Need                      Candidates:
    a page                    - The least valuable leaf.
                              - All cached checkpoints of one extent of states or of window pages.
    a state, a window page    - The least valuable checkpoint: its state and unshared window pages.
                              - All cached pages of one extent, and the entries below them.
    a smaller budget          - All cached objects of one extent.

An extent is emptied whole or left alone, so that eviction does not fragment extents. In a hybrid
model, pages that lead to no checkpoint cost nothing and go first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from tidemill.kvstore.layout import PAGES, Layout
from tidemill.kvstore.memory.arena import Arena, Pool
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.prefix_index import PrefixIndex

CANDIDATES_MAX = 4
"""The least valuable leaves whose extents are candidates; leases often use those extents."""

OTHERS_MAX = 16
"""The number of other reclaimable extents of pages that are searched for one that costs nothing."""

SUBTREE_FACTOR_MAX = 8
"""The largest subtree of an extent, in pages per extent; a larger one is a last resort."""


@dataclass(frozen=True, slots=True)
class Victim:
    """The entries to evict.

    entries             evicted whole, leaves first
    checkpoints_only    they lose only their checkpoint
    price               the loss per freed byte
    """

    entries: tuple[Entry, ...] = ()
    checkpoints_only: tuple[Entry, ...] = ()
    price: float = 0.0


def for_page(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """Choose what to evict for a page; None when no eviction would help."""
    leaf = index.cheapest_leaf()
    if leaf is None:
        return _any_checkpoints(index, arena, layout)
    price = index.credit(leaf) if index.is_restorable(leaf) else 0.0
    direct = Victim(entries=(leaf,), price=price)
    if not price:
        return direct
    best = min([direct, *_checkpoint_extents(index, arena, layout)], key=_price)
    cheapest = index.cheapest_checkpoint()
    if best.price and cheapest is not None and not (cheapest.uses or index.credit(cheapest)):
        return Victim(checkpoints_only=(cheapest,))  # a spare one, in an extent with others
    return best


def for_other(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """Choose what to evict for an object of any class but pages; None when no eviction would help. One
    eviction may not suffice: other checkpoints may share its window pages."""
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
    """Choose what to evict to empty an extent; None when each extent has a pinned object."""
    extents = [*_checkpoint_extents(index, arena, layout), *_page_extents(index, arena, layout)]
    if extents:
        return min(extents, key=_price)
    return _any_checkpoints(index, arena, layout) or _any_pages(index, arena)


def _price(victim: Victim) -> float:
    return victim.price


def _checkpoint_extents(index: PrefixIndex, arena: Arena, layout: Layout) -> Iterator[Victim]:
    """Yield the reclaimable extents of the least valuable checkpoint."""
    cheapest = index.cheapest_checkpoint()
    if cheapest is None or cheapest.checkpoint is None:
        return
    for name, ids in cheapest.checkpoint.by_class():
        pool = arena.pools[name]
        for extent in dict.fromkeys(map(pool.extent_of, ids)):
            if extent in pool.reclaimable:
                yield _checkpoints_in(index, pool, layout, extent)


def _page_extents(index: PrefixIndex, arena: Arena, layout: Layout) -> Iterator[Victim]:
    """Yield the reclaimable extents of the least valuable leaves, and one more that costs nothing. Each one
    takes along the entries below its pages."""
    size_max = SUBTREE_FACTOR_MAX * layout.pages_per_extent
    leaves = index.cheapest_leaves(CANDIDATES_MAX)
    likely = dict.fromkeys(arena.pools[PAGES].extent_of(leaf.page) for leaf in leaves)
    for extent in likely:
        if extent in arena.pools[PAGES].reclaimable:
            entries = _subtree(index, arena, extent, size_max)
            if entries:
                yield Victim(entries=entries, price=_lost_per_byte(index, layout, entries))
    for extent in islice(arena.pools[PAGES].reclaimable, OTHERS_MAX):
        entries = () if extent in likely else _subtree(index, arena, extent, size_max, only_worthless=True)
        if entries:
            yield Victim(entries=entries)
            return


def _any_checkpoints(index: PrefixIndex, arena: Arena, layout: Layout) -> Victim | None:
    """Return the first reclaimable extent of checkpoints, at any price."""
    pools = (arena.pools[name] for name in Checkpoint._fields)
    found = ((pool, extent) for pool in pools for extent in pool.reclaimable)
    return next((_checkpoints_in(index, pool, layout, extent) for pool, extent in found), None)


def _any_pages(index: PrefixIndex, arena: Arena) -> Victim | None:
    """Return the first reclaimable extent of pages, at any price."""
    extent = next(iter(arena.pools[PAGES].reclaimable), None)
    return None if extent is None else Victim(entries=_subtree(index, arena, extent, len(index)))


def _checkpoints_in(index: PrefixIndex, pool: Pool[Any], layout: Layout, extent: int) -> Victim:
    owners = [pool.owners_of(taken) for taken in pool.taken_in(extent)]
    assert all(owners), "an object is cached without an owner"
    entries = tuple(dict.fromkeys(chain.from_iterable(owners)))
    return Victim(checkpoints_only=entries, price=_lost_per_byte(index, layout, entries))


def _subtree(
    index: PrefixIndex, arena: Arena, extent: int, size_max: int, *, only_worthless: bool = False
) -> tuple[Entry, ...]:
    """Return the entries whose pages are in `extent` and all entries below them, leaves first.

    Return none if they are more than `size_max`, or with `only_worthless` if one of them has a
    value.
    """
    pool = arena.pools[PAGES]
    owners = [pool.owners_of(page) for page in pool.taken_in(extent)]
    assert all(owners), "a page is cached without an owner"
    stack = [owner for [owner] in owners]
    found: dict[Entry, None] = {}  # unlike a set, in a reproducible order
    while stack:
        entry = stack.pop()
        if only_worthless and index.is_restorable(entry) and index.credit(entry):
            return ()
        if entry not in found:
            found[entry] = None
            stack += entry.children
        if len(found) > size_max:
            return ()
    return tuple(sorted(found, key=lambda entry: -entry.depth_pages))


def _lost_per_byte(index: PrefixIndex, layout: Layout, entries: tuple[Entry, ...]) -> float:
    """Return the loss with the restorable ones of `entries` per freed byte, an extent at least."""
    restorable = [entry for entry in entries if index.is_restorable(entry)]
    lost = sum(index.credit(entry) * entry.freed_bytes for entry in restorable)
    return lost / max(layout.extent_bytes, sum(entry.freed_bytes for entry in restorable))
