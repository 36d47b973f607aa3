"""The eviction order of prefixes under each policy."""

import pytest

from tests.support.kvstore.indexes import (
    PAGE_BYTES,
    STATE_BYTES,
    an_index,
    evict,
    evict_all,
    insert_path,
    keys_of,
)
from tidemill.kvstore.layout import StateId
from tidemill.kvstore.memory.entry import Checkpoint
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_eviction_takes_leaves_without_a_checkpoint_first(policy: Policy) -> None:
    index = an_index(hybrid=True, policy=policy)
    insert_path(index, "aaa", checkpoints=".x.")
    insert_path(index, "bb", checkpoints=".x")
    insert_path(index, "ccc")
    assert evict_all(index) == ["aaa", "ccc", "cc", "c", "aa", "a", "bb", "b"]


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_eviction_of_equal_values_is_least_recently_used(policy: Policy) -> None:
    index = an_index(hybrid=False, policy=policy)
    for path in ("aa", "b", "c"):
        insert_path(index, path)
    index.use(index.match(keys_of("b")).path)
    assert evict_all(index) == ["aa", "a", "c", "b"]


EXPENSIVE = RecomputeCost(token_flops=1.0, context_flops=1.0)
LONG, SHORT = "aaaaaaaa", "b"


def long_and_short(policy: Policy) -> PrefixIndex:
    """Return an index with a long prefix, and a short one that was used later."""
    index = an_index(hybrid=True, policy=policy, cost=EXPENSIVE)
    insert_path(index, LONG, checkpoints=".......x")
    insert_path(index, SHORT, checkpoints="x")
    return index


def test_lru_evicts_an_older_long_prefix_before_a_recent_short_one() -> None:
    assert evict(long_and_short("lru")) == LONG


def test_value_keeps_a_long_prefix_that_is_expensive_to_compute() -> None:
    assert evict(long_and_short("value")) == SHORT


def test_value_evicts_an_expensive_prefix_after_long_disuse() -> None:
    """Each eviction advances the clock, so values of later entries overtake that of the prefix."""
    index = long_and_short("value")
    for round_number in range(100):
        removed = evict(index)
        if removed == LONG:
            break
        assert removed is not None
        insert_path(index, chr(ord("c") + round_number % 20), checkpoints="x")
    else:
        pytest.fail("the expensive prefix was never evicted")
    assert round_number > 3


def test_value_keeps_an_expensive_prefix_in_use() -> None:
    index = long_and_short("value")
    for round_number in range(100):
        index.use(index.match(keys_of(LONG)).path)
        assert evict(index) != LONG
        insert_path(index, chr(ord("c") + round_number % 20), checkpoints="x")


def test_credit_of_an_entry_is_its_loss_per_freed_byte() -> None:
    index = long_and_short("value")
    short, long = index.match(keys_of(SHORT)).path[-1], index.match(keys_of(LONG)).path[-1]
    assert index.credit(short) == 2 / (PAGE_BYTES + STATE_BYTES)
    before = index.credit(long)
    assert before == (8 + 36) / (8 * PAGE_BYTES + STATE_BYTES)
    index.age(index.credit(short))
    assert index.credit(short) == 0
    assert index.credit(long) == pytest.approx(before - 2 / (PAGE_BYTES + STATE_BYTES))


def test_value_grows_with_the_number_of_uses() -> None:
    index = an_index(hybrid=True)
    (often,), (once,) = insert_path(index, "a", checkpoints="x"), insert_path(index, "b", checkpoints="x")
    for _ in range(3):
        index.use((often,))
    index.use((once,))
    assert index.cheapest_checkpoint() is once
    assert index.credit(often) == 2 * index.credit(once)


def test_value_of_a_checkpoint_is_lower_close_to_another() -> None:
    index = an_index(hybrid=True, cost=EXPENSIVE)
    *_, near, last = insert_path(index, "aaaaaaa", checkpoints=".....xx")
    alone = insert_path(index, "bbbbbbb", checkpoints="......x")[-1]
    assert index.credit(last) < index.credit(alone)
    assert last.saved_flops == 1 + 7
    assert near.saved_flops == 6 + 21
    assert index.cheapest_checkpoint() is last


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_spare_checkpoints_go_first_until_they_are_used(policy: Policy) -> None:
    index = an_index(hybrid=True, policy=policy)
    first, *_ = insert_path(index, "aaaa", checkpoints="s..x")
    second, *_ = insert_path(index, "bbbb", checkpoints="s...")
    assert index.cheapest_checkpoint() is first, "the older one"
    assert index.credit(first) == 0
    index.use([first])
    assert index.credit(first) > 0
    assert index.cheapest_checkpoint() is second


def test_spare_checkpoint_takes_no_value_from_those_below_it() -> None:
    index = an_index(hybrid=True)
    spare, _, last = insert_path(index, "aaa", checkpoints="s.x")
    alone = insert_path(index, "bbb", checkpoints="..x")[-1]
    assert index.credit(last) == index.credit(alone)
    index.use([spare])
    below = insert_path(index, "aaac", checkpoints="...x")[-1]
    index.drop_checkpoint(last)
    index.drop_checkpoint(below)
    index.keep_checkpoint(below, Checkpoint((StateId(99),)))
    assert below.saved_flops == 3, "a used one does"


def test_use_does_not_renew_checkpoints_above_the_end() -> None:
    index = an_index(hybrid=True, policy="lru")
    first, last = insert_path(index, "ab", checkpoints="xx")
    insert_path(index, "c", checkpoints="x")
    index.use((first, last))
    assert index.cheapest_checkpoint() is first
