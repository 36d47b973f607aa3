"""A model of device memory that records the tokens of each cell, and the steps that use it.

A step may write at any moment until it completes, so until then its cells are undefined. The cells
that it reads must be valid from the completion of the step before it to its own completion.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.layout import CHECKPOINTS, PAGES, STATES, WINDOWS
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.lease import Lease, StepInFlight

Written = tuple[int, ...]
"""The content of a cell: the tokens up to its position."""

UNDEFINED: Written = (-1,)

Cell = tuple[str, int, int]
"""The class and the id of an object, and the place of a token in it; a state has one cell."""


def cells(name: str, table: Sequence[int], positions: range, page_tokens: int) -> dict[Cell, int]:
    """Return the cells of tokens in the pages of a table, each with the number of tokens up to it."""
    return {(name, table[at // page_tokens], at % page_tokens): at + 1 for at in positions}


@dataclass(eq=False)
class DeviceStep:
    """A step in flight on the device: the tokens up to its end, and its cells, each with the number of tokens
    that it has after their writer."""

    lease: Lease
    flight: StepInFlight
    tokens: Written
    reads: dict[Cell, int]
    writes: dict[Cell, int]

    @property
    def counts(self) -> bool:
        return not (self.flight.void or self.lease.ended)

    def uses(self, name: str) -> set[int]:
        """Return the ids of a class that it reads or writes."""
        return {used for kind, used, _ in (*self.reads, *self.writes) if kind == name}


@dataclass
class Memory:
    """The content of all cells, and the running steps in launch order."""

    page_tokens: int
    window: int = 0
    cells: dict[Cell, Written] = field(default_factory=dict[Cell, Written])
    steps: deque[DeviceStep] = field(default_factory=deque[DeviceStep])

    def at(self, name: str, taken: int, place: int = 0) -> Written:
        busy = any((name, taken, place) in step.writes for step in self.steps)
        return UNDEFINED if busy else self.cells[name, taken, place]

    def allocate(self, name: str, new: Iterable[int]) -> None:
        """Mark newly allocated objects as undefined; no step may use them."""
        in_use = {used for step in self.steps for used in step.uses(name)}
        for taken in new:
            assert taken not in in_use, f"a step still uses this one of {name}"
            self.cells |= {(name, taken, place): UNDEFINED for place in range(self.page_tokens)}

    def write(self, written: dict[Cell, int], tokens: Sequence[int]) -> None:
        """Write cells like a fetch."""
        self.cells |= {cell: tuple(tokens[:count]) for cell, count in written.items()}

    def launch(self, lease: Lease, flight: StepInFlight, tokens: Sequence[int], *, hybrid: bool) -> None:
        assert not hybrid or flight.writes, "the state of the step is lost"
        assert (flight.reads is None) == (not hybrid or not flight.start)
        size, run = self.page_tokens, range(flight.start, flight.end)
        reads = cells(PAGES, lease.pages, range(flight.start), size)
        writes = cells(PAGES, lease.pages, run, size)
        if self.window:
            seen = range(max(0, flight.start + 1 - self.window), flight.start)
            reads |= cells(WINDOWS, lease.window_table, seen, size)
            writes |= cells(WINDOWS, lease.window_table, run, size)
        if flight.restores is not None:
            assert any(flight.reads == state for _, state in flight.writes), "the copy destroys a state"
            reads[CHECKPOINTS, flight.restores, 0] = flight.start
        elif flight.reads is not None:
            reads[STATES, flight.reads, 0] = flight.start
        writes |= {(STATES, state, 0): depth for depth, state in flight.writes}
        writes |= {(CHECKPOINTS, slot, 0): writes[STATES, state, 0] for state, slot in flight.saves}
        step = DeviceStep(lease, flight, tuple(tokens[: flight.end]), reads, writes)
        if not any(other.lease is lease and other.counts for other in self.steps):
            self._check_reads(step)
        self.steps.append(step)

    def complete(self, step: DeviceStep) -> None:
        """Complete a step; call this before `Ledger.commit`."""
        first = next(other for other in self.steps if other.lease is step.lease)
        assert first is step, "steps of a lease complete in order"
        if step.counts:
            self._check_reads(step)
        self.steps.remove(step)
        self.cells |= {cell: step.tokens[:n] if step.counts else UNDEFINED for cell, n in step.writes.items()}

    def check(self, arena: Arena) -> None:
        """Assert that memory in use by a step belongs to its lease, or to its source checkpoint."""
        for step in self.steps:
            flight, lease, pool = step.flight, step.lease, arena.pools[PAGES]
            written = {(name, taken) for name, taken, _ in step.writes}
            owned = {(name, taken) for name in (STATES, CHECKPOINTS) for taken in lease.owned()[name]}
            assert written <= {*owned, *((PAGES, page) for page in lease.private_pages)} | {
                (WINDOWS, window) for window in lease.windows
            }, "what another may use is written"
            assert step.uses(STATES).isdisjoint(lease.spare_slots)
            assert step.uses(CHECKPOINTS).isdisjoint(lease.held[CHECKPOINTS])
            source = None if flight.source is None else flight.source.checkpoint
            read = flight.reads
            assert read is None or (source and read == source.state) or (STATES, read) in owned
            assert flight.restores is None or (source and source.checkpoints == (flight.restores,))
            assert step.uses(WINDOWS) <= set(lease.windows), "a window page in use by a step was freed"
            for page in step.uses(PAGES):
                assert page in pool.taken_in(pool.extent_of(page)), "a page that is read is free"

    def _check_reads(self, step: DeviceStep) -> None:
        """Assert that the step reads valid cells. Only later steps of its lease overwrite a state."""
        for cell, count in step.reads.items():
            assert self.cells[cell] == step.tokens[:count]
            for other in self.steps:
                in_place = cell[0] == STATES and other.lease is step.lease
                assert other is step or in_place or cell not in other.writes
