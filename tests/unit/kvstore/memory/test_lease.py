"""Leases in one situation per test: rolling, skipping, sharing, and insufficient memory."""

from itertools import count

import pytest

from tests.support.kvstore.leases import KEYS, MAPPING, ROOT, P, Refusals, a_cache, a_ledger, grow, scatter
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


def test_ledger_reuses_cached_memory_when_the_system_refuses_extents() -> None:
    """Requests use cached memory, and fail when there is none; no memory leaks."""

    for nth in range(8):
        cache = a_cache(8, backing=Refusals(MAPPING, nth, forever=True))
        ledger = Ledger(cache)
        served = 0
        for number in range(6):
            lease = ledger.open("r")
            try:
                ledger.reserve(lease, 3 * P)
            except OutOfMemory:
                assert not [*lease.private_pages, *lease.spare_slots]
            else:
                ledger.launch(lease, 3 * P)
                ledger.commit(lease, 3 * P, page_keys(ROOT, [number] * 3 * P, P))
                ledger.keep_state(lease, last=True)
                served += 1
            ledger.release("r")
            ledger.check()
        assert served == (6 if nth >= 3 else 0)


def test_checkpoint_inside_a_step_has_the_window_at_its_depth() -> None:
    ledger = a_ledger(20, window=P + 1)
    lease = ledger.open("a")
    ledger.reserve(lease, 3 * P)
    ledger.launch(lease, 3 * P, inside=(P, 2 * P))
    windows = lease.window_table
    ledger.commit(lease, 3 * P, KEYS)
    ledger.check()
    for depth_pages, entry in enumerate(lease.shared_entries[:2], 1):
        assert entry.checkpoint is not None
        assert entry.checkpoint.windows == tuple(
            windows[index] for index in ledger.layout.last_window(depth_pages)
        )


@pytest.mark.parametrize("converts", [True, False])
def test_second_checkpoint_of_the_same_text_is_freed(*, converts: bool) -> None:
    ledger = Ledger(a_cache(30, converts=converts))
    leases = [ledger.open(name) for name in ("a", "b")]
    for lease in leases:
        ledger.reserve(lease, 3 * P)
        assert len(ledger.launch(lease, 3 * P, inside=(2 * P,)).writes) == 2
    for lease in leases:
        ledger.commit(lease, 3 * P, KEYS)
        ledger.check()
    assert [entry.checkpoint is not None for entry in leases[1].shared_entries] == [False, True, False]


@pytest.mark.parametrize("converts", [True, False])
def test_step_goes_on_from_a_checkpoint(*, converts: bool) -> None:
    ledger = Ledger(a_cache(30, converts=converts))
    first = ledger.open("a")
    ledger.reserve(first, 3 * P)
    ledger.launch(first, 3 * P, inside=(2 * P,))
    ledger.commit(first, 3 * P, KEYS)
    second = ledger.share("b", first, 2)
    ledger.reserve(second, 3 * P)
    checkpoint, flight = first.shared_entries[1].checkpoint, ledger.launch(second, 3 * P)
    assert checkpoint is not None
    assert flight.start == 2 * P
    if converts:
        assert (flight.restores, flight.reads) == (checkpoint.checkpoints[0], flight.writes[-1].state)
    else:
        assert (flight.restores, flight.reads) == (None, checkpoint.state)
