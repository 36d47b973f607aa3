"""Arena, index and ledger together, against a memory that remembers who wrote what for which tokens."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.kvstore.leases import ROOT, P, a_ledger
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.index import Entry
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import PageId, StateId
from tidemill.kvstore.ledger import Lease

Written = tuple[int, ...]
"""What lies in a place: the tokens up to it."""

NONSENSE: Written = (-1,)
"""What lies in memory that was just taken."""

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
choices = st.integers(0, 999)


@dataclass(eq=False)
class Row:
    """A request of the model: its tokens, and its lease."""

    name: str
    tokens: list[int]
    lease: Lease

    @property
    def keys(self) -> list[PageKey]:
        return page_keys(ROOT, self.tokens, P)


class LedgerAgainstMemory(RuleBasedStateMachine):
    """Runs requests as an engine does; `pages` and `states` hold what the model's steps have written."""

    @initialize(num_extents=st.integers(2, 8), states_per_extent=st.integers(1, 2), hybrid=st.booleans())
    def build(self, num_extents: int, states_per_extent: int, hybrid: bool) -> None:  # noqa: FBT001  drawn
        self.ledger = a_ledger(num_extents, states_per_extent, hybrid=hybrid)
        self.layout = self.ledger.layout
        self.rows: list[Row] = []
        self.readers: list[Row] = []
        self.pages: dict[PageId, list[Written]] = {}
        self.states: dict[StateId, Written] = {}
        self.first_pages: dict[Entry, PageId] = {}
        self.announced: set[PageKey] = set()
        self.serial = 0

    @rule(tokens=prompts)
    def start(self, tokens: list[int]) -> None:
        """Resume where it can be resumed, take memory for the rest."""
        row = self._open(tokens)
        match = self.ledger.index.match(self._fetchable(row))
        self.ledger.attach(row.lease, match, match.restorable_pages)
        self._reserve(row, len(tokens))

    @rule(tokens=prompts, choice=choices)
    def fetch(self, tokens: list[int], choice: int) -> None:
        """Share every kept page, fill the others and the state up to some depth, as from a store."""
        row = self._open(tokens)
        match = self.ledger.index.match(self._fetchable(row))
        depth_pages = choice % (len(self._fetchable(row)) + 1)
        if depth_pages <= match.restorable_pages:
            self.ledger.attach(row.lease, match, match.restorable_pages)
            self._reserve(row, len(tokens))
            return
        self.ledger.attach(row.lease, match, min(len(match.path), depth_pages))
        if self._reserve(row, len(tokens)):
            self._write(row, row.lease.committed, depth_pages * P)
            self.ledger.adopt(row.lease, depth_pages * P, row.keys)

    @precondition(lambda self: self.rows)
    @rule(choice=choices, count=st.integers(1, 5), keep=st.sampled_from(["keep", "roll", "nothing"]))
    def step(self, choice: int, count: int, keep: str) -> None:
        """Run some tokens, a new one at the end of the known ones; maybe keep the state at a boundary."""
        row = self.rows[choice % len(self.rows)]
        lease = row.lease
        if lease.committed == len(row.tokens):
            row.tokens.append(choice % 2)
        end = min(lease.committed + count, len(row.tokens))
        if not self._reserve(row, end):
            return
        if self.layout.hybrid and lease.committed:
            assert lease.read_state is not None
            assert self.states[lease.read_state] == tuple(row.tokens[: lease.committed])
        assert (lease.read_state is None) == (not self.layout.hybrid or not lease.committed)
        self._write(row, lease.committed, end)
        self.ledger.commit(lease, end, row.keys)
        if end % P == 0 and keep == "keep":
            self.ledger.keep_state(lease)
        if end % P == 0 and keep == "roll":
            self._roll(row)

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def share(self, choice: int) -> None:
        """As a publication does: read some first pages after their request may have ended."""
        row = self.rows[choice % len(self.rows)]
        if row.lease.entries:
            num_pages = choice % len(row.lease.entries) + 1
            name = self._name()
            lease = self.ledger.share(name, row.lease, num_pages)
            assert lease.entries == row.lease.entries[:num_pages]
            assert lease.source is (lease.entries[-1] if lease.entries[-1].checkpoint is not None else None)
            self.readers.append(Row(name, row.tokens[: num_pages * P], lease))

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        self.ledger.release(self.rows.pop(choice % len(self.rows)).name)

    @precondition(lambda self: self.readers)
    @rule(choice=choices)
    def release_reader(self, choice: int) -> None:
        self.ledger.release(self.readers.pop(choice % len(self.readers)).name)

    @rule()
    def announce(self) -> None:
        changes = self.ledger.index.take_changes()
        self.announced = (self.announced - changes.removed) | changes.added
        assert self.announced == set(self.ledger.index.restorable_keys())

    @invariant()
    def every_byte_and_every_pin_has_one_owner(self) -> None:
        self.ledger.check()
        leases = [row.lease for row in (*self.rows, *self.readers)]
        assert self.ledger.num_leases == len(leases)
        pins = Counter(entry for lease in leases for entry in lease.entries)
        reading = Counter(lease.source for lease in leases if lease.source)
        for entry in self.ledger.index:
            assert (entry.pins, entry.checkpoint_pins) == (pins[entry], reading[entry])
        pages = {page for lease in leases for page in lease.pages()}
        states = {lease.state for lease in leases} | {
            lease.source.checkpoint for lease in leases if lease.source
        }
        live_bytes = (
            len(pages) * self.layout.page_bytes + len(states - {None}) * self.layout.state_stride_bytes
        )
        assert self.ledger.live_bytes() == live_bytes

    @invariant()
    def what_is_written_is_what_the_tokens_say(self) -> None:
        for row in (*self.rows, *self.readers):
            table = row.lease.pages()
            for position in range(row.lease.committed):
                written = self.pages[table[position // P]][position % P]
                assert written == tuple(row.tokens[: position + 1])

    @invariant()
    def what_is_kept_is_what_its_key_says(self) -> None:
        """Writing to it is refused in `_write`; the first page under a key stays."""
        for entry in self.ledger.index:
            assert self.first_pages.setdefault(entry, entry.page) == entry.page
            last = self.pages[entry.page][-1]
            assert page_keys(ROOT, last, P)[entry.depth_pages - 1 :] == [entry.key]
            if entry.checkpoint is not None:
                assert self.states[entry.checkpoint] == last

    def teardown(self) -> None:
        for row in (*self.rows, *self.readers):
            self.ledger.release(row.name)
        self.ledger.check()

    def _open(self, tokens: list[int]) -> Row:
        name = self._name()
        row = Row(name, list(tokens), self.ledger.open(name))
        self.rows.append(row)
        return row

    def _fetchable(self, row: Row) -> list[PageKey]:
        return row.keys[: (len(row.tokens) - 1) // P]

    def _reserve(self, row: Row, num_tokens: int) -> bool:
        """Reserve, or prove that there was no memory, that the lease is as before, and end the request."""
        lease = row.lease
        before = (list(lease.entries), list(lease.own), lease.committed, lease.state, lease.source)
        try:
            self.ledger.reserve(lease, num_tokens)
        except OutOfMemory:
            after = (list(lease.entries), list(lease.own), lease.committed, lease.state, lease.source)
            assert after == before
            self._nothing_was_left(lease, num_tokens)
            self.rows.remove(row)
            self.ledger.release(row.name)
            return False
        assert (len(lease.entries) + len(lease.own)) * P >= num_tokens
        assert lease.own[: len(before[1])] == before[1]
        assert (lease.state is not None) == self.layout.hybrid
        fresh = set(lease.own[len(before[1]) :])
        assert before[3] is None or lease.state == before[3]
        self._scribble(fresh, None if lease.state == before[3] else lease.state)
        return True

    def _scribble(self, pages: set[PageId], state: StateId | None) -> None:
        for page in pages:
            self.pages[page] = [NONSENSE] * P
        if state is not None:
            self.states[state] = NONSENSE

    def _nothing_was_left(self, lease: Lease, num_tokens: int) -> None:
        """Everything that could be taken back was, and it does not suffice."""
        assert all(entry.pins for entry in self.ledger.index)
        assert all(entry.checkpoint is None or entry.checkpoint_pins for entry in self.ledger.index)
        usage = self.ledger.usage()
        layout = self.layout
        wanted = -(-num_tokens // P) - len(lease.entries) - len(lease.own)
        free_pages = usage.page_extents * layout.pages_per_extent - usage.pages_taken
        free_states = usage.state_extents * layout.states_per_extent - usage.states_taken
        extents = -(-max(0, wanted - free_pages) // layout.pages_per_extent)
        extents += layout.hybrid and lease.state is None and not free_states
        assert extents > usage.empty_extents

    def _write(self, row: Row, start: int, end: int) -> None:
        """A step writes the places of its tokens, and its state; none of them belongs to anybody else."""
        lease = row.lease
        table = lease.pages()
        kept = {entry.page for entry in self.ledger.index}
        for position in range(start, end):
            page = table[position // P]
            assert page in lease.own
            assert page not in kept, "what is kept is never written again"
            self.pages[page][position % P] = tuple(row.tokens[: position + 1])
        if lease.state is not None:
            assert lease.state not in {entry.checkpoint for entry in self.ledger.index}
            self.states[lease.state] = tuple(row.tokens[:end])

    def _roll(self, row: Row) -> None:
        """The checkpoint at the boundary takes the place of the one before, or the one before stays."""
        lease = row.lease
        earlier, skipped = lease.rolling, self.ledger.counters["checkpoints_skipped"]
        kept_before = lease.entries[-1].checkpoint
        mine = lease.state
        self.ledger.roll_checkpoint(lease)
        if not self.layout.hybrid or kept_before is not None:
            assert (lease.rolling, lease.state) == (earlier, mine)
            return
        if self.ledger.counters["checkpoints_skipped"] > skipped:
            assert lease.entries[-1].checkpoint is None
            assert (lease.rolling, lease.state, lease.source) == (earlier, mine, None)
            return
        assert lease.source is lease.rolling
        assert lease.rolling is lease.entries[-1]
        assert lease.entries[-1].checkpoint == mine != lease.state
        assert earlier is None or earlier.checkpoint is None or earlier.checkpoint_pins
        self._scribble(set(), lease.state)

    def _name(self) -> str:
        self.serial += 1
        return f"r{self.serial}"


TestLedgerAgainstMemory = LedgerAgainstMemory.TestCase
TestLedgerAgainstMemory.settings = settings(
    deadline=None, derandomize=True, max_examples=60, stateful_step_count=40
)
