"""Leases in one situation at a time: rolling, skipping, sharing, and memory that does not suffice."""

import pytest

from tests.unit.kvstore.leases import KEYS, ROOT, P, a_ledger, grown, scattered
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import page_keys


def test_a_rolling_checkpoint_takes_the_place_of_the_one_before() -> None:
    ledger = a_ledger(8)
    lease = grown(ledger, ledger.open("a"), P)
    ledger.roll_checkpoint(lease)
    grown(ledger, lease, 2 * P)
    ledger.roll_checkpoint(lease)
    first, second = lease.entries
    assert (first.checkpoint is None, second.checkpoint is None) == (True, False)
    reader = ledger.share("reader", lease, 2)
    grown(ledger, lease, 3 * P)
    ledger.roll_checkpoint(lease)
    assert second.checkpoint is not None, "somebody reads it"
    assert reader.source is second
    assert lease.rolling is lease.entries[2]
    ledger.release("a")
    ledger.release("reader")
    ledger.check()
    assert ledger.usage().states_taken == 2


def test_a_checkpoint_that_finds_no_memory_is_skipped() -> None:
    ledger = a_ledger(2)
    lease = grown(ledger, ledger.open("a"), P)
    state = lease.state
    ledger.roll_checkpoint(lease)
    assert ledger.counters["checkpoints_skipped"] == 1
    assert (lease.state, lease.rolling, lease.entries[0].checkpoint) == (state, None, None)
    ledger.check()


def test_a_checkpoint_that_is_there_already_is_read() -> None:
    ledger = a_ledger(8)
    one, other = ledger.open("one"), ledger.open("other")
    ledger.reserve(one, P)
    grown(ledger, other, P)
    ledger.keep_state(other)
    ledger.commit(one, P, KEYS)
    ledger.keep_state(one)
    assert one.source is other.source
    assert one.pages() == other.pages(), "the first writer's page is shared"
    assert one.read_state == other.read_state != one.state
    assert ledger.usage().pages_taken == 1


def test_a_reservation_is_all_or_nothing() -> None:
    ledger = a_ledger(4)
    lease = grown(ledger, ledger.open("a"), 1)
    before = ledger.usage()
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 7 * P)
    assert ledger.usage() == before
    ledger.keep_state(grown(ledger, lease, P), last=True)
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 7 * P)
    assert lease.state is None
    ledger.check()


def test_a_reservation_uses_what_its_own_evictions_left() -> None:
    """All places for states are taken, so the state opens the last extent, which the pages need; then a
    checkpoint is evicted with its page, and its place would have done for the state."""
    ledger = a_ledger(3, states_per_extent=2)
    grown(ledger, ledger.open("a"), 1)
    ledger.keep_state(grown(ledger, ledger.open("b"), P), last=True)
    ledger.release("b")
    lease = ledger.open("c")
    ledger.reserve(lease, 7 * P)
    assert (len(lease.own), ledger.usage().state_extents) == (7, 1)
    ledger.check()


def test_what_is_evicted_is_counted() -> None:
    ledger = a_ledger(4)
    lease = grown(ledger, ledger.open("a"), 2 * P)
    ledger.keep_state(lease)
    ledger.release("a")
    lease = ledger.open("b")
    for num_pages, evicted in ((2, (0, 0)), (3, (1, 1)), (5, (1, 1)), (6, (2, 1))):
        grown(ledger, lease, num_pages * P, page_keys(ROOT, [1] * 20, P))
        counters = ledger.counters
        assert (counters["pages_evicted"], counters["checkpoints_evicted"]) == evicted


def test_pages_scattered_over_all_extents_can_be_given_up() -> None:
    """They leave no extent for a state as long as they are attached."""
    ledger = a_ledger(6)
    scattered(ledger, KEYS)
    lease = ledger.open("a")
    ledger.attach(lease, ledger.index.match(KEYS[:5]), 5)
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 11)
    ledger.release("a")
    ledger.forget()
    assert ledger.usage().empty_extents == 6
    grown(ledger, ledger.open("a"), 11)
    with pytest.raises(AssertionError):
        ledger.forget()


def test_a_name_holds_one_lease() -> None:
    ledger = a_ledger(2)
    ledger.open("a")
    with pytest.raises(AssertionError, match="a holds a lease already"):
        ledger.open("a")
