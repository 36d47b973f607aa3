"""The eviction order of prefixes under each policy."""

import pytest

from tests.support.kvstore.indexes import (
    an_index,
    evict_all,
    insert_path,
    keys_of,
)
from tidemill.kvstore.layout import StateId
from tidemill.kvstore.memory.entry import Checkpoint
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
