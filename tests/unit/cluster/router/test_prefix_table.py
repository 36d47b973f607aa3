"""The prefix table answers like sets of keys, in less memory."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.router.prefix_table import (
    LOG_SLACK,
    NO_HOLDER,
    POSITIONS_MIN,
    Chain,
    HolderSets,
    Prefixes,
    cut_keys,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
SLOTS = 5
MANY = 1 << 20


def names(numbers: list[int]) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def held(table: Prefixes, slot: int) -> set[int]:
    return {int(key) for key in table.held(slot)}


def numbers_of(keys: set[bytes]) -> set[int]:
    return {int(key) for key in cut_keys(sorted(keys))}


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add_chain", "remove", "clear"]),
        st.integers(0, SLOTS - 1),
        st.lists(st.integers(0, 30), max_size=20),
    ),
    max_size=30,
)


@PROPERTY
@given(operations, st.lists(st.integers(0, 30), max_size=12))
def test_prefix_table_is_a_set_of_keys_per_slot(
    steps: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    """A chain that was looked up before the table changed gets the same answers."""
    table, model = Prefixes(), [set[bytes]() for _ in range(SLOTS)]
    kept = Chain(cut_keys(names(chain)))
    for operation, slot, numbers in steps:
        keys = names(numbers)
        if operation == "add":
            table.add(slot, cut_keys(keys), MANY)
            model[slot].update(keys)
        elif operation == "add_chain":
            table.add_chain(slot, kept, MANY)
            model[slot].update(names(chain))
        elif operation == "remove":
            table.remove(slot, cut_keys(keys))
            model[slot].difference_update(keys)
        else:
            table.clear(slot)
            model[slot].clear()
        assert [table.num_held(slot) for slot in range(SLOTS)] == [len(keys) for keys in model]
        assert table.depths(kept, SLOTS).tolist() == table.depths(Chain(kept.keys), SLOTS).tolist()
    assert [held(table, slot) for slot in range(SLOTS)] == [numbers_of(keys) for keys in model]
    depths = table.depths(kept, SLOTS + 1)
    assert table.depths(Chain(kept.keys), SLOTS + 1).tolist() == depths.tolist()
    for slot, keys in enumerate([*model, set[bytes]()]):
        deepest = [depth for depth, key in enumerate(names(chain), start=1) if key in keys]
        assert depths[slot] == max(deepest, default=0)


@pytest.mark.parametrize("seed", range(3))
def test_prefix_table_grows_and_compacts(seed: int) -> None:
    """Many keys come and go, so that some are moved and others dropped."""
    rng = Random(seed)
    table, model = Prefixes(), [set[bytes]() for _ in range(SLOTS)]
    space = names([rng.getrandbits(64) for _ in range(6 * POSITIONS_MIN)])
    for _ in range(60):
        slot, keys = rng.randrange(SLOTS), rng.sample(space, rng.randrange(2 * LOG_SLACK))
        if rng.random() < 0.7:
            table.add(slot, cut_keys(keys), MANY)
            model[slot].update(keys)
        else:
            table.remove(slot, cut_keys(keys))
            model[slot].difference_update(keys)
    assert [held(table, slot) for slot in range(SLOTS)] == [numbers_of(keys) for keys in model]
    for slot in range(SLOTS):
        table.clear(slot)
    assert not table.depths(Chain(cut_keys(space)), SLOTS).any()


@pytest.mark.parametrize("count", [1, 600])
def test_prefix_table_finds_chains_with_colliding_keys(count: int) -> None:
    """Many keys hash to the same positions, and each of two chains sees the keys that the other inserted."""
    rng = np.random.default_rng(1)
    table = Prefixes()
    keys = rng.integers(1, 1 << 63, count, dtype=np.uint64)
    first, second = Chain(keys), Chain(keys)
    assert not table.depths(second, 2).any()
    table.add_chain(0, first, MANY)
    assert held(table, 0) == set(keys.tolist())
    assert table.depths(second, 2).tolist() == [count, 0]
    table.add_chain(1, second, MANY)
    table.add(0, rng.integers(1, 1 << 63, 5000, dtype=np.uint64), MANY)  # the table grows
    assert table.depths(first, 2).tolist() == table.depths(second, 2).tolist() == [count, count]
    table.clear(0)
    assert held(table, 1) == set(keys.tolist())


def test_prefix_table_forgets_the_oldest_keys_first_within_its_bound() -> None:
    table, most = Prefixes(), 2000
    for batch in range(60):
        table.add(0, cut_keys(names(list(range(100 * batch, 100 * batch + 100)))), most)
        table.add(1, cut_keys(names([7])), most)
        assert table.num_held(0) <= most + most // 4 + LOG_SLACK
    latest = numbers_of(set(names(list(range(4000, 6000)))))
    assert latest <= held(table, 0)
    assert numbers_of(set(names(list(range(2000))))).isdisjoint(held(table, 0))
    assert held(table, 1) == numbers_of(set(names([7]))), "the keys of another worker"


def test_prefix_table_keeps_keys_that_are_added_again() -> None:
    table, most = Prefixes(), 500
    kept = cut_keys(names([1, 2, 3]))
    for batch in range(100):
        table.add(0, kept, most)
        table.add(0, cut_keys(names(list(range(100 * batch + 100, 100 * batch + 200)))), most)
    assert set(kept.tolist()) <= held(table, 0)


def test_prefix_table_bounds_its_memory() -> None:
    table, rng = Prefixes(), np.random.default_rng(1)
    for _ in range(200):
        keys = rng.integers(1, 1 << 63, 1000, dtype=np.uint64)
        table.add(0, keys, 10_000)
        table.remove(0, keys[:900])
    assert table.num_bytes < 20_000 * 40


def test_prefix_table_takes_zero_and_short_keys() -> None:
    table = Prefixes()
    keys = cut_keys([b"\0" * 8, b"a", b"b"])
    table.add(2, keys[:2], MANY)
    assert table.depths(Chain(keys), 3).tolist() == [0, 0, 2]
    table.remove(2, keys[1:2])
    assert table.depths(Chain(keys), 3).tolist() == [0, 0, 1]
    assert table.depths(Chain(keys[:0]), 3).tolist() == [0, 0, 0]
    assert table.num_held(0) == 0
    table.remove(0, keys)
    table.clear(0)
    table.add(0, keys[:0], MANY)
    assert not len(table.held(0))


def test_holder_sets_are_stored_once_and_dropped_when_unused() -> None:
    holder_sets = HolderSets()
    pair = holder_sets.move(3, 1, joins=True, num_keys=10)
    assert holder_sets.slots(pair) == (1, 3)
    assert holder_sets.move(1, 3, joins=True, num_keys=5) == pair
    assert holder_sets.slots(3) == (3,)
    three = holder_sets.move(pair, 2, joins=True, num_keys=14)
    assert holder_sets.slots(three) == (1, 2, 3)
    assert len(holder_sets) == 2
    assert holder_sets.move(pair, 3, joins=False, num_keys=1) == 1
    assert len(holder_sets) == 1
    pair = holder_sets.move(three, 2, joins=False, num_keys=14)
    assert holder_sets.slots(pair) == (1, 3)
    assert len(holder_sets) == 1
    assert holder_sets.move(pair, 1, joins=False, num_keys=14) == 3
    assert len(holder_sets) == 0
    assert holder_sets.move(3, 3, joins=False, num_keys=15) == NO_HOLDER
