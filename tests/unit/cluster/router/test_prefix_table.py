"""The table of prefixes says what sets of keys would say, in less memory."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.router.prefix_table import (
    LEAST_PLACES,
    LOG_SLACK,
    NOBODY,
    Chain,
    Crowds,
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
def test_it_is_a_set_of_keys_for_each_slot(steps: list[tuple[str, int, list[int]]], chain: list[int]) -> None:
    """Also to a chain that was looked up before the table changed."""
    table, model = Prefixes(), [set[bytes]() for _ in range(SLOTS)]
    kept = Chain(cut_keys(names(chain)))
    for what, slot, numbers in steps:
        keys = names(numbers)
        if what == "add":
            table.add(slot, cut_keys(keys), MANY)
            model[slot].update(keys)
        elif what == "add_chain":
            table.add_chain(slot, kept, MANY)
            model[slot].update(names(chain))
        elif what == "remove":
            table.remove(slot, cut_keys(keys))
            model[slot].difference_update(keys)
        else:
            table.clear(slot)
            model[slot].clear()
        assert [table.num_held(each) for each in range(SLOTS)] == [len(each) for each in model]
        assert table.depths(kept, SLOTS).tolist() == table.depths(Chain(kept.keys), SLOTS).tolist()
    assert [held(table, slot) for slot in range(SLOTS)] == [numbers_of(each) for each in model]
    depths = table.depths(kept, SLOTS + 1)
    assert table.depths(Chain(kept.keys), SLOTS + 1).tolist() == depths.tolist()
    for slot, keys in enumerate([*model, set[bytes]()]):
        deepest = [depth for depth, key in enumerate(names(chain), start=1) if key in keys]
        assert depths[slot] == max(deepest, default=0)


@pytest.mark.parametrize("seed", range(3))
def test_it_grows_and_is_tidied(seed: int) -> None:
    """With many keys that come and go, of which it has to move some and to forget that it had others."""
    rng = Random(seed)
    table, model = Prefixes(), [set[bytes]() for _ in range(SLOTS)]
    space = names([rng.getrandbits(64) for _ in range(6 * LEAST_PLACES)])
    for _ in range(60):
        slot, keys = rng.randrange(SLOTS), rng.sample(space, rng.randrange(2 * LOG_SLACK))
        if rng.random() < 0.7:
            table.add(slot, cut_keys(keys), MANY)
            model[slot].update(keys)
        else:
            table.remove(slot, cut_keys(keys))
            model[slot].difference_update(keys)
    assert [held(table, slot) for slot in range(SLOTS)] == [numbers_of(each) for each in model]
    for slot in range(SLOTS):
        table.clear(slot)
    assert not table.depths(Chain(cut_keys(space)), SLOTS).any()


@pytest.mark.parametrize("count", [1, 600])
def test_a_chain_is_found_and_held_wherever_its_keys_have_to_go(count: int) -> None:
    """Many keys that want the same places; and each of two lookups sees what the other has put there."""
    rng = np.random.default_rng(1)
    table = Prefixes()
    keys = rng.integers(1, 1 << 63, count, dtype=np.uint64)
    one, other = Chain(keys), Chain(keys)
    assert not table.depths(other, 2).any()
    table.add_chain(0, one, MANY)
    assert held(table, 0) == set(keys.tolist())
    assert table.depths(other, 2).tolist() == [count, 0]
    table.add_chain(1, other, MANY)
    table.add(0, rng.integers(1, 1 << 63, 5000, dtype=np.uint64), MANY)  # the table grows
    assert table.depths(one, 2).tolist() == table.depths(other, 2).tolist() == [count, count]
    table.clear(0)
    assert held(table, 1) == set(keys.tolist())


def test_the_oldest_keys_are_forgotten_first_and_the_bound_holds() -> None:
    table, most = Prefixes(), 2000
    for batch in range(60):
        table.add(0, cut_keys(names(list(range(100 * batch, 100 * batch + 100)))), most)
        table.add(1, cut_keys(names([7])), most)
        assert table.num_held(0) <= most + most // 4 + LOG_SLACK
    latest = numbers_of(set(names(list(range(4000, 6000)))))
    assert latest <= held(table, 0)
    assert numbers_of(set(names(list(range(2000))))).isdisjoint(held(table, 0))
    assert held(table, 1) == numbers_of(set(names([7]))), "another worker's"


def test_what_is_used_again_is_not_old() -> None:
    table, most = Prefixes(), 500
    kept = cut_keys(names([1, 2, 3]))
    for batch in range(100):
        table.add(0, kept, most)
        table.add(0, cut_keys(names(list(range(100 * batch + 100, 100 * batch + 200)))), most)
    assert set(kept.tolist()) <= held(table, 0)


def test_memory_is_bounded_whatever_comes_and_goes() -> None:
    table, rng = Prefixes(), np.random.default_rng(1)
    for _ in range(200):
        keys = rng.integers(1, 1 << 63, 1000, dtype=np.uint64)
        table.add(0, keys, 10_000)
        table.remove(0, keys[:900])
    assert table.num_bytes < 20_000 * 40


def test_a_key_of_zeros_and_short_ones_are_keys_too() -> None:
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


def test_a_crowd_is_kept_once_and_no_longer_than_it_is_needed() -> None:
    crowds = Crowds()
    pair = crowds.moved(3, 1, joins=True, num_keys=10)
    assert crowds.slots(pair) == (1, 3)
    assert crowds.moved(1, 3, joins=True, num_keys=5) == pair
    assert crowds.slots(3) == (3,)
    three = crowds.moved(pair, 2, joins=True, num_keys=14)
    assert crowds.slots(three) == (1, 2, 3)
    assert len(crowds) == 2
    assert crowds.moved(pair, 3, joins=False, num_keys=1) == 1
    assert len(crowds) == 1
    pair = crowds.moved(three, 2, joins=False, num_keys=14)
    assert crowds.slots(pair) == (1, 3)
    assert len(crowds) == 1
    assert crowds.moved(pair, 1, joins=False, num_keys=14) == 3
    assert len(crowds) == 0
    assert crowds.moved(3, 3, joins=False, num_keys=15) == NOBODY
