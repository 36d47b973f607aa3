"""What one request holds. Only the ledger changes it.

|<-- entries: full pages, shared, pinned in the index -->|<-- own: being written, or reserved -->|
0                       len(entries) * P <= committed          launched                      allocated
                                [0, committed) is written      [committed, launched) by steps in flight

states    the slots that it owns, by the number of tokens folded into them (or that will be, by a step in
          flight)
spare     slots that it owns and nothing was written to
source    the pinned entry whose checkpoint the next step reads, unless `states` has that depth
windows   the window pages from `first_window` on, shared with checkpoints: see windows.py
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import chain

from tidemill.kvstore.layout import PageId, StateId, WindowId
from tidemill.kvstore.memory.allocation_sites import AllocationSite
from tidemill.kvstore.memory.prefix_index import Entry


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that was launched and has not landed: it runs `[start, end)` of one lease.

    `read` is the state at `start` (None: the empty one), `writes` receive the states at the last
    `len(writes)` depths up to `end` (none in a model without states). A flight is void when the one before it
    landed short: what it writes does not count. `limbo` comes back when it has landed: slots that it uses and
    nobody needs, pages of its table that the index had already.
    """

    start: int
    end: int
    reads: StateId | None
    writes: tuple[StateId, ...]
    source: Entry | None = None  # pinned while its checkpoint is read
    void: bool = False
    deferred_free: tuple[StateId, ...] = ()
    deferred_free_pages: list[PageId] = field(default_factory=list[PageId])


@dataclass(slots=True, eq=False)
class Lease:
    """`spares_min` slots stay reserved between steps: 1 for the strategy `double`. A lease that never `runs`
    needs no state and no window: it holds pages."""

    page_tokens: int
    spare_slots_min: int = 0
    runs: bool = True
    shared_entries: list[Entry] = field(default_factory=list[Entry])
    private_pages: list[PageId] = field(default_factory=list[PageId])
    pages: tuple[PageId, ...] = ()  # the page table, left to right: what is in `entries`, then `own`
    committed: int = 0
    launched: int = 0  # where the next step starts
    states: dict[int, StateId] = field(default_factory=dict[int, StateId])
    spare_slots: list[StateId] = field(default_factory=list[StateId])
    source: Entry | None = None
    windows: list[WindowId] = field(default_factory=list[WindowId])
    first_window: int = 0
    fetched_windows: range = range(0)  # the places of those that a fetch fills
    window_table: tuple[WindowId, ...] = ()  # as `pages`: 0 in the place of what is out of sight
    rolling: Entry | None = None  # the last checkpoint made while decoding: the next one replaces it
    flights: deque[StepInFlight] = field(default_factory=deque[StepInFlight])
    ended: bool = False

    @property
    def allocated(self) -> int:
        return (len(self.shared_entries) + len(self.private_pages)) * self.page_tokens

    def own_pages(self) -> list[PageId]:
        """Every page that it owns."""
        limbo = chain.from_iterable(flight.deferred_free_pages for flight in self.flights)
        return [*self.private_pages, *limbo]

    def own_states(self) -> list[StateId]:
        """Every slot that it owns."""
        limbo = chain.from_iterable(flight.deferred_free for flight in self.flights)
        return [*self.states.values(), *self.spare_slots, *limbo]

    def sources(self) -> list[Entry]:
        """The entries whose checkpoints it has pinned, once for each pin."""
        found = [self.source, *(flight.source for flight in self.flights)]
        return [entry for entry in found if entry is not None]

    @property
    def fetch_slot(self) -> StateId:
        """Where a state that is fetched goes: if the fetch fails, the lease is of no use any more."""
        return self.spare_slots[-1] if self.spare_slots else self.states[self.committed]

    @property
    def num_slots(self) -> int:
        """States held for this request: its own, and the checkpoint that it keeps to itself."""
        checkpoint = None if self.rolling is None else self.rolling.checkpoint
        kept = checkpoint is not None and checkpoint.state is not None
        return len(self.states) + len(self.spare_slots) + kept

    def writes_in_place(self, drafts: int) -> bool:
        """Whether the next step can overwrite the state that it reads."""
        return not drafts and self.launched in self.states

    def slots_lacking(self, drafts: int) -> list[AllocationSite]:
        """The sites of the slots that are missing for the next step."""
        in_place = self.writes_in_place(drafts)
        if in_place and not self.spare_slots_min:
            return []
        sites = [] if in_place else [AllocationSite.RUN_STATE, *[AllocationSite.SCRATCH_STATE] * drafts]
        sites += [AllocationSite.SPARE_STATE] * self.spare_slots_min
        return sites[len(self.spare_slots) :]

    @property
    def windows_end(self) -> int:
        """The place of the first window page that it does not have."""
        return self.first_window + len(self.windows)

    def count_windows(self) -> None:
        """Make their table anew: called after every change of it."""
        self.window_table = (*[WindowId(0)] * self.first_window, *self.windows)

    def count_pages(self) -> None:
        """Make the page table anew: called after every change of it."""
        self.pages = (*(entry.page for entry in self.shared_entries), *self.private_pages)

    def check(self) -> None:
        assert self.pages == (*(entry.page for entry in self.shared_entries), *self.private_pages)
        assert self.window_table == (*[0] * self.first_window, *self.windows)
        assert len(set(self.windows)) == len(self.windows)
        assert len(self.shared_entries) == self.committed // self.page_tokens
        assert self.committed <= self.launched <= self.allocated
        depth = self.committed
        for flight in self.flights:
            if not flight.void:
                assert depth == flight.start < flight.end or self.ended
                depth = flight.end
        assert depth == self.launched or self.ended
        written = set(self.own_states())
        assert all(written.issuperset(flight.writes) for flight in self.flights)
        assert all(flight.void or not flight.deferred_free for flight in self.flights)
        assert all(self.committed <= at <= self.launched for at in self.states)
        if self.source is not None:
            assert self.source is self.shared_entries[-1]
            assert self.launched == self.committed == len(self.shared_entries) * self.page_tokens
