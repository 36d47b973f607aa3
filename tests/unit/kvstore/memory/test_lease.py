"""Leases in one situation at a time: rolling, skipping, sharing, and memory that does not suffice."""

import pytest

from tests.support.kvstore.leases import KEYS, ROOT, P, a_cache, a_ledger, grown, scattered
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.memory.allocation_sites import AllocationSite, Demand
from tidemill.kvstore.memory.ledger import Ledger


def test_a_rolling_checkpoint_takes_the_place_of_the_one_before() -> None:
    ledger = a_ledger(8)
    lease = grown(ledger, ledger.open("a"), P)
    ledger.roll_checkpoint(lease)
    grown(ledger, lease, 2 * P)
    ledger.roll_checkpoint(lease)
    first, second = lease.shared_entries
    assert (first.checkpoint is None, second.checkpoint is None) == (True, False)
    reader = ledger.share("reader", lease, 2)
    grown(ledger, lease, 3 * P)
    ledger.roll_checkpoint(lease)
    assert second.checkpoint is not None, "somebody reads it"
    assert reader.source is second
    assert lease.rolling is lease.shared_entries[2]
    ledger.release("a")
    ledger.release("reader")
    ledger.check()
    assert ledger.usage().states_cached == 2


def test_a_checkpoint_that_finds_no_memory_is_skipped_and_tried_again() -> None:
    ledger = a_ledger(3)
    lease = grown(ledger, ledger.open("a"), P)
    other = grown(ledger, ledger.open("other"), 1, page_keys(ROOT, [9, 9], P))
    before = (dict(lease.states), lease.source, lease.rolling)
    assert not ledger.roll_checkpoint(lease)
    assert ledger.counters["checkpoints_skipped"] == 1
    assert (lease.states, lease.source, lease.rolling, lease.shared_entries[0].checkpoint) == (*before, None)
    ledger.check()
    ledger.release("other")
    assert not other.private_pages
    assert ledger.roll_checkpoint(lease)
    assert ledger.num_slots == 2


def test_an_earlier_checkpoint_that_stays_is_still_the_one_to_replace() -> None:
    """It is being read, and no second slot can be had: later, the next one takes its place."""
    ledger = a_ledger(5)
    lease = grown(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    reader = ledger.share("reader", lease, 1)
    grown(ledger, lease, 2 * P)
    hog = grown(ledger, ledger.open("hog"), 1)
    assert not ledger.roll_checkpoint(lease)
    assert (lease.rolling, ledger.num_slots) == (lease.shared_entries[0], 3)
    assert reader.source is lease.rolling
    ledger.release("reader")
    ledger.release("hog")
    assert hog.ended
    assert ledger.roll_checkpoint(lease)
    assert [entry.checkpoint is None for entry in lease.shared_entries] == [True, False]


def test_who_finds_no_second_slot_gives_up_its_own_checkpoint_and_nobody_elses() -> None:
    ledger = a_ledger(6)
    others = grown(ledger, ledger.open("others"), P, page_keys(ROOT, [7] * P, P))
    ledger.keep_state(others, last=True)
    ledger.release("others")
    lease = grown(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    grown(ledger, lease, 2 * P)
    grown(ledger, ledger.open("hog"), 1)
    assert ledger.roll_checkpoint(lease)
    assert [entry.checkpoint is None for entry in lease.shared_entries] == [True, False]
    assert not ledger.counters["evicted_checkpoints_for_states"]
    assert ledger.index.match(page_keys(ROOT, [7] * P, P)).restorable_pages == 1


def test_a_checkpoint_that_is_there_already_is_not_made_again() -> None:
    ledger = a_ledger(8)
    one, other = ledger.open("one"), ledger.open("other")
    ledger.reserve(one, P)
    ledger.launch(one, P)
    ledger.keep_state(grown(ledger, other, P), last=True)
    ledger.commit(one, P, KEYS)
    mine = dict(one.states)
    assert ledger.keep_state(one)
    assert (one.states, one.source) == (mine, None)
    assert one.pages == other.pages, "the first writer's page is shared"
    usage = ledger.usage()
    assert (usage.pages_pinned, usage.states_pinned) == (1, 2)


def test_a_page_that_the_index_had_already_is_free_when_nobody_reads_it() -> None:
    """The second step in flight was launched with a page table that names it."""
    ledger = a_ledger(8)
    lease = ledger.open("a")
    for end in (P, P + 1):
        ledger.reserve(lease, end)
        ledger.launch(lease, end)
    table = lease.pages
    grown(ledger, ledger.open("first"), P)
    ledger.commit(lease, P, KEYS)
    assert lease.pages[0] != table[0]
    fresh = ledger.open("fresh")
    ledger.reserve(fresh, 3 * P)
    assert table[0] not in fresh.private_pages
    ledger.commit(lease, P + 1, KEYS)
    ledger.check()
    assert ledger.usage().pages_pinned == 2 + 3


def test_drafts_that_are_rejected_leave_no_slot_behind() -> None:
    ledger = a_ledger(8)
    lease = ledger.open("a")
    ledger.reserve(lease, 4, drafts=2)
    ledger.launch(lease, 4, drafts=2)
    assert ledger.num_slots == 3
    ledger.commit(lease, 2, KEYS)
    ledger.check()
    assert (ledger.num_slots, list(lease.states)) == (1, [2])


def test_a_void_step_changes_nothing_and_keeps_its_places_until_it_lands() -> None:
    ledger = a_ledger(9)
    lease = ledger.open("a")
    ledger.reserve(lease, 4, drafts=1)
    ledger.launch(lease, 4, drafts=1)
    ledger.reserve(lease, 7)
    void = ledger.launch(lease, 7)
    ledger.commit(lease, 3, KEYS)
    assert (void.void, lease.committed, lease.launched) == (True, 3, 3)
    assert lease.allocated == 4 * P
    assert set(void.writes) <= set(lease.owned_states())
    ledger.check()
    ledger.commit(lease, 7, KEYS)
    assert (lease.committed, lease.launched, ledger.num_slots) == (3, 3, 1)
    ledger.check()


def test_what_is_released_in_flight_comes_back_when_the_last_step_has_landed() -> None:
    ledger = a_ledger(8)
    lease = ledger.open("a")
    for end in (P, 2 * P):
        ledger.reserve(lease, end)
        ledger.launch(lease, end)
    held = ledger.usage()
    ledger.release("a")
    again = ledger.open("a")
    for landed in (P, 2 * P):
        ledger.check()
        assert (ledger.usage(), ledger.num_leases) == (held, 2)
        ledger.commit(lease, landed, KEYS)
    ledger.check()
    assert (len(ledger.index), ledger.num_leases, ledger.usage().pages_pinned) == (0, 1, 0)
    assert not again.private_pages


@pytest.mark.parametrize("rolls", [False, True])
def test_a_path_keeps_as_many_checkpoints_as_it_may(rolls: bool) -> None:  # noqa: FBT001  two ways to make one
    """Those where paths part stay longest; the one that a roll replaces does not count."""
    ledger = Ledger(a_cache(30), checkpoints_per_path=3)
    lease = ledger.open("a")
    for num_pages in (1, 2):
        ledger.keep_state(grown(ledger, lease, num_pages * P))
    branch = ledger.open("branch")
    ledger.attach(branch, ledger.index.match(KEYS[:1]), 1)
    grown(ledger, branch, 2 * P, page_keys(ROOT, [0, 1, 8, 8], P))
    for num_pages in range(3, 8):
        grown(ledger, lease, num_pages * P)
        assert ledger.roll_checkpoint(lease) if rolls else ledger.keep_state(lease)
        ledger.check()
    kept = [depth for depth, entry in enumerate(lease.shared_entries, 1) if entry.checkpoint is not None]
    assert kept == ([1, 2, 7] if rolls else [1, 6, 7])


def test_a_reservation_is_all_or_nothing() -> None:
    ledger = a_ledger(4)
    lease = grown(ledger, ledger.open("a"), 1)
    before = ledger.usage()
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 9 * P)
    assert ledger.usage() == before
    ledger.check()


def test_a_reservation_may_ask_for_pages_that_are_left_to_others() -> None:
    ledger = a_ledger(4)
    lease = ledger.open("a")
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 2 * P, headroom=Demand(5))
    assert not [*lease.private_pages, *lease.spare_slots]
    ledger.reserve(lease, 2 * P, headroom=Demand(4))
    assert len(lease.private_pages) == 2
    grown(ledger, lease, 6 * P)


def test_a_checkpoint_gives_way_to_what_its_own_request_needs() -> None:
    """Nobody else reads it, and no second slot can be had: the step overwrites the state, as if it had not
    been kept."""
    ledger = a_ledger(4)
    lease = grown(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    slot = lease.shared_entries[0].checkpoint
    ledger.reserve(lease, 5 * P)
    ledger.check()
    assert slot is not None
    assert (lease.states, lease.source, lease.rolling, ledger.num_slots) == ({P: slot.state}, None, None, 1)
    grown(ledger, lease, 5 * P)


def test_a_checkpoint_that_somebody_reads_does_not_give_way() -> None:
    ledger = a_ledger(4)
    lease = grown(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    reader = ledger.share("reader", lease, 1)
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 5 * P)
    assert reader.source is lease.source is lease.rolling is lease.shared_entries[0]
    ledger.check()


def test_a_reservation_gives_up_a_checkpoint_rather_than_the_extent_that_its_pages_need() -> None:
    """The places for states are taken, one of them by a checkpoint; the last empty extent is for pages."""
    ledger = a_ledger(3, states_per_extent=2)
    grown(ledger, ledger.open("a"), 1)
    ledger.keep_state(grown(ledger, ledger.open("b"), P), last=True)
    ledger.release("b")
    lease = ledger.open("c")
    ledger.reserve(lease, 7 * P)
    assert (len(lease.private_pages), ledger.usage().state_extents) == (7, 1)
    ledger.check()


def test_what_is_evicted_is_counted_by_what_it_was_needed_for() -> None:
    ledger = a_ledger(4)
    ledger.keep_state(grown(ledger, ledger.open("a"), 2 * P), last=True)
    ledger.release("a")
    lease = ledger.open("b")
    ledger.reserve(lease, 6 * P)
    assert ledger.counters == {"evicted_pages_for_pages": 2, "evicted_checkpoints_for_pages": 1}
    ledger.release("b")
    ledger.keep_state(grown(ledger, ledger.open("a"), 2 * P), last=True)
    ledger.release("a")
    assert ledger.resize(1)
    assert ledger.counters["evicted_checkpoints_for_resize"] == 1


def test_pages_scattered_over_all_extents_leave_none_for_a_state() -> None:
    """Unless they are given up, or the state at their end is."""
    ledger = a_ledger(6)
    scattered(ledger, KEYS)
    lease = ledger.open("a")
    ledger.attach(lease, ledger.index.match(KEYS[:5]), 5)
    ledger.share("reader", lease, 5)
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 11)
    ledger.release("reader")
    ledger.reserve(lease, 11)
    assert list(lease.states) == [5 * P]
    ledger.release("a")
    grown(ledger, ledger.open("a"), 11)


def test_a_checkpoint_that_is_skipped_costs_no_other() -> None:
    """The path holds as many as it may, and the next one finds no slot."""
    refused = set[AllocationSite]()
    ledger = Ledger(a_cache(9), checkpoints_per_path=2, fail_allocation=refused.__contains__)
    lease = ledger.open("a")
    for num_pages in (1, 2):
        assert ledger.keep_state(grown(ledger, lease, num_pages * P))
    grown(ledger, lease, 3 * P)
    refused.add(AllocationSite.CHECKPOINT_STATE)
    assert not ledger.keep_state(lease)
    assert [entry.checkpoint is not None for entry in lease.shared_entries] == [True, True, False]
    refused.clear()
    assert ledger.keep_state(lease)
    assert [entry.checkpoint is not None for entry in lease.shared_entries] == [False, True, True]


def test_a_refused_budget_is_met_when_the_last_holder_has_gone() -> None:
    ledger = a_ledger(6)
    grown(ledger, ledger.open("a"), 4 * P)
    assert not ledger.resize(1)
    assert (ledger.excess, ledger.budget_extents) == (2, 1)
    ledger.release("a")
    assert ledger.resize(1)
    assert ledger.excess == 0


def test_a_name_holds_one_lease() -> None:
    ledger = a_ledger(2)
    ledger.open("a")
    with pytest.raises(AssertionError, match="a holds a lease already"):
        ledger.open("a")
