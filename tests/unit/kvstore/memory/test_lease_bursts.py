"""The ledger with many leases that take or roll a checkpoint in the same step."""

import pytest

from tests.support.kvstore.leases import ROOT, a_cache
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger

NUM_LEASES = 64
BURST_P = 2
LAST = 6 * BURST_P


@pytest.mark.parametrize(
    ("strategy", "slots", "overlap"),
    [("none", 1, False), ("lazy", 2, False), ("double", 3, False), ("none", 1, True), ("double", 3, True)],
)
def test_leases_roll_checkpoints_in_the_same_step(
    strategy: str,
    slots: int,
    overlap: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    """The memory is just enough: one extent per two pages, and the slots of the strategy."""
    cache = a_cache(NUM_LEASES * (LAST // BURST_P // 2 + slots))
    ledger = Ledger(cache)
    spare_slots_min = 1 if strategy == "double" else 0
    leases = [ledger.open(f"r{number}", spare_slots_min=spare_slots_min) for number in range(NUM_LEASES)]
    keys = [page_keys(ROOT, [number] * LAST, BURST_P) for number in range(NUM_LEASES)]
    for end in range(1, LAST + 1):
        for lease in leases:
            ledger.reserve(lease, end)
            ledger.launch(lease, end, keep=strategy != "none" and (end - 1) % BURST_P == 0)
        committed = end - overlap
        for lease, own_keys in zip(leases, keys, strict=True) if committed else ():
            ledger.commit(lease, committed, own_keys)
            if strategy != "none" and committed % BURST_P == 0:
                assert ledger.roll_checkpoint(lease), "a checkpoint was lost"
            _check_last_boundary(ledger, lease, strategy)
        ledger.check()
        if not overlap and end > BURST_P and end % BURST_P:
            assert ledger.num_slots == slots * NUM_LEASES
    assert not any(count for name, count in ledger.counters.items() if name.startswith(("evicted", "check")))
    assert cache.arena.num_empty == 0 or overlap, "the memory was more than enough"


def _check_last_boundary(ledger: Ledger, lease: Lease, strategy: str) -> None:
    boundary = lease.committed // BURST_P
    if strategy != "none" and boundary:
        entry = lease.shared_entries[boundary - 1]
        assert lease.rolling is entry
        assert ledger.index.is_restorable(entry)
