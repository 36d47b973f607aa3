"""The choice of victims in small situations; memory is refused only if no eviction helps.

An extent has two pages of two tokens, or one state, unless a test sets another size.
"""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.support.kvstore.leases import a_cache
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PAGES, STATES
from tidemill.kvstore.memory import eviction
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.entry import Checkpoint, Entry


def keep(cache: Cache, path: str, *, credit: float | None = None, pinned: str = "") -> list[Entry]:
    """Cache the pages of `path`, a letter each, and a checkpoint with this credit at its end. As many pages
    as `pinned` has an h stay pinned, and the checkpoint if it has an x."""
    entries: list[Entry] = []
    for key in (PageKey(path[:end].encode()) for end in range(1, len(path) + 1)):
        page = cache.pools[PAGES].take()
        entry, taken_over = cache.insert(entries[-1] if entries else None, key, page)
        if not taken_over:
            cache.pools[PAGES].unpin(page)
        entries.append(entry)
    if credit is not None:
        last = entries[-1]
        cache.keep_checkpoint(last, Checkpoint((cache.pools[STATES].take(),)))
        last.score = (credit, 0)
        cache.pin_checkpoint(last)
        if "x" not in pinned:
            cache.unpin_checkpoint(last)
    for entry in reversed(entries[pinned.count("h") :]):
        cache.unpin(entry)
    cache.check(())
    return entries


def names(cache: Cache) -> set[str]:
    return {entry.key.decode() for entry in cache.index}


def checkpoints(cache: Cache) -> set[str]:
    return {entry.key.decode() for entry in cache.index if entry.checkpoint is not None}


def test_for_page_evicts_a_leaf_without_a_checkpoint_first() -> None:
    cache = a_cache(4)
    keep(cache, "ab", credit=1)
    keep(cache, "cd")
    keep(cache, "abe")  # in the last extent, and worthless below a checkpoint
    cache.take(PAGES)
    cache.take(PAGES)
    assert names(cache) == {"a", "ab", "c", "abe"}
    assert checkpoints(cache) == {"ab"}
    cache.take(PAGES)
    cache.take(PAGES)
    assert names(cache) == {"a", "ab"}


def test_for_other_evicts_worthless_pages_before_a_checkpoint() -> None:
    cache = a_cache(4)
    keep(cache, "ab", credit=1)
    keep(cache, "cd", credit=2)
    with pytest.raises(OutOfMemory):
        cache.pools[STATES].take()
    (first, last) = cache.index.match([PageKey(b"c"), PageKey(b"cd")]).path
    cache.drop_checkpoint(last, "test")
    cache.pools[STATES].unpin(cache.take(STATES))  # the slot of the dropped checkpoint
    taken = [cache.take(STATES), cache.take(STATES)]
    assert checkpoints(cache) == {"ab"}
    assert names(cache) == {"a", "ab"}
    assert cache.pools[PAGES].extent_of(first.page) in {
        cache.pools[STATES].extent_of(state) for state in taken
    }


def test_for_page_empties_an_extent_of_states_cheaper_than_any_leaf() -> None:
    cache = a_cache(5, states_per_extent=2)
    keep(cache, "abcd", credit=90)
    keep(cache, "efgh", credit=90)
    for path in ("a", "e"):
        (entry,) = cache.index.match([PageKey(path.encode())]).path
        cache.keep_checkpoint(entry, Checkpoint((cache.pools[STATES].take(),)))
    for path in ("a", "e"):
        cache.index.match([PageKey(path.encode())]).path[0].score = (0.001, 0)
    assert cache.arena.usage().extents[STATES] == 2
    cache.take(PAGES)  # the last extent
    for _ in range(3):
        cache.take(PAGES)
    assert checkpoints(cache) == {"a", "e", "abcd", "efgh"}
    cache.take(PAGES)
    assert checkpoints(cache) == {"abcd", "efgh"}
    assert names(cache) == {"a", "ab", "abc", "abcd", "e", "ef", "efg", "efgh"}
    assert cache.arena.usage().extents[STATES] == 1


def test_for_page_evicts_a_leaf_when_no_extent_of_states_can_be_emptied() -> None:
    """Half an extent of states makes no room for a page."""
    cache = a_cache(2, states_per_extent=2)
    keep(cache, "ab", credit=1)
    keep(cache, "cd", credit=5, pinned="hhx")
    cache.take(PAGES)
    assert names(cache) == {"a", "c", "cd"}
    assert checkpoints(cache) == {"cd"}


def test_for_other_evicts_the_cheapest_checkpoint() -> None:
    cache = a_cache(6)
    for path, credit in (("ab", 3), ("cd", 2), ("ef", 4)):
        keep(cache, path, credit=credit, pinned="h")
    for left in ({"ab", "ef"}, {"ef"}, set[str]()):
        cache.take(STATES)
        assert checkpoints(cache) == left
        assert names(cache) == {"a", "ab", "c", "cd", "e", "ef"}, "an entry can lose only its checkpoint"
    with pytest.raises(OutOfMemory):
        cache.take(STATES)


def test_for_other_evicts_entries_below_the_pages_of_an_extent() -> None:
    """Leaves go first. The pages of `ab` and `x` share an extent; `abcd` is below, in another one."""
    cache = a_cache(3)
    keep(cache, "a", pinned="h")
    keep(cache, "y", pinned="h")
    keep(cache, "ab")
    keep(cache, "x")
    keep(cache, "abcd")
    victim = eviction.for_other(cache.index, cache.arena, cache.layout)
    assert victim is not None
    assert [entry.key for entry in victim.entries[:2]] == [b"abcd", b"abc"]
    assert {entry.key for entry in victim.entries[2:]} == {b"ab", b"x"}
    cache.take(STATES)
    assert names(cache) == {"a", "y"}


def test_victim_price_is_the_loss_per_freed_byte() -> None:
    """Two checkpoints whose eviction frees two pages and a state each."""
    cache = a_cache(2, states_per_extent=2)
    entries = keep(cache, "ab", credit=6)[-1], keep(cache, "cd", credit=1)[-1]
    victim = eviction.for_extent(cache.index, cache.arena, cache.layout)
    assert victim is not None
    assert set(victim.checkpoints_only) == set(entries)
    assert victim.price == (6 + 1) / 2


def test_for_extent_finds_none_when_each_has_a_pinned_object() -> None:
    cache = a_cache(5)
    keep(cache, "ab", credit=1, pinned="h")
    keep(cache, "cd", credit=2, pinned="hhx")
    victim = eviction.for_extent(cache.index, cache.arena, cache.layout)
    assert victim is not None
    assert [entry.key for entry in victim.checkpoints_only] == [b"ab"]
    assert not victim.entries
    assert not cache.resize(1)
    assert names(cache) == {"a", "ab", "c", "cd"}
    assert eviction.for_extent(cache.index, cache.arena, cache.layout) is None
    assert eviction.for_page(cache.index, cache.arena, cache.layout) == eviction.Victim(
        entries=tuple(entry for entry in cache.index if entry.key == b"ab")
    )


def until_refused(cache: Cache, name: str) -> Iterator[int]:
    with suppress(OutOfMemory):
        while True:
            yield cache.take(name)


@pytest.mark.parametrize("pinned", ["", "h", "hh", "hhh", "hhhx"])
def test_eviction_never_chooses_pinned_objects(pinned: str) -> None:
    cache = a_cache(4, states_per_extent=2)
    keep(cache, "abc", credit=1, pinned=pinned)
    keep(cache, "def", credit=9)
    pages = list(until_refused(cache, PAGES))
    states = list(until_refused(cache, STATES))
    assert names(cache) == {"abc"[: end + 1] for end in range(pinned.count("h"))}
    assert checkpoints(cache) == ({"abc"} if "x" in pinned else set())
    cache.check([{PAGES: pages, STATES: states}])


def test_cache_advances_the_clock_by_the_price_of_a_victim() -> None:
    cache = a_cache(4)
    cheap = keep(cache, "ab", credit=2, pinned="h")[-1]
    expensive = keep(cache, "cd", credit=5, pinned="h")[-1]
    cache.take(STATES)
    assert cheap.checkpoint is None
    assert cache.index.credit(expensive) == 3
