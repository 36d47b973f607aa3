"""The schemes of the memory benchmark: what each class may take, and what is evicted for it."""

from random import Random

import pytest
from benchmarks.memory.schemes import SCHEMES, Scheme, SchemeArena, SchemeCache, split
from benchmarks.memory.served_model import qwen_layout
from hypothesis import given
from hypothesis import strategies as st

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PAGES, STATES, PageId, StateId
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex

pytestmark = pytest.mark.slow

LAYOUT = qwen_layout(64)


NAMED = {scheme.name: scheme for scheme in SCHEMES}
STATE_PAGES = LAYOUT.state_stride_bytes // LAYOUT.page_bytes


def cache_of(scheme: Scheme, num_extents: int) -> SchemeCache:
    return SchemeCache(LAYOUT, SchemeArena(LAYOUT, num_extents, scheme), PrefixIndex(LAYOUT, scheme.policy))


def a_cache(num_extents: int, page_extents: int) -> SchemeCache:
    return cache_of(split(page_extents / num_extents), num_extents)


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
            assert cache.could_hold({PAGES: left, STATES: 0})
            assert not cache.could_hold({PAGES: left + 1, STATES: 0})
            try:
                pages.append(cache.take(PAGES))
            except OutOfMemory:
                full.add("pages")
        else:
            free = cache.is_free(STATES)
            assert cache.could_hold({PAGES: 0, STATES: 1}) == free
            try:
                states.append(cache.take(STATES))
                assert free
            except OutOfMemory:
                assert not free
                full.add("states")
        cache.check([{PAGES: pages, STATES: states}])
    assert len(pages) == page_extents * LAYOUT.pages_per_extent
    assert len(states) == (num_extents - page_extents) * LAYOUT.states_per_extent


def a_kept_path(cache: SchemeCache, num_pages: int, name: int = 0) -> list[Entry]:
    path: list[Entry] = []
    for depth in range(num_pages):
        key = PageKey((depth + 1000 * name).to_bytes(16, "little"))
        path.append(cache.insert(path[-1] if path else None, key, cache.take(PAGES))[0])
    return path


def cached(cache: SchemeCache, num_pages: int, name: int) -> Entry:
    """Cache a path with a checkpoint at its end, as a request that has ended leaves it."""
    path = a_kept_path(cache, num_pages, name)
    cache.keep_checkpoint(path[-1], Checkpoint((cache.take(STATES),)))
    for entry in reversed(path):
        cache.unpin(entry)
    return path[-1]


@pytest.mark.parametrize("name", ["sglang-ends", "sglang-unified", "vllm"])
@given(st.data())
def test_both_classes_share_all_bytes(name: str, data: st.DataObject) -> None:
    """Moves close all holes, so any mixture of objects fits whose sizes do."""
    cache = cache_of(NAMED[name], 4)
    pages_max = 4 * LAYOUT.pages_per_extent
    num_states = data.draw(st.integers(0, 4))
    states = [cache.take(STATES) for _ in range(num_states)]
    left = pages_max - num_states * STATE_PAGES
    assert cache.could_hold({PAGES: left, STATES: 0})
    assert not cache.could_hold({PAGES: left + 1, STATES: 0})
    pages = [cache.take(PAGES) for _ in range(left)]
    with pytest.raises(OutOfMemory):
        cache.take(PAGES)
    with pytest.raises(OutOfMemory):
        cache.take(STATES)
    for page in pages[:STATE_PAGES]:
        cache.pools[PAGES].unpin(page)
    if left >= STATE_PAGES:
        states.append(cache.take(STATES))
        cache.check([{PAGES: pages[STATE_PAGES:], STATES: states}])


def test_states_at_an_end_get_no_memory_from_cached_pages() -> None:
    """An allocation that ended a server of that scheme empties the cache here, and is counted."""
    cache = cache_of(NAMED["sglang-ends"], 3)
    ledger = Ledger(cache)
    entry = cached(cache, 3 * LAYOUT.pages_per_extent - STATE_PAGES, 0)
    ledger.reserve(ledger.open("first"), 1)
    assert entry.checkpoint is None, "a cached state goes first"
    ledger.release("first")
    num_entries = len(cache.index)
    first = cache.take(STATES)
    with pytest.raises(OutOfMemory):
        cache.take(STATES)
    assert len(cache.index) == num_entries
    cache.pools[STATES].unpin(first)
    assert not cache.counters["dead_ends"]
    ledger.reserve(ledger.open("second", spare_slots_min=1), 1)
    assert cache.counters["dead_ends"] == 1
    assert not len(cache.index)
    ledger.check()


def test_states_of_the_unified_pool_take_memory_from_cached_pages_last() -> None:
    cache = cache_of(NAMED["sglang-unified"], 3)
    entry = cached(cache, 3 * LAYOUT.pages_per_extent - STATE_PAGES, 0)
    num_entries = len(cache.index)
    states = [cache.take(STATES)]
    assert entry.checkpoint is None
    assert len(cache.index) == num_entries, "a cached state goes first"
    states.append(cache.take(STATES))
    assert len(cache.index) == num_entries - STATE_PAGES
    cache.check([{PAGES: [], STATES: states}])


def test_blocks_of_one_size_are_evicted_by_their_last_use() -> None:
    layout = qwen_layout(NAMED["vllm"].page_tokens or 0)
    assert layout.state_stride_bytes == 3 * layout.page_bytes, "a state is three blocks"
    cache = cache_of(NAMED["vllm"], 4)
    older = cached(cache, 4 * LAYOUT.pages_per_extent - 2 * STATE_PAGES - 1, 0)
    newer = cached(cache, 1, 1)
    cache.index.use([older])
    cache.take(PAGES)
    assert newer not in list(cache.index), "although a leaf of the other path is there"
    assert older.checkpoint is not None
