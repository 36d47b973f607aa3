"""A memory that remembers who wrote what for which tokens, and the steps that are at it.

A step may write at any moment between its launch and its landing: until it has landed, nonsense lies in all
its places. What it reads must be right from the moment when the step before it has landed until it lands.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.layout import PageId, StateId, WindowId
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.lease import Lease, StepInFlight

Written = tuple[int, ...]
"""What lies in a place: the tokens up to it."""

NONSENSE: Written = (-1,)

Place = tuple[PageId, int]
"""The place of one token in a page."""

View = tuple[WindowId, int]
"""... in a window page."""


@dataclass(eq=False)
class Shot:
    """A flight as the device sees it: the page table and the tokens are those of the launch."""

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

    def places(self, start: int, end: int) -> list[Place]:
        size = self.page_tokens
        return [(self.table[position // size], position % size) for position in range(start, end)]

    def views(self, start: int, end: int) -> list[View]:
        size = self.page_tokens if self.window else end + 1
        found = [position for position in range(start, end) if self.window]
        return [(self.windows[position // size], position % size) for position in found]

    @property
    def seen_from(self) -> int:
        """The first position whose token the first one of the step sees through the window."""
        return max(0, self.flight.start + 1 - self.window)

    @property
    def views_read(self) -> list[View]:
        return self.views(self.seen_from, self.flight.start)

    @property
    def views_written(self) -> list[View]:
        return self.views(self.flight.start, self.flight.end)

    @property
    def writes(self) -> list[Place]:
        return self.places(self.flight.start, self.flight.end)

    @property
    def reads(self) -> list[Place]:
        return self.places(0, self.flight.start)


@dataclass
class Memory:
    """What has landed, and the shots that have not, in the order of their launches."""

    page_tokens: int
    window: int = 0
    pages: dict[Place, Written] = field(default_factory=dict[Place, Written])
    windows: dict[View, Written] = field(default_factory=dict[View, Written])
    states: dict[StateId, Written] = field(default_factory=dict[StateId, Written])
    shots: deque[Shot] = field(default_factory=deque[Shot])

    def page(self, page: PageId, place: int) -> Written:
        busy = any((page, place) in shot.writes for shot in self.shots)
        return NONSENSE if busy else self.pages[page, place]

    def state(self, state: StateId) -> Written:
        busy = any(state in shot.flight.writes for shot in self.shots)
        return NONSENSE if busy else self.states[state]

    def view(self, window: WindowId, place: int) -> Written:
        busy = any((window, place) in shot.views_written for shot in self.shots)
        return NONSENSE if busy else self.windows[window, place]

    def taken(
        self, pages: Iterable[PageId], states: Iterable[StateId], windows: Iterable[WindowId] = ()
    ) -> None:
        """They were free, so nobody is at them, and what lies there means nothing."""
        for page in pages:
            assert not any(page in shot.table for shot in self.shots), "a step is still at this page"
            self.pages |= {(page, place): NONSENSE for place in range(self.page_tokens)}
        for window in windows:
            at = {one for shot in self.shots for one, _ in (*shot.views_written, *shot.views_read)}
            assert window not in at, "a step is still at this window page"
            self.windows |= {(window, place): NONSENSE for place in range(self.page_tokens)}
        for state in states:
            assert not any(state in shot.flight.writes for shot in self.shots), "a step still writes here"
            assert not any(state == shot.flight.reads for shot in self.shots), "a step still reads here"
            self.states[state] = NONSENSE

    def write(
        self, table: Sequence[PageId], tokens: Sequence[int], start: int, state: StateId | None
    ) -> None:
        """Not by a step: as a fetch does."""
        for position in range(start, len(tokens)):
            place = (table[position // self.page_tokens], position % self.page_tokens)
            self.pages[place] = tuple(tokens[: position + 1])
        if state is not None:
            self.states[state] = tuple(tokens)

    def write_windows(self, windows: Sequence[WindowId], first: int, tokens: Sequence[int]) -> None:
        """Whole pages from place `first` on, as a fetch does."""
        for place, window in enumerate(windows, first):
            for position in range(place * self.page_tokens, (place + 1) * self.page_tokens):
                self.windows[window, position % self.page_tokens] = tuple(tokens[: position + 1])

    def launched(self, lease: Lease, flight: StepInFlight, tokens: Sequence[int], *, hybrid: bool) -> Shot:
        table = tuple(lease.pages[: -(-flight.end // self.page_tokens)])
        views = lease.window_table
        shot = Shot(lease, flight, tuple(tokens[: flight.end]), table, views, self.page_tokens, self.window)
        assert not hybrid or flight.writes, "the state of the step is lost"
        assert (flight.reads is None) == (not hybrid or not flight.start)
        assert {page for page, _ in shot.writes} <= set(lease.private_pages), "what is kept is written again"
        assert {view for view, _ in shot.views_written} <= set(lease.windows)
        if not any(other.lease is lease and other.counts for other in self.shots):
            self._reads_well(shot)
        self.shots.append(shot)
        return shot

    def landed(self, shot: Shot) -> None:
        """The step has run; call it before the ledger hears of it."""
        first = next(other for other in self.shots if other.lease is shot.lease)
        assert first is shot, "steps of a lease land in order"
        if shot.counts:
            self._reads_well(shot)
        self.shots.remove(shot)
        for position, place in enumerate(shot.writes, shot.flight.start):
            self.pages[place] = shot.tokens[: position + 1] if shot.counts else NONSENSE
        for position, view in enumerate(shot.views_written, shot.flight.start):
            self.windows[view] = shot.tokens[: position + 1] if shot.counts else NONSENSE
        for depth, state in enumerate(shot.flight.writes, shot.flight.end + 1 - len(shot.flight.writes)):
            self.states[state] = shot.tokens[:depth] if shot.counts else NONSENSE

    def check(self, arena: Arena) -> None:
        """What a step is at belongs to its lease, or to the checkpoint that it reads."""
        for shot in self.shots:
            flight, lease = shot.flight, shot.lease
            assert {page for page, _ in shot.writes} <= set(lease.private_pages)
            mine = set(lease.owned_states())
            assert mine.issuperset(flight.writes)
            assert not set(lease.spare_slots).intersection((*flight.writes, flight.reads))
            source = None if flight.source is None else flight.source.checkpoint
            assert flight.reads is None or (source and flight.reads == source.state) or flight.reads in mine
            seen = {view for view, _ in (*shot.views_written, *shot.views_read)}
            assert seen <= set(lease.windows), "a window page that a step is at has gone"
            for page in {page for page, _ in shot.reads}:
                assert page in arena.pages.taken_in(arena.pages.extent_of(page)), (
                    "a page that is read is free"
                )

    def _reads_well(self, shot: Shot) -> None:
        """Its tokens and its state are there, and nobody but the lease itself, later on, is at them."""
        later = [other for other in self.shots if other.lease is shot.lease]
        others = [other for other in self.shots if other not in later]
        for position, place in enumerate(shot.reads):
            assert self.pages[place] == shot.tokens[: position + 1]
            assert not any(place in other.writes for other in self.shots if other is not shot)
        for position, view in enumerate(shot.views_read, shot.seen_from):
            assert self.windows[view] == shot.tokens[: position + 1]
            assert not any(view in other.views_written for other in self.shots if other is not shot)
        if shot.flight.reads is not None:
            assert self.states[shot.flight.reads] == shot.tokens[: shot.flight.start]
            assert not any(shot.flight.reads in other.flight.writes for other in others)
