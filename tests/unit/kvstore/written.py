"""A memory that remembers who wrote what for which tokens, and the steps that are at it.

A step may write at any moment between its launch and its landing: until it has landed, nonsense lies in all
its places. What it reads must be right from the moment when the step before it has landed until it lands.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.arena import Arena
from tidemill.kvstore.layout import PageId, StateId
from tidemill.kvstore.lease import Flight, Lease

Written = tuple[int, ...]
"""What lies in a place: the tokens up to it."""

NONSENSE: Written = (-1,)

Place = tuple[PageId, int]
"""The place of one token in a page."""


@dataclass(eq=False)
class Shot:
    """A flight as the device sees it: the page table and the tokens are those of the launch."""

    lease: Lease
    flight: Flight
    tokens: Written  # up to its end
    table: tuple[PageId, ...]
    page_tokens: int

    @property
    def counts(self) -> bool:
        return not (self.flight.void or self.lease.ended)

    def places(self, start: int, end: int) -> list[Place]:
        size = self.page_tokens
        return [(self.table[position // size], position % size) for position in range(start, end)]

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
    pages: dict[Place, Written] = field(default_factory=dict[Place, Written])
    states: dict[StateId, Written] = field(default_factory=dict[StateId, Written])
    shots: deque[Shot] = field(default_factory=deque[Shot])

    def page(self, page: PageId, place: int) -> Written:
        busy = any((page, place) in shot.writes for shot in self.shots)
        return NONSENSE if busy else self.pages[page, place]

    def state(self, state: StateId) -> Written:
        busy = any(state in shot.flight.writes for shot in self.shots)
        return NONSENSE if busy else self.states[state]

    def taken(self, pages: Iterable[PageId], states: Iterable[StateId]) -> None:
        """They were free, so nobody is at them, and what lies there means nothing."""
        for page in pages:
            assert not any(page in shot.table for shot in self.shots), "a step is still at this page"
            self.pages |= {(page, place): NONSENSE for place in range(self.page_tokens)}
        for state in states:
            assert not any(state in shot.flight.writes for shot in self.shots), "a step still writes here"
            assert not any(state == shot.flight.read for shot in self.shots), "a step still reads here"
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

    def launched(self, lease: Lease, flight: Flight, tokens: Sequence[int], *, hybrid: bool) -> Shot:
        table = tuple(lease.pages[: -(-flight.end // self.page_tokens)])
        shot = Shot(lease, flight, tuple(tokens[: flight.end]), table, self.page_tokens)
        assert not hybrid or flight.writes, "the state of the step is lost"
        assert (flight.read is None) == (not hybrid or not flight.start)
        assert {page for page, _ in shot.writes} <= set(lease.own), "what is kept is written again"
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
        for depth, state in enumerate(shot.flight.writes, shot.flight.end + 1 - len(shot.flight.writes)):
            self.states[state] = shot.tokens[:depth] if shot.counts else NONSENSE

    def check(self, arena: Arena) -> None:
        """What a step is at belongs to its lease, or to the checkpoint that it reads."""
        for shot in self.shots:
            flight, lease = shot.flight, shot.lease
            assert {page for page, _ in shot.writes} <= set(lease.own)
            mine = set(lease.own_states())
            assert mine.issuperset(flight.writes)
            assert not set(lease.spare).intersection((*flight.writes, flight.read))
            source = None if flight.source is None else flight.source.checkpoint
            assert flight.read is None or flight.read == source or flight.read in mine
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
        if shot.flight.read is not None:
            assert self.states[shot.flight.read] == shot.tokens[: shot.flight.start]
            assert not any(shot.flight.read in other.flight.writes for other in others)
