"""What the policies mean: which of the kept prefixes goes first."""

import pytest

from tests.support.kvstore.indexes import (
    PAGE_BYTES,
    STATE_BYTES,
    an_index,
    evict,
    evicted,
    kept_path,
    keys_of,
)
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_leaves_that_lead_to_no_checkpoint_go_first(policy: Policy) -> None:
    index = an_index(hybrid=True, policy=policy)
    kept_path(index, "aaa", checkpoints=".x.")
    kept_path(index, "bb", checkpoints=".x")
    kept_path(index, "ccc")
    assert evicted(index) == ["aaa", "ccc", "cc", "c", "aa", "a", "bb", "b"]


@pytest.mark.parametrize("policy", ["lru", "value"])
def test_what_is_worth_the_same_goes_by_recency(policy: Policy) -> None:
    index = an_index(hybrid=False, policy=policy)
    for path in ("aa", "b", "c"):
        kept_path(index, path)
    index.use(index.match(keys_of("b")).path)
    assert evicted(index) == ["aa", "a", "c", "b"]


EXPENSIVE = RecomputeCost(token_flops=1.0, context_flops=1.0)
LONG, SHORT = "aaaaaaaa", "b"


def long_and_short(policy: Policy) -> PrefixIndex:
    """A long prefix with its checkpoint, and a short one that was used a little later."""
    index = an_index(hybrid=True, policy=policy, cost=EXPENSIVE)
    kept_path(index, LONG, checkpoints=".......x")
    kept_path(index, SHORT, checkpoints="x")
    return index


def test_lru_lets_the_long_prefix_go_for_the_short_one_that_was_used_later() -> None:
    assert evict(long_and_short("lru")) == LONG


def test_value_keeps_the_long_prefix_that_is_expensive_to_compute() -> None:
    assert evict(long_and_short("value")) == SHORT


def test_value_lets_go_what_has_not_been_used_for_long_enough() -> None:
    """Each eviction moves the clock: what comes later starts from there, and overtakes."""
    index = long_and_short("value")
    for round_number in range(100):
        gone = evict(index)
        if gone == LONG:
            break
        assert gone is not None
        kept_path(index, chr(ord("c") + round_number % 20), checkpoints="x")
    else:
        pytest.fail("what is expensive stays for ever")
    assert round_number > 3


def test_value_keeps_what_is_expensive_and_used() -> None:
    index = long_and_short("value")
    for round_number in range(100):
        index.use(index.match(keys_of(LONG)).path)
        assert evict(index) != LONG
        kept_path(index, chr(ord("c") + round_number % 20), checkpoints="x")


def test_the_credit_of_what_goes_next_is_what_is_lost_now() -> None:
    index = long_and_short("value")
    short, long = index.match(keys_of(SHORT)).path[-1], index.match(keys_of(LONG)).path[-1]
    assert index.credit(short) == 2 / (PAGE_BYTES + STATE_BYTES)
    before = index.credit(long)
    assert before == (8 + 36) / (8 * PAGE_BYTES + STATE_BYTES)
    index.age(index.credit(short))
    assert index.credit(short) == 0
    assert index.credit(long) == pytest.approx(before - 2 / (PAGE_BYTES + STATE_BYTES))


def test_what_was_used_often_is_worth_more() -> None:
    index = an_index(hybrid=True)
    (often,), (once,) = kept_path(index, "a", checkpoints="x"), kept_path(index, "b", checkpoints="x")
    for _ in range(3):
        index.use((often,))
    index.use((once,))
    assert index.cheapest_checkpoint() is once
    assert index.credit(often) == 2 * index.credit(once)


def test_a_checkpoint_close_to_another_one_is_worth_less() -> None:
    index = an_index(hybrid=True, cost=EXPENSIVE)
    *_, near, last = kept_path(index, "aaaaaaa", checkpoints=".....xx")
    alone = kept_path(index, "bbbbbbb", checkpoints="......x")[-1]
    assert index.credit(last) < index.credit(alone)
    assert last.saved_flops == 1 + 7
    assert near.saved_flops == 6 + 21
    assert index.cheapest_checkpoint() is last


def test_a_use_does_not_renew_the_checkpoints_that_it_passed() -> None:
    index = an_index(hybrid=True, policy="lru")
    first, last = kept_path(index, "ab", checkpoints="xx")
    kept_path(index, "c", checkpoints="x")
    index.use((first, last))
    assert index.cheapest_checkpoint() is first
