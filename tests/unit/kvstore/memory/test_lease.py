"""Leases in one situation per test: rolling, skipping, sharing, and insufficient memory."""

from itertools import count

import pytest

from tests.support.kvstore.leases import KEYS, ROOT, P, a_cache, a_ledger, grow, scatter
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import PAGES, STATES
from tidemill.kvstore.memory.demand import CHECKPOINT_STATE
from tidemill.kvstore.memory.ledger import Ledger


def test_roll_checkpoint_replaces_the_previous_one() -> None:
    ledger = a_ledger(8)
    lease = grow(ledger, ledger.open("a"), P)
    ledger.roll_checkpoint(lease)
    grow(ledger, lease, 2 * P)
    ledger.roll_checkpoint(lease)
    first, second = lease.shared_entries
    assert (first.checkpoint is None, second.checkpoint is None) == (True, False)
    reader = ledger.share("reader", lease, 2)
    grow(ledger, lease, 3 * P)
    ledger.roll_checkpoint(lease)
    assert second.checkpoint is not None, "another lease reads it"
    assert reader.source is second
    assert lease.rolling is lease.shared_entries[2]
    ledger.release("a")
    ledger.release("reader")
    ledger.check()
    assert ledger.usage().cached[STATES] == 2


def test_roll_checkpoint_is_skipped_without_memory_and_retried() -> None:
    ledger = a_ledger(3)
    lease = grow(ledger, ledger.open("a"), P)
    other = grow(ledger, ledger.open("other"), 1, page_keys(ROOT, [9, 9], P))
    before = (dict(lease.states), lease.source, lease.rolling)
    assert not ledger.roll_checkpoint(lease)
    assert ledger.counters["checkpoints_skipped"] == 1
    assert (lease.states, lease.source, lease.rolling, lease.shared_entries[0].checkpoint) == (*before, None)
    ledger.check()
    ledger.release("other")
    assert not other.private_pages
    assert ledger.roll_checkpoint(lease)
    assert ledger.num_slots == 2


def test_roll_checkpoint_replaces_the_earlier_one_after_a_skip() -> None:
    """A reader and a full memory prevent the replacement; later it succeeds."""
    ledger = a_ledger(5)
    lease = grow(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    reader = ledger.share("reader", lease, 1)
    grow(ledger, lease, 2 * P)
    other = grow(ledger, ledger.open("other"), 1)
    assert not ledger.roll_checkpoint(lease)
    assert (lease.rolling, ledger.num_slots) == (lease.shared_entries[0], 3)
    assert reader.source is lease.rolling
    ledger.release("reader")
    ledger.release("other")
    assert other.ended
    assert ledger.roll_checkpoint(lease)
    assert [entry.checkpoint is None for entry in lease.shared_entries] == [True, False]


def test_roll_checkpoint_without_a_free_slot_reuses_only_its_own_checkpoint() -> None:
    ledger = a_ledger(6)
    others = grow(ledger, ledger.open("others"), P, page_keys(ROOT, [7] * P, P))
    ledger.keep_state(others, last=True)
    ledger.release("others")
    lease = grow(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    grow(ledger, lease, 2 * P)
    grow(ledger, ledger.open("other"), 1)
    assert ledger.roll_checkpoint(lease)
    assert [entry.checkpoint is None for entry in lease.shared_entries] == [True, False]
    assert not ledger.counters["evicted_checkpoints_for_states"]
    assert ledger.index.match(page_keys(ROOT, [7] * P, P)).restorable_pages == 1


def test_keep_state_does_not_replace_an_existing_checkpoint() -> None:
    ledger = a_ledger(8)
    first, other = ledger.open("first"), ledger.open("other")
    ledger.reserve(first, P)
    ledger.launch(first, P)
    ledger.keep_state(grow(ledger, other, P), last=True)
    ledger.commit(first, P, KEYS)
    states = dict(first.states)
    assert ledger.keep_state(first)
    assert (first.states, first.source) == (states, None)
    assert first.pages == other.pages, "the page of the first writer is not shared"
    usage = ledger.usage()
    assert (usage.pinned[PAGES], usage.pinned[STATES]) == (1, 2)


def test_commit_frees_a_duplicate_page_when_no_step_reads_it() -> None:
    """The second step in flight has the page in its page table."""
    ledger = a_ledger(8)
    lease = ledger.open("a")
    for end in (P, P + 1):
        ledger.reserve(lease, end)
        ledger.launch(lease, end)
    table = lease.pages
    grow(ledger, ledger.open("first"), P)
    ledger.commit(lease, P, KEYS)
    assert lease.pages[0] != table[0]
    fresh = ledger.open("fresh")
    ledger.reserve(fresh, 3 * P)
    assert table[0] not in fresh.private_pages
    ledger.commit(lease, P + 1, KEYS)
    ledger.check()
    assert ledger.usage().pinned[PAGES] == 2 + 3


def test_commit_returns_the_slots_of_rejected_drafts() -> None:
    ledger = a_ledger(8)
    lease = ledger.open("a")
    ledger.reserve(lease, 4, drafts=2)
    ledger.launch(lease, 4, drafts=2)
    assert ledger.num_slots == 3
    ledger.commit(lease, 2, KEYS)
    ledger.check()
    assert (ledger.num_slots, list(lease.states)) == (1, [2])


def test_commit_of_a_void_step_only_frees_its_memory() -> None:
    ledger = a_ledger(9)
    lease = ledger.open("a")
    ledger.reserve(lease, 4, drafts=1)
    ledger.launch(lease, 4, drafts=1)
    ledger.reserve(lease, 7)
    void = ledger.launch(lease, 7)
    ledger.commit(lease, 3, KEYS)
    assert (void.void, lease.committed, lease.launched) == (True, 3, 3)
    assert lease.allocated == 4 * P
    assert {state for _, state in void.writes} <= set(lease.owned()[STATES])
    ledger.check()
    ledger.commit(lease, 7, KEYS)
    assert (lease.committed, lease.launched, ledger.num_slots) == (3, 3, 1)
    ledger.check()


def test_release_in_flight_frees_memory_after_the_last_step() -> None:
    ledger = a_ledger(8)
    lease = ledger.open("a")
    for end in (P, 2 * P):
        ledger.reserve(lease, end)
        ledger.launch(lease, end)
    before = ledger.usage()
    ledger.release("a")
    again = ledger.open("a")
    for committed in (P, 2 * P):
        ledger.check()
        assert (ledger.usage(), ledger.num_leases) == (before, 2)
        ledger.commit(lease, committed, KEYS)
    ledger.check()
    assert (len(ledger.index), ledger.num_leases, ledger.usage().pinned[PAGES]) == (0, 1, 0)
    assert not again.private_pages


@pytest.mark.parametrize("rolls", [False, True])
def test_path_keeps_at_most_its_number_of_checkpoints(rolls: bool) -> None:  # noqa: FBT001  drawn
    """Checkpoints at junctions stay longest; one that is replaced by a roll does not count."""
    ledger = Ledger(a_cache(30), checkpoints_per_path=3)
    lease = ledger.open("a")
    for num_pages in (1, 2):
        ledger.keep_state(grow(ledger, lease, num_pages * P))
    branch = ledger.open("branch")
    ledger.attach(branch, ledger.index.match(KEYS[:1]), 1)
    grow(ledger, branch, 2 * P, page_keys(ROOT, [0, 1, 8, 8], P))
    for num_pages in range(3, 8):
        grow(ledger, lease, num_pages * P)
        assert ledger.roll_checkpoint(lease) if rolls else ledger.keep_state(lease)
        ledger.check()
    kept = [depth for depth, entry in enumerate(lease.shared_entries, 1) if entry.checkpoint is not None]
    assert kept == ([1, 2, 7] if rolls else [1, 6, 7])


def test_prompt_steps_count_for_no_limit() -> None:
    ledger = Ledger(a_cache(30), checkpoints_per_path=2)
    lease = ledger.open("a")
    for num_pages in range(1, 7):
        ledger.keep_state(grow(ledger, lease, num_pages * P), spare=num_pages % 2 > 0)
    ledger.check()
    kept = [depth for depth, entry in enumerate(lease.shared_entries, 1) if entry.checkpoint is not None]
    assert kept == [1, 3, 4, 5, 6]


def test_spare_checkpoint_evicts_nothing() -> None:
    """A checkpoint that counts stays, even if it is worth no more than what a byte has cost so far."""
    ledger = a_ledger(8)
    others = page_keys(ROOT, [9] * P, P)
    ledger.keep_state(grow(ledger, ledger.open("other"), P, others), last=True)
    ledger.release("other")
    lease = grow(ledger, ledger.open("a"), P)
    blocker = grow(ledger, ledger.open("blocker"), 1, page_keys(ROOT, [8, 8], P))
    index = ledger.index
    index.age(max(map(index.credit, index)))
    while ledger.find_spare_slot(lease, P):
        ledger.reserve(blocker, blocker.allocated + P)
    assert ledger.index.match(others).restorable_pages == 1
    before = (ledger.usage(), len(ledger.index))
    assert not ledger.keep_state(lease, spare=True)
    assert (ledger.usage(), len(ledger.index), ledger.counters["checkpoints_skipped"]) == (*before, 0)
    ledger.check()


def test_reserve_is_all_or_nothing() -> None:
    ledger = a_ledger(4)
    lease = grow(ledger, ledger.open("a"), 1)
    before = ledger.usage()
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 9 * P)
    assert ledger.usage() == before
    ledger.check()


def test_reserve_fails_without_its_headroom() -> None:
    ledger = a_ledger(4)
    lease = ledger.open("a")
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 2 * P, headroom={PAGES: 5})
    assert not [*lease.private_pages, *lease.spare_slots]
    ledger.reserve(lease, 2 * P, headroom={PAGES: 4})
    assert len(lease.private_pages) == 2
    grow(ledger, lease, 6 * P)


def test_reserve_takes_back_the_checkpoint_of_its_own_lease() -> None:
    """No other lease reads it, and no second slot can be had: the step overwrites the state."""
    ledger = a_ledger(4)
    lease = grow(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    slot = lease.shared_entries[0].checkpoint
    ledger.reserve(lease, 5 * P)
    ledger.check()
    assert slot is not None
    assert (lease.states, lease.source, lease.rolling, ledger.num_slots) == ({P: slot.state}, None, None, 1)
    grow(ledger, lease, 5 * P)


def test_reserve_does_not_take_back_a_checkpoint_of_another_reader() -> None:
    ledger = a_ledger(4)
    lease = grow(ledger, ledger.open("a"), P)
    assert ledger.roll_checkpoint(lease)
    reader = ledger.share("reader", lease, 1)
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 5 * P)
    assert reader.source is lease.source is lease.rolling is lease.shared_entries[0]
    ledger.check()


def test_reserve_evicts_a_checkpoint_when_its_pages_need_the_extent() -> None:
    """A checkpoint has one of the state slots; the pages need the last empty extent."""
    ledger = a_ledger(3, states_per_extent=2)
    grow(ledger, ledger.open("a"), 1)
    ledger.keep_state(grow(ledger, ledger.open("b"), P), last=True)
    ledger.release("b")
    lease = ledger.open("c")
    ledger.reserve(lease, 7 * P)
    assert (len(lease.private_pages), ledger.usage().extents[STATES]) == (7, 1)
    ledger.check()


def test_counters_count_evictions_by_reason() -> None:
    ledger = a_ledger(4)
    ledger.keep_state(grow(ledger, ledger.open("a"), 2 * P), last=True)
    ledger.release("a")
    lease = ledger.open("b")
    ledger.reserve(lease, 6 * P)
    assert ledger.counters == {"evicted_pages_for_pages": 2, "evicted_checkpoints_for_pages": 1}
    ledger.release("b")
    ledger.keep_state(grow(ledger, ledger.open("a"), 2 * P), last=True)
    ledger.release("a")
    assert ledger.resize(1)
    assert ledger.counters["evicted_checkpoints_for_resize"] == 1


def test_reserve_fails_when_pages_are_scattered_over_all_extents() -> None:
    """It succeeds when the pages, or the state at their end, can be taken back."""
    ledger = a_ledger(6)
    scatter(ledger, KEYS)
    lease = ledger.open("a")
    ledger.attach(lease, ledger.index.match(KEYS[:5]), 5)
    ledger.share("reader", lease, 5)
    with pytest.raises(OutOfMemory):
        ledger.reserve(lease, 11)
    ledger.release("reader")
    ledger.reserve(lease, 11)
    assert list(lease.states) == [5 * P]
    ledger.release("a")
    grow(ledger, ledger.open("a"), 11)


def test_skipped_checkpoint_evicts_no_other() -> None:
    """The path has its most checkpoints, and no slot is free for another."""
    refused = set[str]()
    ledger = Ledger(a_cache(9), checkpoints_per_path=2, fail_allocation=refused.__contains__)
    lease = ledger.open("a")
    for num_pages in (1, 2):
        assert ledger.keep_state(grow(ledger, lease, num_pages * P))
    grow(ledger, lease, 3 * P)
    refused.add(CHECKPOINT_STATE)
    assert not ledger.keep_state(lease)
    assert [entry.checkpoint is not None for entry in lease.shared_entries] == [True, True, False]
    refused.clear()
    assert ledger.keep_state(lease)
    assert [entry.checkpoint is not None for entry in lease.shared_entries] == [False, True, True]


def test_resize_succeeds_after_the_last_lease_is_released() -> None:
    ledger = a_ledger(6)
    grow(ledger, ledger.open("a"), 4 * P)
    assert not ledger.resize(1)
    assert (ledger.excess, ledger.budget_extents) == (2, 1)
    ledger.release("a")
    assert ledger.resize(1)
    assert ledger.excess == 0


def test_open_asserts_one_lease_per_request() -> None:
    ledger = a_ledger(2)
    ledger.open("a")
    with pytest.raises(AssertionError, match="a holds a lease already"):
        ledger.open("a")


def test_deepest_states_inside_a_step_get_the_slots() -> None:
    asked = count()
    ledger = a_ledger(8, fail_allocation=lambda site: site is CHECKPOINT_STATE and next(asked) > 0)
    lease = ledger.open("a")
    ledger.reserve(lease, 4 * P)
    flight = ledger.launch(lease, 4 * P, inside=(P, 2 * P, 3 * P))
    assert [depth for depth, _ in flight.writes] == [3 * P, 4 * P]
    ledger.commit(lease, 4 * P, KEYS)
    ledger.check()
    depths = [entry.depth_pages for entry in lease.shared_entries if entry.checkpoint is not None]
    assert depths == [3]
    assert ledger.counters["checkpoints_skipped"] == 2
