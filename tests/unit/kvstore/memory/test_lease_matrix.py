"""The ledger with and without overlap and drafts, for each page size and each end of a request."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Literal

import pytest

from tests.support.kvstore.leases import ROOT, a_cache
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.memory.lease import Lease, StepInFlight
from tidemill.kvstore.memory.ledger import Ledger

Ending = Literal["finished", "stopped", "preempted", "aborted", "lost"]
ENDINGS: tuple[Ending, ...] = ("finished", "stopped", "preempted", "aborted", "lost")

DRAFTS = 2


@dataclass(frozen=True)
class Case:
    overlap: bool
    page_tokens: int
    speculative: bool
    ending: Ending
    cache: str = "states"  # or windows, or both

    def __str__(self) -> str:
        words = ["overlap" * self.overlap, f"P{self.page_tokens}", "drafts" * self.speculative, self.ending]
        words.append("" if self.cache == "states" else self.cache)
        return "-".join(filter(None, words))


OF_STATES = [Case(*which) for which in product((False, True), (1, 16, 64), (False, True), ENDINGS)]
OF_WINDOWS = [
    Case(*which, cache)
    for which in product((False, True), (1, 16), (False, True), ENDINGS)
    for cache in ("windows", "both")
]


class Driver:
    """Runs one request like an engine: a chunk of prefill, then single tokens, or with drafts."""

    def __init__(self, ledger: Ledger, case: Case, prompt: list[int], name: str, seed: int) -> None:
        self.ledger = ledger
        self.case = case
        self.random = Random(seed)
        self.name = name
        self.tokens = list(prompt)
        self.prompt_tokens = len(prompt)
        self.committed = self.reserved = 0
        self._open()

    def _open(self) -> None:
        self.lease = self.ledger.open(self.name, spare_slots_min=self.random.randrange(2))
        match = self.ledger.index.match(self._keys()[: (len(self.tokens) - 1) // self.case.page_tokens])
        self.ledger.attach(self.lease, match, match.restorable_pages)
        self.committed = self.reserved = match.restorable_pages * self.case.page_tokens
        self._check()

    def run(self, end: int) -> None:
        """Run until `end` tokens are committed; with overlap, a step is in flight then."""
        while self.committed < end:
            self._launch()
            if len(self.lease.flights) > self.case.overlap:
                self._commit()

    def preempt(self) -> None:
        """Resume under the same name, perhaps with steps of the first attempt in flight."""
        first, owed = self.lease, self.committed
        self.end()
        self._open()
        assert owed - self.committed <= self.prompt_tokens + 2 * self.case.page_tokens
        self.commit_after_release(first)

    def end(self) -> None:
        self.ledger.release(self.name)
        with pytest.raises(AssertionError, match="ended"):
            self.ledger.reserve(self.lease, self.reserved + 1)
        with pytest.raises(AssertionError):
            self.ledger.launch(self.lease, self.reserved)
        assert self.lease.committed == self.committed

    def fail(self) -> None:
        """Fail the steps in flight: none of their tokens count."""
        while self.lease.flights:
            self.ledger.commit(self.lease, self.lease.flights[0].start, self._keys())
            self._check()
        self.end()

    def commit_after_release(self, lease: Lease) -> None:
        while lease.flights:
            before = (lease.committed, len(self.ledger.index))
            self.ledger.commit(lease, lease.flights[0].end, self._keys())
            assert (lease.committed, len(self.ledger.index)) == before, "a released lease was committed"
            self.ledger.check()
        assert not [*lease.pages, *lease.owned_states(), *lease.sources(), *lease.windows]

    def _launch(self) -> None:
        start = self.lease.launched
        decodes = start >= self.prompt_tokens - 1
        drafts = DRAFTS if self.case.speculative and decodes else 0
        end = start + 1 + drafts if decodes else min(self.prompt_tokens - 1, start + 40)
        self.ledger.reserve(self.lease, end, drafts=drafts)
        self.reserved = max(self.reserved, end)
        self._check()
        self.tokens += [self.random.randrange(9) for _ in range(end - len(self.tokens))]
        self.ledger.launch(self.lease, end, keep=end % self.case.page_tokens == 0, drafts=drafts)
        self._check()

    def _commit(self) -> None:
        flight = self.lease.flights[0]
        if flight.void:
            self.ledger.commit(self.lease, flight.end, self._keys())
            self._check()
            return
        drafts = DRAFTS if self.case.speculative and flight.start >= self.prompt_tokens - 1 else 0
        self.committed = flight.end - self.random.randint(0, drafts)
        if self.committed < flight.end:
            del self.tokens[self.committed :]
        self.ledger.commit(self.lease, self.committed, self._keys())
        self._check()
        if self.committed % self.case.page_tokens == 0:
            self._keep(flight)

    def _keep(self, flight: StepInFlight) -> None:
        if flight.end < self.prompt_tokens:
            self.ledger.keep_state(self.lease)
        else:
            self.ledger.roll_checkpoint(self.lease)
        self._check()

    def _check(self) -> None:
        size = self.case.page_tokens
        assert self.lease.committed == self.committed
        assert self.lease.allocated == -(-self.reserved // size) * size
        assert len(self.lease.shared_entries) == self.committed // size
        layout, reserved = self.ledger.layout, self.reserved
        needed = layout.peak_windows(reserved, max(self.lease.allocated, reserved) - self.committed)
        assert len(self.lease.windows) <= needed, "pages out of the window were not freed"
        self.ledger.check()

    def _keys(self) -> list[PageKey]:
        return page_keys(ROOT, self.tokens, self.case.page_tokens)


@pytest.mark.parametrize("case", [*OF_STATES, *OF_WINDOWS], ids=str)
def test_lease_owns_the_expected_memory_in_each_case(case: Case) -> None:
    size = case.page_tokens
    window = 0 if case.cache == "states" else Random(str(case)).choice([1, size, size + 1, 3 * size + 5])
    cache = a_cache(400, page_tokens=size, hybrid=case.cache != "windows", window=window)
    ledger = Ledger(cache)
    for driver, end in _requests(ledger, case):
        early = driver.random.randrange(1, 5) if case.ending in {"aborted", "lost"} else 0
        length = end - early
        driver.run(length)
        match case.ending:
            case "preempted":
                driver.preempt()
                driver.run(length + case.page_tokens)
                driver.end()
            case "lost":
                driver.fail()
            case "finished" | "stopped" | "aborted":
                driver.end()
        driver.commit_after_release(driver.lease)
    usage = ledger.usage()
    assert (ledger.num_leases, ledger.num_slots, usage.pages_pinned, usage.states_pinned) == (0, 0, 0, 0)
    assert usage.windows_pinned == 0
    assert cache.resize(1), "everything can be evicted"


def _requests(ledger: Ledger, case: Case) -> Iterator[tuple[Driver, int]]:
    """Yield prompts with a common prefix, while another request stays open."""
    prompt = [1] * (2 * case.page_tokens + 3)
    other = Driver(ledger, case, [*prompt, 2], "other", seed=9)
    for seed in range(3):
        other.run(other.committed + 2)
        end = len(prompt) + (1 if case.ending == "stopped" else case.page_tokens + 5)
        yield Driver(ledger, case, [*prompt, 3, seed][: len(prompt) + seed], f"r{seed}", seed), end
    other.end()
    other.commit_after_release(other.lease)


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
    overlap: bool,  # noqa: FBT001  drawn from the matrix
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


def test_roll_checkpoint_skips_leases_without_a_slot_in_a_burst() -> None:
    """Ten slots for the second states of 64 requests: the others skip their checkpoint."""
    cache = a_cache(NUM_LEASES * (LAST // BURST_P // 2 + 1) + 10)
    ledger = Ledger(cache)
    leases = [ledger.open(f"r{number}") for number in range(NUM_LEASES)]
    for lease in leases:
        ledger.reserve(lease, LAST)
    for end in range(1, LAST + 1):
        for number, lease in enumerate(leases):
            ledger.reserve(lease, end)
            ledger.launch(lease, end)
            ledger.commit(lease, end, page_keys(ROOT, [number] * end, BURST_P))
        kept = sum(_roll(ledger, lease) for lease in leases) if end % BURST_P == 0 else 0
        ledger.check()
        if end == LAST:
            assert kept >= 10
    usage = cache.arena.usage()
    assert usage.states_pinned + usage.states_cached == NUM_LEASES + 10


def _roll(ledger: Ledger, lease: Lease) -> bool:
    before = lease.rolling
    kept = ledger.roll_checkpoint(lease)
    assert lease.rolling is (lease.shared_entries[-1] if kept else before)
    return kept
