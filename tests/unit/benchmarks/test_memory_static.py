"""The static split of the memory benchmark: each class has its share and never more."""

from random import Random

import pytest
from benchmarks.memory.served_model import NoBytes, qwen_layout
from benchmarks.memory.static_split import StaticArena, StaticCache
from hypothesis import given
from hypothesis import strategies as st

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PageId, StateId
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex

pytestmark = pytest.mark.slow

LAYOUT = qwen_layout(64)


def a_cache(num_extents: int, page_extents: int) -> StaticCache:
    return StaticCache(LAYOUT, StaticArena(LAYOUT, num_extents, NoBytes(), page_extents), PrefixIndex(LAYOUT))


@given(st.integers(2, 12), st.data())
def test_each_class_takes_exactly_its_share_in_any_order(num_extents: int, data: st.DataObject) -> None:
    page_extents = data.draw(st.integers(1, num_extents - 1))
    cache = a_cache(num_extents, page_extents)
    rng = Random(data.draw(st.integers(0, 1000)))
    pages: list[PageId] = []
    states: list[StateId] = []
    full: set[str] = set()
    while len(full) < 2:
        if rng.random() < 0.9:
            left = page_extents * LAYOUT.pages_per_extent - len(pages)
            assert cache.could_hold(left, 0)
            assert not cache.could_hold(left + 1, 0)
            try:
                pages.append(cache.take_page())
            except OutOfMemory:
                full.add("pages")
        else:
            free = cache.state_is_free()
            assert cache.could_hold(0, 1) == free
            try:
                states.append(cache.take_state())
                assert free
            except OutOfMemory:
                assert not free
                full.add("states")
        cache.check(pages, states)
    assert len(pages) == page_extents * LAYOUT.pages_per_extent
    assert len(states) == (num_extents - page_extents) * LAYOUT.states_per_extent


def a_kept_path(cache: StaticCache, num_pages: int) -> list[Entry]:
    path: list[Entry] = []
    for depth in range(num_pages):
        key = PageKey(depth.to_bytes(16, "little"))
        path.append(cache.insert(path[-1] if path else None, key, cache.take_page())[0])
    return path


def test_page_evicts_a_page_and_a_state_a_state() -> None:
    cache = a_cache(2, 1)
    path = a_kept_path(cache, LAYOUT.pages_per_extent)
    cache.keep_checkpoint(path[0], Checkpoint(cache.take_state()))
    for entry in reversed(path):
        cache.unpin(entry)
    page = cache.take_page()
    assert path[0].checkpoint is not None
    assert len(cache.index) == LAYOUT.pages_per_extent - 1
    state = cache.take_state()
    assert path[0].checkpoint is None
    assert len(cache.index) == LAYOUT.pages_per_extent - 1
    cache.check([page], [state])


def test_held_memory_is_not_taken() -> None:
    cache = a_cache(2, 1)
    path = a_kept_path(cache, LAYOUT.pages_per_extent)
    cache.keep_checkpoint(path[-1], Checkpoint(cache.take_state()))
    cache.pin_checkpoint(path[-1])
    with pytest.raises(OutOfMemory):
        cache.take_page()
    with pytest.raises(OutOfMemory):
        cache.take_state()


@pytest.mark.parametrize("num_pages", [1, 10])
def test_state_takes_nothing_from_pages_and_a_refusal_costs_no_cache(num_pages: int) -> None:
    """A reservation of the last pages and the last state is granted; one more state evicts nothing."""
    cache = a_cache(2, 1)
    ledger = Ledger(cache)
    path = a_kept_path(cache, LAYOUT.pages_per_extent - num_pages)
    for entry in reversed(path):
        cache.unpin(entry)
    ledger.reserve(ledger.open("first"), num_pages * LAYOUT.page_tokens)
    with pytest.raises(OutOfMemory):
        ledger.reserve(ledger.open("second"), 1)
    assert len(cache.index) == LAYOUT.pages_per_extent - num_pages
    ledger.check()
