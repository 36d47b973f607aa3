"""A lease: the memory of one request. Only the ledger changes it.

|<- shared_entries: full pages, pinned in the index ->|<- private_pages: written, or reserved ->|
0                len(shared_entries) * P <= committed         launched                   allocated
                        [0, committed): written         [committed, launched): steps in flight

states        Its slots, by the number of tokens in the state. A step in flight may still write it.
spare_slots   Its slots that no step has written to.
saved         Copies of its states, by depth, if checkpoints are a class of their own. They become
              checkpoints, or are freed. A step in flight may still write them.
source        The pinned entry whose checkpoint the next step reads, unless `states` has that depth.
windows       The window pages from `first_window` on, shared with checkpoints: see windows.py.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from tidemill.kvstore.layout import (
    CHECKPOINTS,
    PAGES,
    STATES,
    WINDOWS,
    CheckpointId,
    PageId,
    StateId,
    WindowId,
)
from tidemill.kvstore.memory.entry import Entry


class SequenceText(NamedTuple):
    """The tokens of a sequence, a list that may still grow, the salt of its keys, and who pays for it."""

    tokens: Sequence[int] = ()
    salt: str = ""
    tenant: str = ""


NO_TEXT = SequenceText()


class StateWrite(NamedTuple):
    """A write of the state after `depth` tokens of a sequence into a slot."""

    depth: int
    state: StateId


class StateSave(NamedTuple):
    """A copy of a written state to the slot of a checkpoint, of another class, when the step has run."""

    state: StateId
    checkpoint: CheckpointId


@dataclass(slots=True, eq=False)
class StepInFlight:
    """A step that was launched and is not committed: it runs `[start, end)` of one lease.

    reads       The slot of the state at `start`. None: the state is empty.
    writes      The states that it writes, ascending by depth: those at `inside`, then one before each
                draft, and that at `end`. A model without states has none.
    restores    The checkpoint that is copied to `reads` before it, if checkpoints are a class of their own.
    saves       The copies of written states after it, likewise.
    inside      Page boundaries inside it whose states become checkpoints when it completes.
    void        The step before it was committed only in part, so its output is dropped.
    deferred    The class and the id of objects that only this step still uses: rejected states, and pages
                of its table that the index had already. They are freed when it completes.
    """

    start: int
    end: int
    reads: StateId | None
    writes: tuple[StateWrite, ...]
    inside: tuple[int, ...]
    source: Entry | None = None  # pinned while its checkpoint is read
    restores: CheckpointId | None = None
    saves: tuple[StateSave, ...] = ()
    spare: frozenset[int] = frozenset()  # those of `inside` that are kept as spare ones
    void: bool = False
    deferred: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])


@dataclass(slots=True, eq=False)
class Lease:
    """`spare_slots_min` slots stay reserved between steps: 1 for the strategy `double`. A lease that never
    `runs` needs no state and no window: it holds only pages."""

    page_tokens: int
    spare_slots_min: int = 0
    runs: bool = True
    text: SequenceText = NO_TEXT
    shared_entries: list[Entry] = field(default_factory=list[Entry])
    private_pages: list[PageId] = field(default_factory=list[PageId])
    pages: tuple[PageId, ...] = ()  # the page table: those of `shared_entries`, then `private_pages`
    committed: int = 0
    launched: int = 0  # where the next step starts
    states: dict[int, StateId] = field(default_factory=dict[int, StateId])
    spare_slots: list[StateId] = field(default_factory=list[StateId])
    saved: dict[int, CheckpointId] = field(default_factory=dict[int, CheckpointId])
    promised_pages: int = 0  # that no other lease may take
    source: Entry | None = None
    windows: list[WindowId] = field(default_factory=list[WindowId])
    first_window: int = 0
    fetched_windows: range = range(0)  # positions of the window pages that a fetch fills
    window_table: tuple[WindowId, ...] = ()  # as `pages`, with 0 before `first_window`
    rolling: Entry | None = None  # has the last checkpoint made while decoding; the next replaces it
    flights: deque[StepInFlight] = field(default_factory=deque[StepInFlight])
    ended: bool = False
    held: dict[str, list[Any]] = field(init=False)  # by class; of the usual ones, the lists above

    def __post_init__(self) -> None:
        self.held = {STATES: self.spare_slots, WINDOWS: self.windows, PAGES: self.private_pages}
        self.held[CHECKPOINTS] = []

    @property
    def allocated(self) -> int:
        return (len(self.shared_entries) + len(self.private_pages)) * self.page_tokens

    def tokens_of(self, entry: Entry) -> Sequence[int]:
        """Return the tokens of the page of `entry`, which is on its path."""
        end = entry.depth_pages * self.page_tokens
        return self.text.tokens[end - self.page_tokens : end]

    def owned(self) -> dict[str, list[Any]]:
        """Return the ids of all objects that it has itself, by class."""
        owned = {name: list(ids) for name, ids in self.held.items()}
        owned[STATES] += self.states.values()
        owned[CHECKPOINTS] += self.saved.values()
        for name, freed in chain.from_iterable(flight.deferred for flight in self.flights):
            owned[name].append(freed)
        return owned

    def sources(self) -> list[Entry]:
        """Return the entries whose checkpoints it has pinned, once for each pin."""
        found = [self.source, *(flight.source for flight in self.flights)]
        return [entry for entry in found if entry is not None]

    @property
    def fetch_slot(self) -> StateId | CheckpointId:
        """The slot for a fetched state. If the fetch fails, the lease can only be released."""
        if self.held[CHECKPOINTS]:
            return self.held[CHECKPOINTS][-1]
        return self.spare_slots[-1] if self.spare_slots else self.states[self.committed]

    @property
    def num_slots(self) -> int:
        """The number of states for this request: its own, and its rolling checkpoint."""
        checkpoint = None if self.rolling is None else self.rolling.checkpoint
        return len(self.states) + len(self.spare_slots) + len(checkpoint.saved if checkpoint else ())

    def writes_in_place(self, drafts: int) -> bool:
        """Return whether the next step can overwrite the state that it reads."""
        return not drafts and self.launched in self.states

    def missing_slots(self, drafts: int, spare: int) -> int:
        """Return the number of slots that the lease lacks for its next step and `spare` ones beside it."""
        in_place = self.writes_in_place(drafts)
        if in_place and not spare:
            return 0
        return max(0, (not in_place) * (1 + drafts) + spare - len(self.spare_slots))

    @property
    def windows_end(self) -> int:
        """The position after its last window page."""
        return self.first_window + len(self.windows)

    def rebuild_window_table(self) -> None:
        """Rebuild `window_table` after a change of the window pages."""
        self.window_table = (*[WindowId(0)] * self.first_window, *self.windows)

    def rebuild_page_table(self) -> None:
        """Rebuild `pages` after a change of the pages."""
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
        owned = set(self.owned()[STATES])
        assert all(state in owned for flight in self.flights for _, state in flight.writes)
        assert all(flight.void or STATES not in dict(flight.deferred) for flight in self.flights)
        assert all(self.committed <= depth <= self.launched for depth in (*self.states, *self.saved))
        copies = {save.checkpoint for flight in self.flights for save in flight.saves}
        assert copies <= set(self.owned()[CHECKPOINTS])
        if self.source is not None:
            assert self.source is self.shared_entries[-1]
            assert self.launched == self.committed == len(self.shared_entries) * self.page_tokens
