"""A model of device memory that records the tokens of each cell, and the steps that use it.

A step may write at any moment until it completes, so until then its cells are undefined. The cells
that it reads must be valid from the completion of the step before it to its own completion.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.layout import PAGES, STATES, PageId, StateId, WindowId
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.lease import Lease, StepInFlight

Written = tuple[int, ...]
"""The content of a cell: the tokens up to its position."""

UNDEFINED: Written = (-1,)

PageCell = tuple[PageId, int]
"""The cell of one token in a page."""

WindowCell = tuple[WindowId, int]
"""The cell of one token in a window page."""


@dataclass(eq=False)
class DeviceStep:
    """A step in flight on the device, with the page table and the tokens of its launch."""

    lease: Lease
    flight: StepInFlight
    tokens: Written  # up to its end
    table: tuple[PageId, ...]
    windows: tuple[WindowId, ...]
    page_tokens: int
    window: int

    @property
    def counts(self) -> bool:
        return not (self.flight.void or self.lease.ended)

    def cells(self, start: int, end: int) -> list[PageCell]:
        size = self.page_tokens
        return [(self.table[position // size], position % size) for position in range(start, end)]

    def window_cells(self, start: int, end: int) -> list[WindowCell]:
        size = self.page_tokens if self.window else end + 1
        found = [position for position in range(start, end) if self.window]
        return [(self.windows[position // size], position % size) for position in found]

    @property
    def seen_from(self) -> int:
        """The first position that is in the window of the first token of the step."""
        return max(0, self.flight.start + 1 - self.window)

    @property
    def window_reads(self) -> list[WindowCell]:
        return self.window_cells(self.seen_from, self.flight.start)

    @property
    def window_writes(self) -> list[WindowCell]:
        return self.window_cells(self.flight.start, self.flight.end)

    @property
    def writes(self) -> list[PageCell]:
        return self.cells(self.flight.start, self.flight.end)

    @property
    def states(self) -> set[StateId]:
        """The slots that it writes."""
        return {state for _, state in self.flight.writes}

    @property
    def reads(self) -> list[PageCell]:
        return self.cells(0, self.flight.start)


@dataclass
class Memory:
    """The content of all cells, and the running steps in launch order."""

    page_tokens: int
    window: int = 0
    pages: dict[PageCell, Written] = field(default_factory=dict[PageCell, Written])
    windows: dict[WindowCell, Written] = field(default_factory=dict[WindowCell, Written])
    states: dict[StateId, Written] = field(default_factory=dict[StateId, Written])
    steps: deque[DeviceStep] = field(default_factory=deque[DeviceStep])

    def page(self, page: PageId, cell: int) -> Written:
        busy = any((page, cell) in step.writes for step in self.steps)
        return UNDEFINED if busy else self.pages[page, cell]

    def state(self, state: StateId) -> Written:
        busy = any(state in step.states for step in self.steps)
        return UNDEFINED if busy else self.states[state]

    def window_cell(self, window: WindowId, cell: int) -> Written:
        busy = any((window, cell) in step.window_writes for step in self.steps)
        return UNDEFINED if busy else self.windows[window, cell]

    def allocate(
        self, pages: Iterable[PageId], states: Iterable[StateId], windows: Iterable[WindowId] = ()
    ) -> None:
        """Mark newly allocated objects as undefined; no step may use them."""
        for page in pages:
            assert not any(page in step.table for step in self.steps), "a step still uses this page"
            self.pages |= {(page, cell): UNDEFINED for cell in range(self.page_tokens)}
        for window in windows:
            in_use = {used for step in self.steps for used, _ in (*step.window_writes, *step.window_reads)}
            assert window not in in_use, "a step still uses this window page"
            self.windows |= {(window, cell): UNDEFINED for cell in range(self.page_tokens)}
        for state in states:
            assert not any(state in step.states for step in self.steps), "a step still writes here"
            assert not any(state == step.flight.reads for step in self.steps), "a step still reads here"
            self.states[state] = UNDEFINED

    def write(
        self, table: Sequence[PageId], tokens: Sequence[int], start: int, state: StateId | None
    ) -> None:
        """Write pages and a state like a fetch."""
        for position in range(start, len(tokens)):
            cell = (table[position // self.page_tokens], position % self.page_tokens)
            self.pages[cell] = tuple(tokens[: position + 1])
        if state is not None:
            self.states[state] = tuple(tokens)

    def write_windows(self, windows: Sequence[WindowId], first: int, tokens: Sequence[int]) -> None:
        """Write whole window pages from position `first` on like a fetch."""
        for index, window in enumerate(windows, first):
            for position in range(index * self.page_tokens, (index + 1) * self.page_tokens):
                self.windows[window, position % self.page_tokens] = tuple(tokens[: position + 1])

    def launch(
        self, lease: Lease, flight: StepInFlight, tokens: Sequence[int], *, hybrid: bool
    ) -> DeviceStep:
        table = tuple(lease.pages[: -(-flight.end // self.page_tokens)])
        windows = lease.window_table
        step = DeviceStep(
            lease, flight, tuple(tokens[: flight.end]), table, windows, self.page_tokens, self.window
        )
        assert not hybrid or flight.writes, "the state of the step is lost"
        assert (flight.reads is None) == (not hybrid or not flight.start)
        assert {page for page, _ in step.writes} <= set(lease.private_pages), "a cached page is written again"
        assert {window for window, _ in step.window_writes} <= set(lease.windows)
        if not any(other.lease is lease and other.counts for other in self.steps):
            self._check_reads(step)
        self.steps.append(step)
        return step

    def complete(self, step: DeviceStep) -> None:
        """Complete a step; call this before `Ledger.commit`."""
        first = next(other for other in self.steps if other.lease is step.lease)
        assert first is step, "steps of a lease complete in order"
        if step.counts:
            self._check_reads(step)
        self.steps.remove(step)
        for position, cell in enumerate(step.writes, step.flight.start):
            self.pages[cell] = step.tokens[: position + 1] if step.counts else UNDEFINED
        for position, cell in enumerate(step.window_writes, step.flight.start):
            self.windows[cell] = step.tokens[: position + 1] if step.counts else UNDEFINED
        for depth, state in step.flight.writes:
            self.states[state] = step.tokens[:depth] if step.counts else UNDEFINED

    def check(self, arena: Arena) -> None:
        """Assert that memory in use by a step belongs to its lease, or to its source checkpoint."""
        for step in self.steps:
            flight, lease = step.flight, step.lease
            assert {page for page, _ in step.writes} <= set(lease.private_pages)
            owned = set(lease.owned()[STATES])
            assert owned.issuperset(step.states)
            assert not set(lease.spare_slots).intersection((*step.states, flight.reads))
            source = None if flight.source is None else flight.source.checkpoint
            assert flight.reads is None or (source and flight.reads == source.state) or flight.reads in owned
            used = {window for window, _ in (*step.window_writes, *step.window_reads)}
            assert used <= set(lease.windows), "a window page in use by a step was freed"
            for page in {page for page, _ in step.reads}:
                assert page in arena.pools[PAGES].taken_in(arena.pools[PAGES].extent_of(page)), (
                    "a page that is read is free"
                )

    def _check_reads(self, step: DeviceStep) -> None:
        """Assert that the step reads valid cells, which only later steps of its lease overwrite."""
        later = [other for other in self.steps if other.lease is step.lease]
        others = [other for other in self.steps if other not in later]
        for position, cell in enumerate(step.reads):
            assert self.pages[cell] == step.tokens[: position + 1]
            assert not any(cell in other.writes for other in self.steps if other is not step)
        for position, cell in enumerate(step.window_reads, step.seen_from):
            assert self.windows[cell] == step.tokens[: position + 1]
            assert not any(cell in other.window_writes for other in self.steps if other is not step)
        if step.flight.reads is not None:
            assert self.states[step.flight.reads] == step.tokens[: step.flight.start]
            assert not any(step.flight.reads in other.states for other in others)
