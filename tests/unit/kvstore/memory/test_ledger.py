"""Arena, index and ledger together, against a model of device memory that records all tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.kvstore.leases import MAPPING, ROOT, P, Refusals, a_cache, could_serve, snapshot
from tests.support.kvstore.written import DeviceStep, Memory, cells
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey, page_keys
from tidemill.kvstore.layout import CHECKPOINTS, PAGES, STATES, WINDOWS, ObjectClass, PageId, StateId
from tidemill.kvstore.memory.demand import CHECKPOINT_STATE, NOTHING, Demand
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.lease import Lease
from tidemill.kvstore.memory.ledger import FLIGHTS_MAX, Ledger
from tidemill.kvstore.memory.recompute_cost import Policy

TOKENS_MAX = 20
ROWS_MAX = 4

Keep = Literal["keep", "last", "roll", "nothing"]

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
choices = st.integers(0, 999)
keeps = st.sampled_from(["keep", "last", "roll", "nothing"])

BLOBS = ObjectClass("blobs", 24, 2, shared=True)
"""A class that only this test has: leases have its objects together, as they will have adapters."""


@dataclass(eq=False)
class Row:
    """A request of the model: its known and drafted tokens, and its lease."""

    name: str
    tokens: list[int]
    lease: Lease

    @property
    def keys(self) -> list[PageKey]:
        return page_keys(ROOT, self.tokens, P)

    @property
    def fetchable(self) -> list[PageKey]:
        return self.keys[: (len(self.tokens) - 1) // P]


class LedgerAgainstMemory(RuleBasedStateMachine):
    """Runs requests like an engine, with up to two steps of each in flight."""

    @initialize(
        num_extents=st.integers(2, 12),
        states_per_extent=st.integers(1, 2),
        hybrid=st.sampled_from(["copied", True, False]),
        window=st.sampled_from([0, 0, 1, P, P + 1, 2 * P, 3 * P + 5]),
        policy=st.sampled_from(["lru", "value"]),
        checkpoints_per_path=st.integers(2, 4),
    )
    def build(
        self,
        num_extents: int,
        states_per_extent: int,
        hybrid: bool | Literal["copied"],  # noqa: FBT001  drawn
        window: int,
        policy: Policy,
        checkpoints_per_path: int,
    ) -> None:
        self.refusals = Refusals()
        self.cache = a_cache(
            num_extents,
            states_per_extent,
            hybrid=bool(hybrid),
            converts=hybrid == "copied",
            window=window,
            policy=policy,
            backing=self.refusals,
            others=[BLOBS],
        )
        self.ledger = Ledger(self.cache, checkpoints_per_path, self.refusals)
        self.has_states, self.hybrid = bool(hybrid), bool(hybrid) or window > 0
        self.saved = self.cache.layout.saved
        self.memory = Memory(P, window)
        self.rows: list[Row] = []
        self.readers: list[Row] = []
        self.released: list[Row] = []
        self.first_pages: dict[Entry, PageId] = {}
        self.announced: set[PageKey] = set()
        self.serial = 0

    @precondition(lambda self: len(self.rows) < ROWS_MAX)
    @rule(tokens=prompts, spare_slots_min=st.integers(0, 1))
    def start(self, tokens: list[int], spare_slots_min: int) -> None:
        self._start(self._name(), tokens, spare_slots_min)

    @precondition(lambda self: len(self.rows) < ROWS_MAX)
    @rule(tokens=prompts, choice=choices)
    def fetch(self, tokens: list[int], choice: int) -> None:
        """Share every cached page; fill the others and a checkpoint like a fetch from a store."""
        row = self._open(self._name(), tokens, 0)
        match = self.ledger.index.match(row.fetchable)
        depth_pages = choice % (len(row.fetchable) + 1)
        if depth_pages <= match.restorable_pages:
            self.ledger.attach(row.lease, match, match.restorable_pages)
            self._reserve(row, len(tokens))
            return
        self.ledger.attach(row.lease, match, min(len(match.path), depth_pages))
        if self._reserve(row, len(tokens), headroom_windows=1) and self._reserve_fetched(row, depth_pages):
            lease, end = row.lease, depth_pages * P
            fetched = range(lease.fetched_windows.start * P, lease.fetched_windows.stop * P)
            written = cells(PAGES, lease.pages, range(lease.committed, end), P)
            written |= cells(WINDOWS, lease.window_table, fetched, P)
            if self.has_states:
                written[self.saved, lease.fetch_slot, 0] = end
            self.memory.write(written, tokens)
            self.ledger.adopt(row.lease, depth_pages * P, row.keys)
            self._scribble_spares(row.lease)

    @precondition(lambda self: self.rows)
    @rule(
        choice=choices, counts=st.lists(st.integers(1, 4), min_size=1, max_size=2), drafts=st.integers(0, 2)
    )
    def launch(self, choice: int, counts: list[int], drafts: int) -> None:
        """Launch one or two steps; the last tokens of a step may be drafts."""
        row = self.rows[choice % len(self.rows)]
        for count in counts:
            if not self._launch(row, count, min(drafts, count - 1), choice):
                return

    @precondition(lambda self: any(row.lease.flights for row in self.rows))
    @rule(choice=choices, rejected=st.integers(0, 2), keep=keeps)
    def commit(self, choice: int, rejected: int, keep: Keep) -> None:
        """Commit the oldest step of a row; if drafts are rejected, the next step is void."""
        rows = [row for row in self.rows if row.lease.flights]
        row = rows[choice % len(rows)]
        flight = row.lease.flights[0]
        last = (flight.start, *flight.inside)[-1]
        drafts = len(flight.writes) - len(flight.inside) - 1 if self.has_states else flight.end - last - 1
        committed = flight.end - min(rejected, drafts)
        before = row.lease.committed
        self._commit(row, committed)
        if flight.void:
            assert row.lease.committed == before
            return
        assert row.lease.committed == committed
        if committed < flight.end:
            del row.tokens[committed:]
            assert all(later.void for later in row.lease.flights)
        if committed % P == 0:
            self._keep(row, keep)

    @precondition(lambda self: any(row.lease.flights for row in self.rows))
    @rule(choice=choices)
    def fail_step(self, choice: int) -> None:
        """Fail a step: none of its tokens count, and its request ends."""
        rows = [row for row in self.rows if row.lease.flights]
        row = rows[choice % len(rows)]
        before = row.lease.committed
        self._commit(row, row.lease.flights[0].start)
        assert row.lease.committed == before
        self._release(row)

    @precondition(lambda self: self.released)
    @rule(choice=choices)
    def commit_after_release(self, choice: int) -> None:
        row = self.released[choice % len(self.released)]
        before = (list(row.lease.shared_entries), row.lease.committed, len(self.ledger.index))
        self._commit(row, row.lease.flights[0].end)
        if row.lease.flights:
            assert (row.lease.shared_entries, row.lease.committed, len(self.ledger.index)) == before
        else:
            assert not [*row.lease.shared_entries, *row.lease.sources()]
            assert not any(row.lease.owned().values())
            self.released.remove(row)

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def share(self, choice: int) -> None:
        """Read some first pages after their request may have ended, like the publisher."""
        row = self.rows[choice % len(self.rows)]
        if row.lease.shared_entries:
            num_pages = choice % len(row.lease.shared_entries) + 1
            name = self._name()
            lease = self.ledger.share(name, row.lease, num_pages)
            assert lease.shared_entries == row.lease.shared_entries[:num_pages]
            assert lease.source is (
                lease.shared_entries[-1] if lease.shared_entries[-1].checkpoint is not None else None
            )
            self.readers.append(Row(name, row.tokens[: num_pages * P], lease))

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def share_a_blob(self, choice: int) -> None:
        """Give a row a blob that others have, or a new one."""
        row = self.rows[choice % len(self.rows)]
        held = sorted(self._blobs() - set(row.lease.held.get(BLOBS.name, [])))
        if held and choice % 3:
            self.ledger.join(row.lease, BLOBS.name, [held[choice % len(held)]])
        else:
            self._reserve(row, row.lease.allocated, others={BLOBS.name: 1})

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        self._release(self.rows[choice % len(self.rows)])

    @precondition(lambda self: self.rows)
    @rule(choice=choices)
    def preempt(self, choice: int) -> None:
        """Release a row and resume it under the same name; its steps are still in flight."""
        row = self.rows[choice % len(self.rows)]
        self._release(row)
        self._start(row.name, row.tokens[: max(1, row.lease.committed)], row.lease.spare_slots_min)

    @precondition(lambda self: self.readers)
    @rule(choice=choices)
    def release_reader(self, choice: int) -> None:
        self.ledger.release(self.readers.pop(choice % len(self.readers)).name)

    @rule(choice=choices)
    def resize(self, choice: int) -> None:
        """Change the budget: shrinking evicts only cached objects."""
        budget_extents = choice % self.ledger.num_extents + 1
        enough = self.ledger.resize(budget_extents)
        assert self.ledger.budget_extents == budget_extents
        assert enough == (not self.ledger.excess)
        assert enough or not any(pool.reclaimable for pool in self.cache.pools.values())

    @rule(
        site=st.sampled_from([PAGES, STATES, WINDOWS, CHECKPOINTS, CHECKPOINT_STATE, MAPPING]),
        left=st.integers(0, 3),
    )
    def refuse(self, site: str, left: int) -> None:
        """Refuse memory to a later call, like a system that has none."""
        self.refusals.site, self.refusals.left = site, left

    @rule()
    def announce(self) -> None:
        changes = self.ledger.index.take_changes()
        self.announced = (self.announced - changes.removed) | changes.added
        assert self.announced == set(self.ledger.index.restorable_keys())

    @invariant()
    def every_byte_and_every_pin_has_one_owner(self) -> None:
        self.ledger.check()
        self.memory.check(self.cache.arena)
        leases = self._leases()
        assert self.ledger.num_leases == len(leases)
        pins = Counter(entry for lease in leases for entry in lease.shared_entries)
        reading = Counter(entry for lease in leases for entry in lease.sources())
        for entry in self.ledger.index:
            assert (entry.pins, entry.checkpoint_pins) == (pins[entry], reading[entry])

    @invariant()
    def blobs_are_freed_with_their_last_lease(self) -> None:
        usage = self.ledger.usage()
        assert (usage.pinned[BLOBS.name], usage.cached[BLOBS.name]) == (len(self._blobs()), 0)

    @invariant()
    def memory_contains_the_tokens_of_each_row(self) -> None:
        for row in (*self.rows, *self.readers):
            lease = row.lease
            table = lease.pages
            for position in range(lease.committed):
                written = self.memory.at(PAGES, table[position // P], position % P)
                assert written == tuple(row.tokens[: position + 1])
            if lease.source is not None and lease.source.checkpoint is not None:
                self._is_written(lease.source.checkpoint, row.tokens[: lease.committed])
            for position in range(lease.committed) if self.memory.window else ():
                if position > lease.committed - self.memory.window and row not in self.readers:
                    window = lease.window_table[position // P]
                    assert self.memory.at(WINDOWS, window, position % P) == tuple(row.tokens[: position + 1])

    def _is_written(self, checkpoint: Checkpoint, tokens: Sequence[int]) -> None:
        for slot in checkpoint.saved:
            assert self.memory.at(self.saved, slot) == tuple(tokens)
        indexes = self.cache.layout.last_window(len(tokens) // P)
        for index, window in zip(indexes, checkpoint.windows, strict=True):
            for position in range(index * P, index * P + P):
                assert self.memory.at(WINDOWS, window, position % P) == tuple(tokens[: position + 1])

    @invariant()
    def cached_entries_match_their_keys(self) -> None:
        """Assert that the first page under a key stays, and that no step overwrites it."""
        for entry in self.ledger.index:
            assert self.first_pages.setdefault(entry, entry.page) == entry.page
            last = self.memory.at(PAGES, entry.page, P - 1)
            assert page_keys(ROOT, last, P)[entry.depth_pages - 1 :] == [entry.key]
            if entry.checkpoint is not None:
                self._is_written(entry.checkpoint, last)
                assert len(entry.checkpoint.saved) == self.has_states
                assert self.saved == STATES or not entry.checkpoint.states

    @invariant()
    def idle_leases_own_the_slots_of_their_strategy(self) -> None:
        for lease in (row.lease for row in self.rows if not row.lease.flights):
            if self.has_states:
                own = len(lease.states) + len(lease.spare_slots)
                copies = len(lease.saved) + len(lease.held[CHECKPOINTS])
                own += copies
                assert own <= 1 + lease.spare_slots_min + len(lease.saved), (
                    "slots of the last step were not freed"
                )
                assert len(lease.states) <= 1
                assert len(lease.saved) <= (self.saved == CHECKPOINTS)
                assert self.saved == CHECKPOINTS or not copies
            else:
                assert not lease.owned()[STATES]

    @invariant()
    def window_pages_out_of_the_window_are_freed(self) -> None:
        layout = self.cache.layout
        for lease in (row.lease for row in self.rows):
            assert lease.first_window == layout.first_visible_window(lease.committed)
            assert bool(lease.windows) == (layout.has_windows and lease.allocated > 0)

    def teardown(self) -> None:
        for row in (*self.rows, *self.readers):
            self.ledger.release(row.name)
        while self.memory.steps:
            step = self.memory.steps[0]
            self.memory.complete(step)
            self.ledger.commit(step.lease, step.flight.end, ())
        self.ledger.check()
        usage = self.ledger.usage()
        assert not self.ledger.num_leases
        assert not any(usage.pinned.values())
        assert self.ledger.resize(1), "everything can be evicted"

    def _start(self, name: str, tokens: list[int], spare_slots_min: int) -> None:
        """Resume at the deepest restorable depth, and reserve memory for the rest."""
        row = self._open(name, tokens, spare_slots_min)
        match = self.ledger.index.match(row.fetchable)
        self.ledger.attach(row.lease, match, match.restorable_pages)
        self._reserve(row, len(tokens))

    def _open(self, name: str, tokens: list[int], spare_slots_min: int) -> Row:
        row = Row(name, list(tokens), self.ledger.open(name, spare_slots_min=spare_slots_min))
        self.rows.append(row)
        return row

    def _reserve_fetched(self, row: Row, num_pages: int) -> bool:
        before = self.refusals.count
        copies = {CHECKPOINTS: int(self.saved == CHECKPOINTS)}
        try:
            self.ledger.reserve_fetched(row.lease, num_pages)
        except OutOfMemory:
            missing = {WINDOWS: max(0, num_pages - row.lease.windows_end), **copies}
            refused = self.refusals.count > before
            assert refused or not could_serve(self.cache, self._leases(), missing)
            self._release(row)
            return False
        self.memory.allocate(CHECKPOINTS, row.lease.held[CHECKPOINTS])
        positions = row.lease.fetched_windows
        self.memory.allocate(WINDOWS, row.lease.windows[-len(positions) :] if positions else ())
        return True

    def _blobs(self) -> set[int]:
        return {blob for lease in self._leases() for blob in lease.held.get(BLOBS.name, [])}

    def _reserve(
        self,
        row: Row,
        num_tokens: int,
        drafts: int = 0,
        headroom_windows: int | None = None,
        others: Demand = NOTHING,
    ) -> bool:
        """Reserve; or assert that memory was short, the lease is unchanged, and end the request."""
        lease = row.lease
        before, evicted = snapshot(lease), self._evictions()
        slots, copies = self._slots_missing(lease, drafts)
        pages = max(0, -(-num_tokens // P) - len(lease.shared_entries) - len(lease.private_pages))
        has_windows = self.cache.layout.has_windows
        num_windows = (
            -(-num_tokens // P) - lease.windows_end if headroom_windows is None else headroom_windows
        )
        wanted = {**others, STATES: slots, PAGES: pages, WINDOWS: max(0, num_windows) * has_windows}
        wanted[CHECKPOINTS] = copies
        possible = could_serve(self.cache, self._leases(), wanted)
        refusals = self.refusals.count
        source, spare_slots_min = lease.source, lease.spare_slots_min
        headroom = {WINDOWS: (headroom_windows or 0) * has_windows}
        end = None if headroom_windows is None else 0
        try:
            self.ledger.reserve(
                lease, num_tokens, drafts=drafts, headroom=headroom, windows_end=end, others=others
            )
        except OutOfMemory:
            took_back = (lease.source, lease.spare_slots_min) != (source, spare_slots_min)
            refused = self.refusals.count > refusals
            assert refused or not possible
            assert took_back or snapshot(lease) == before, "a refusal changed the lease"
            assert took_back or (refused and self.refusals.site == MAPPING) or self._evictions() == evicted
            self._release(row)
            return False
        took_back = (lease.source, lease.spare_slots_min) != (source, spare_slots_min)
        private, windows = before["private_pages"], before["windows"]
        spare: list[StateId] = [] if took_back else before["spare_slots"]
        assert lease.allocated >= num_tokens
        assert lease.private_pages[: len(private)] == private
        assert lease.spare_slots[: len(spare)] == spare
        if took_back:
            assert self.refusals.count > refusals or not possible, "its own checkpoint is evicted last"
            assert lease.source is source or lease.committed in lease.states
        else:
            assert len(lease.spare_slots) == len(spare) + slots
        self.memory.allocate(STATES, lease.spare_slots[len(spare) :])
        self._scribble_copies(lease)
        self.memory.allocate(PAGES, lease.private_pages[len(private) :])
        self.memory.allocate(WINDOWS, lease.windows[len(windows) :])
        return True

    def _launch(self, row: Row, count: int, drafts: int, choice: int) -> bool:
        lease = row.lease
        end = lease.launched + count
        if len(lease.flights) == FLIGHTS_MAX or end > TOKENS_MAX or not self._reserve(row, end, drafts):
            return False
        row.tokens += [choice >> position & 1 for position in range(end - len(row.tokens))]
        slots, copies = list(lease.spare_slots), list(lease.held[CHECKPOINTS])
        keep = choice % 3 > 0 and (self.saved == STATES or end % P == 0)
        depths = [
            depth
            for depth in range(lease.launched + 1, end - drafts)
            if not depth % P and choice >> depth & 1
        ]
        inside, spare = (depths, []) if choice % 2 else ([], depths)
        used = [entry for entry in self.ledger.index if entry.checkpoint and entry.uses]
        flight = self.ledger.launch(lease, end, keep=keep, drafts=drafts, inside=inside, spare=spare)
        assert len(flight.inside) == len(depths) or self.has_states
        if inside:
            assert list(flight.inside) == inside[len(inside) - len(flight.inside) :], "the deepest ones"
        elif not keep:
            assert all(entry.checkpoint for entry in used), "a spare one replaces only spare ones"
        assert (flight.start + count, flight.end) == (end, end) == (lease.launched, end)
        self.memory.allocate(STATES, {state for _, state in flight.writes} - set(slots) - {flight.reads})
        self.memory.allocate(CHECKPOINTS, {slot for _, slot in flight.saves} - set(copies))
        assert {depth for depth, state in flight.writes for save in flight.saves if save.state == state} <= {
            *flight.inside,
            end,
        }, "a state that is no checkpoint's is copied"
        self.memory.launch(lease, flight, row.tokens, hybrid=self.has_states)
        indexes = range(flight.start // P, -(-end // P) if lease.windows else 0)
        written = [lease.window_table[index] for index in indexes]
        assert not any(map(self.cache.pools[WINDOWS].owners_of, written)), (
            "a cached window page is written again"
        )
        return True

    def _slots_missing(self, lease: Lease, drafts: int) -> tuple[int, int]:
        """Return the states that the lease lacks for its next step, and the slots for copies of them."""
        if not self.has_states:
            return 0, 0
        in_place, spare = not drafts and lease.launched in lease.states, lease.spare_slots_min
        states = (0 if in_place else 1 + drafts) - len(lease.spare_slots)
        if self.saved == STATES:
            return max(0, states + spare), 0
        return max(0, states), max(0, spare - len(lease.held[CHECKPOINTS]))

    def _evictions(self) -> Counter[str]:
        return Counter({name: n for name, n in self.ledger.counters.items() if name.startswith("evicted")})

    def _commit(self, row: Row, num_tokens: int) -> None:
        step = self._first_step(row.lease)
        assert step.flight is row.lease.flights[0]
        self.memory.complete(step)
        self.ledger.commit(row.lease, num_tokens, row.keys)

    def _first_step(self, lease: Lease) -> DeviceStep:
        return next(step for step in self.memory.steps if step.lease is lease)

    def _keep(self, row: Row, keep: Keep) -> None:
        """Turn the state at the boundary into a checkpoint, or assert that nothing changed."""
        lease = row.lease
        if keep == "nothing" or (keep == "last" and lease.launched > lease.committed):
            return
        entry, earlier, before = lease.shared_entries[-1], lease.rolling, snapshot(lease)
        existing = entry.checkpoint
        if keep == "roll":
            kept = self.ledger.roll_checkpoint(lease)
        else:
            kept = self.ledger.keep_state(lease, last=keep == "last")
        assert kept == (entry.checkpoint is not None or not self.hybrid)
        if not kept:
            assert snapshot(lease) == before, "a skipped checkpoint changed something"
        if not self.hybrid or existing is not None:
            assert entry.checkpoint == existing
            assert lease.rolling is earlier
        elif kept and keep == "roll":
            assert lease.rolling is entry
            assert earlier is None or earlier.checkpoint is None or earlier.checkpoint_pins
        elif lease.rolling is not earlier:  # its slot was the only one to be had
            assert lease.rolling is None
            assert earlier is not None
            assert earlier.checkpoint is None
        self._scribble_spares(lease)

    def _scribble_spares(self, lease: Lease) -> None:
        self.memory.allocate(STATES, lease.spare_slots)
        self._scribble_copies(lease)

    def _scribble_copies(self, lease: Lease) -> None:
        self.memory.allocate(CHECKPOINTS, lease.held[CHECKPOINTS])

    def _release(self, row: Row) -> None:
        self.rows.remove(row)
        self.ledger.release(row.name)
        if row.lease.flights:
            self.released.append(row)

    def _leases(self) -> list[Lease]:
        return [row.lease for row in (*self.rows, *self.readers, *self.released)]

    def _name(self) -> str:
        self.serial += 1
        return f"r{self.serial}"


TestLedgerAgainstMemory = LedgerAgainstMemory.TestCase
TestLedgerAgainstMemory.settings = settings(
    deadline=None, derandomize=True, max_examples=300, stateful_step_count=50
)
