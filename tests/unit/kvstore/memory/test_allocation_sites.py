"""Memory is refused at each allocation site, at its first call, its second, up to its last."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch

from tests.support.kvstore.leases import ROOT, P, a_cache, snapshot
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import PAGES, STATES, WINDOWS
from tidemill.kvstore.memory.demand import CHECKPOINT_STATE
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import Ledger

KEYS = {0: page_keys(ROOT, [0] * 60, P), 1: page_keys(ROOT, [1] * 60, P)}
"""The keys of the two requests, by their number of spare slots."""

BACKING = "backing.map"
SITES = (PAGES, STATES, WINDOWS, CHECKPOINT_STATE, BACKING)


@dataclass
class Refuser:
    """Refuses the call number `nth` of `site`, also as a backing that refuses to map."""

    site: str
    nth: int
    calls: Counter[str] = field(default_factory=Counter[str])
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def __call__(self, site: str) -> bool:
        self.calls[site] += 1
        return site == self.site and self.calls[site] == self.nth + 1

    @property
    def has_refused(self) -> bool:
        return self.calls[self.site] > self.nth

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        del offset_bytes, num_bytes
        if self(BACKING):
            raise OutOfMemory("refused")

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None: ...

    def unmap(self, offset_bytes: int, num_bytes: int) -> None: ...

    def close(self) -> None: ...


class Driver:
    """Runs requests through every site, and retries each refused call."""

    def __init__(self, refuser: Refuser) -> None:
        self.refuser = refuser
        self.cache = a_cache(40, window=P + 1, backing=refuser)
        self.ledger = Ledger(self.cache, fail_allocation=refuser)
        self.refused_reserves = self.refused_checkpoints = 0

    def run(self) -> None:
        for name, spare_slots_min in (("lazy", 0), ("double", 1)):
            lease = self.ledger.open(name, spare_slots_min=spare_slots_min)
            self._step(lease, 3 * P, inside=(P, 2 * P))
            self._step(lease, 4 * P)
            self._roll(lease)
            self._step(lease, 5 * P - 1)
            for _ in range(3):
                self._step(lease, lease.committed + 3, drafts=2, committed=lease.committed + 1)
                if lease.committed % P == 0:
                    self._roll(lease)
            self._two_in_flight(lease)
            self.ledger.release(name)
            self.ledger.check()

    def _step(
        self,
        lease: Lease,
        end: int,
        *,
        drafts: int = 0,
        committed: int | None = None,
        inside: tuple[int, ...] = (),
    ) -> None:
        self._reserve(lease, end, drafts)
        self.ledger.launch(lease, end, drafts=drafts, inside=inside)
        self.ledger.commit(lease, end if committed is None else committed, KEYS[lease.spare_slots_min])
        self.ledger.check()

    def _two_in_flight(self, lease: Lease) -> None:
        """Launch a second step that leaves the state of the first to a checkpoint, if it can."""
        boundary = (lease.committed // P + 1) * P
        self._reserve(lease, boundary)
        self.ledger.launch(lease, boundary)
        self._reserve(lease, boundary + 1)
        calls = self.refuser.calls[CHECKPOINT_STATE]
        refused = self.refuser.has_refused
        second = self.ledger.launch(lease, boundary + 1, keep=True)
        self.ledger.check()
        self.ledger.commit(lease, boundary, KEYS[lease.spare_slots_min])
        kept = self.ledger.keep_state(lease)
        self.ledger.check()
        assert kept == (second.reads not in [state for _, state in second.writes])
        assert kept or self.refuser.has_refused > refused
        assert kept or self.refuser.calls[CHECKPOINT_STATE] > calls
        self.ledger.commit(lease, boundary + 1, KEYS[lease.spare_slots_min])
        self.ledger.check()

    def _reserve(self, lease: Lease, end: int, drafts: int = 0) -> None:
        before = (snapshot(lease), self.ledger.usage().pinned[PAGES], self.ledger.usage().pinned[STATES])
        try:
            self.ledger.reserve(lease, end, drafts=drafts)
        except OutOfMemory:
            self.refused_reserves += 1
            self.ledger.check()
            after = (snapshot(lease), self.ledger.usage().pinned[PAGES], self.ledger.usage().pinned[STATES])
            assert after == before
            self.ledger.reserve(lease, end, drafts=drafts)
        self.ledger.check()

    def _roll(self, lease: Lease) -> None:
        before, previous = snapshot(lease), self._checkpoint(lease.rolling)
        if not self.ledger.roll_checkpoint(lease):
            self.refused_checkpoints += 1
            self.ledger.check()
            assert snapshot(lease) == before
            assert self._checkpoint(lease.rolling) == previous, "the previous checkpoint is lost"
            assert lease.shared_entries[-1].checkpoint is None
            assert self.ledger.roll_checkpoint(lease)
        assert lease.rolling is lease.shared_entries[-1]
        self.ledger.check()

    def _checkpoint(self, entry: Entry | None) -> Checkpoint | None:
        return entry and entry.checkpoint


@pytest.mark.parametrize("site", SITES, ids=str)
def test_ledger_survives_a_refusal_at_each_allocation(site: str) -> None:
    nth = 0
    while True:
        refuser = Refuser(site, nth)
        driver = Driver(refuser)
        driver.run()
        if not refuser.has_refused:
            break
        if site == CHECKPOINT_STATE:
            assert driver.refused_reserves == 0, "a checkpoint is optional"
        elif site != BACKING:
            assert (driver.refused_reserves, driver.refused_checkpoints) == (1, 0)
        usage = driver.ledger.usage()
        assert (driver.ledger.num_leases, usage.pinned[PAGES], usage.pinned[STATES]) == (0, 0, 0)
        assert usage.pinned[WINDOWS] == 0
        assert driver.ledger.resize(1), "everything can be evicted"
        nth += 1
    assert nth > 1, f"no driver reaches {site}"


def test_ledger_reuses_cached_memory_when_the_system_refuses_extents() -> None:
    """Requests use cached memory, and fail when there is none; no memory leaks."""

    class Full(Refuser):
        def __call__(self, site: str) -> bool:
            self.calls[site] += 1
            return site == BACKING and self.calls[site] > self.nth

    for nth in range(8):
        cache = a_cache(8, backing=Full(BACKING, nth))
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
