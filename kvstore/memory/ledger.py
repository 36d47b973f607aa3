"""The ledger: each byte of the arena is free, or owned by a lease, or owned by the prefix index.

    open -> attach -> reserve -> launch -> commit ... -> release
                         ^                   |  keep_state: the state becomes a checkpoint
                         +-------------------+  at most two steps in flight: the next one may be
                                                launched before this one is committed

All memory of requests is allocated and freed here. A checkpoint is made without a copy (`checkpoints.py`). A
step also writes states at page boundaries inside it, to slots of their own. A lease that is released with
steps in flight is freed when the last of them has completed.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import CHECKPOINTS, PAGES, STATES, WINDOWS
from tidemill.kvstore.memory import windows
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.checkpoints import Checkpoints, roundest
from tidemill.kvstore.memory.demand import NOTHING, Demand, FailAllocation, never
from tidemill.kvstore.memory.lease import NO_TEXT, Lease, SequenceText, StateWrite, StepInFlight
from tidemill.kvstore.memory.prefix_index import Match

FLIGHTS_MAX = 2
CHECKPOINTS_PER_PATH = 16


class Ledger:
    """The leases over one cache. The cache evicts what no lease uses when a lease needs memory."""

    def __init__(
        self,
        cache: Cache,
        checkpoints_per_path: int = CHECKPOINTS_PER_PATH,
        fail_allocation: FailAllocation = never,
    ) -> None:
        self.layout = cache.layout
        self.index = cache.index
        self.retention = cache.retention
        self.spares = cache.spares
        self.counters = cache.counters
        self.evictions = cache.evictions
        self._cache = cache
        self._pools = cache.pools
        self._checkpoints = Checkpoints(cache, checkpoints_per_path, fail_allocation)
        self.keep_state = self._checkpoints.keep
        self.find_spare_slot = self._checkpoints.find_spare_slot
        self.roll_checkpoint = self._checkpoints.roll
        self.resize, self.usage = cache.resize, cache.arena.usage
        self._fail_allocation = fail_allocation
        self._leases: dict[str, Lease] = {}
        self._released: list[Lease] = []  # they still have steps in flight

    def open(
        self, request_id: str, *, spare_slots_min: int = 0, runs: bool = True, text: SequenceText = NO_TEXT
    ) -> Lease:
        """Open an empty lease; see `Lease` for its parameters."""
        assert request_id not in self._leases, f"{request_id} holds a lease already"
        lease = self._leases[request_id] = Lease(self.layout.page_tokens, spare_slots_min, runs, text)
        return lease

    def rename(self, request_id: str, new_id: str) -> None:
        """Move the lease of `request_id` to `new_id`, for a transfer that still uses the memory."""
        assert new_id not in self._leases
        self._leases[new_id] = self._leases.pop(request_id)

    def attach(self, lease: Lease, match: Match, num_pages: int) -> None:
        """Share the first `num_pages` pages of `match`, and the checkpoint at their end, if any."""
        assert not lease.allocated
        lease.shared_entries += match.path[:num_pages]
        for entry in lease.shared_entries:
            self._cache.pin(entry)
        lease.rebuild_page_table()
        lease.committed = lease.launched = num_pages * self.layout.page_tokens
        if lease.shared_entries and lease.shared_entries[-1].checkpoint is not None:
            lease.source = self._cache.pin_checkpoint(lease.shared_entries[-1])
            shared = lease.shared_entries[-1].checkpoint.windows
            self.join(lease, WINDOWS, shared)
            if shared:
                lease.first_window = len(lease.shared_entries) - len(shared)
                lease.rebuild_window_table()

    def join(self, lease: Lease, name: str, ids: Sequence[Any]) -> None:
        """Let the lease have objects of a shared class that another lease or an entry has."""
        for joined in ids:
            self._pools[name].pin(joined)
        lease.held.setdefault(name, []).extend(ids)

    def share(self, request_id: str, lease: Lease, num_pages: int) -> Lease:
        """Open a lease on the first `num_pages` pages of `lease`, to read them after it ends."""
        second = self.open(request_id)
        self.attach(second, Match(tuple(lease.shared_entries[:num_pages]), num_pages), num_pages)
        return second

    def reserve(
        self,
        lease: Lease,
        num_tokens: int,
        *,
        drafts: int = 0,
        headroom: Demand = NOTHING,
        windows_end: int | None = None,
        others: Demand = NOTHING,
    ) -> None:
        """Grow the lease to `num_tokens`, to the state slots that its next step writes, and by `others`.

        The slots are one, and one more for each of `drafts` tokens that may be rejected. Window pages are
        taken up to `windows_end` tokens (None: all); later steps take the rest.
        All or nothing: raises OutOfMemory, also when `headroom` could not be had after that. Before it fails
        without `drafts` and pages of headroom, it takes back memory that the lease holds for its checkpoints.
        """
        assert not lease.ended, "memory for a request that has ended"
        need = self._demand(lease, num_tokens, drafts, windows_end, others)
        if not need and not headroom:
            return
        while not self._could_grow(lease, need, headroom):
            if headroom.get(PAGES) or drafts or not self._checkpoints.take_back_optional(lease):
                wanted = ", ".join(f"{count} {name}" for name, count in need.items())
                raise OutOfMemory(f"{wanted} are more than all that is not pinned")
            need = self._demand(lease, num_tokens, drafts, windows_end, others)
        self._cache.promise(lease, -min(lease.promised_pages, need.get(PAGES, 0)))
        self._grow(lease, need)

    def promise(self, lease: Lease, num_tokens: int) -> None:
        """Let no other lease take the pages that `lease` lacks for `num_tokens`. Until it reserves them they
        may be cached ones. The caller has just reserved with at least as many pages of headroom."""
        self._cache.promise(lease, max(0, -(-(num_tokens - lease.allocated) // self.layout.page_tokens)))

    def reserve_fetched(self, lease: Lease, num_pages: int) -> None:
        """Take the missing window pages of a checkpoint after `num_pages`, and its slot if it has a class of
        its own, for a fetch to fill.

        Window pages before that checkpoint are freed, so the lease is useless if the fetch fails. Raises
        OutOfMemory.
        """
        positions = self.layout.last_window(num_pages)
        left = windows.pop_out_of_window(self.layout, lease, num_pages * self.layout.page_tokens)
        self._pools[WINDOWS].unpin_all(left)
        if not lease.windows:
            lease.first_window = positions.start
        missing = range(lease.windows_end, positions.stop)
        need = {WINDOWS: len(missing)}
        if self.layout.converts:
            need[CHECKPOINTS] = int(not lease.held[CHECKPOINTS])
        self._refuse(need)
        self._grow(lease, need)
        lease.fetched_windows = missing

    def launch(
        self,
        lease: Lease,
        end: int,
        *,
        keep: bool = False,
        drafts: int = 0,
        inside: Sequence[int] = (),
        spare: Sequence[int] = (),
    ) -> StepInFlight:
        """Record a step that runs `[launched, end)`, whose last `drafts` tokens may be rejected.

        With `keep`, the state at its start will become a checkpoint: the caller calls `keep_state` when the
        previous step is committed. The step then overwrites that state only if no slot can be had. Where
        checkpoints are a class of their own, it is the state at its end, which the step copies if it can.
        `inside` are page boundaries, ascending, before the first draft. Their states become checkpoints when
        the step is committed; if not all of them get a slot, the deepest ones do.
        Those at `spare` likewise, as far as slots are free or spare.
        """
        assert not lease.ended
        assert len(lease.flights) < FLIGHTS_MAX
        start = lease.launched
        assert start < end - drafts <= end <= lease.allocated
        assert not windows.count_missing(self.layout, lease, end)
        flight, lease.source = StepInFlight(start, end, None, (), (), lease.source), None
        if inside or spare:
            flight.inside, flight.spare = tuple(sorted({*inside, *spare})), frozenset(spare)
            assert all(start < at < end - drafts and not at % self.layout.page_tokens for at in inside)
        if self.layout.has_states:
            if flight.source is not None and flight.source.checkpoint is not None:
                flight.reads = flight.source.checkpoint.state
            elif start:
                flight.reads = lease.states[start]
            moves = keep and not self.layout.converts
            if lease.writes_in_place(drafts) and not (moves and self._checkpoints.borrow_slot(lease)):
                slots = [lease.states.pop(start)]
            else:
                slots = [lease.spare_slots.pop() for _ in range(drafts + 1)]
            flight.writes = tuple(map(StateWrite, range(end - drafts, end + 1), slots))
            if self.layout.converts:
                self._copy(lease, flight, [*[end] * keep, *reversed(inside), *roundest(spare)])
            else:
                found = self._checkpoints.slots_inside(lease, inside, spare) if flight.inside else []
                flight.inside = tuple(depth for depth, _ in found)
                flight.writes = (*map(StateWrite._make, found), *flight.writes)
                lease.states.update(flight.writes)
        lease.flights.append(flight)
        lease.launched = end
        return flight

    def commit(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """Complete the oldest step in flight: `[0, num_tokens)` is written and accepted.

        If the step ran further than that, the steps after it are void. If it started there, no token of it
        counts and a state that it overwrote is lost, so the lease can only be released.
        Pages that became full go to the index. If the index has such a page already, the lease shares that
        one and frees its own. For a request that has ended nothing is committed.
        """
        flight = lease.flights.popleft()
        if flight.source is not None:
            self._cache.unpin_checkpoint(flight.source)
        for name, freed in flight.deferred:
            self._pools[name].unpin(freed)
        if not flight.void and not lease.ended:
            assert flight.start <= num_tokens <= flight.end
            rejected = self._reject(lease, num_tokens) if num_tokens < flight.end else []
            self._commit(lease, num_tokens, keys, flight)
            self._pools[WINDOWS].unpin_all(windows.pop_out_of_window(self.layout, lease, num_tokens))
            for name, slot in rejected:
                self._checkpoints.return_slot(lease, name, slot)
        if lease.ended and not lease.flights:
            self._released.remove(lease)
            self._free(lease)

    def begin_fetched(self, lease: Lease, num_tokens: int) -> None:
        """Let steps go on from `num_tokens`, behind pages that are still being fetched and the checkpoint
        there, which has been. It counts as a step in flight, which `end_fetched` completes.

        The checkpoint was fetched into the window pages of `reserve_fetched` and into `fetch_slot`. A lease
        that does not run has only pages.
        """
        assert not lease.flights
        if lease.source is not None:
            self._cache.unpin_checkpoint(lease.source)
            lease.source = None
        if self.layout.converts and lease.runs:
            lease.saved[num_tokens] = lease.held[CHECKPOINTS].pop()
        elif self.layout.has_states and lease.runs:
            slot = lease.spare_slots.pop() if lease.spare_slots else lease.states.pop(lease.committed)
            lease.states[num_tokens] = slot
        lease.flights.append(StepInFlight(lease.committed, num_tokens, None, (), ()))
        lease.launched = num_tokens

    def end_fetched(self, lease: Lease, keys: Sequence[PageKey], *, arrived: bool) -> None:
        """Complete `begin_fetched`. If the pages have not arrived, the lease can only be released."""
        fetch = lease.flights[0]
        self.commit(lease, fetch.end if arrived else fetch.start, keys)
        if arrived and lease.runs and not lease.ended:
            self.keep_state(lease)

    def adopt(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """Commit fetched pages up to `num_tokens` and the checkpoint there, as if computed."""
        self.begin_fetched(lease, num_tokens)
        self.end_fetched(lease, keys, arrived=True)

    def release(self, request_id: str) -> None:
        """Free the lease, whatever ended the request. No other call returns all its memory."""
        lease = self._leases.pop(request_id)
        lease.ended = True
        self._cache.promise(lease, -lease.promised_pages)
        if lease.flights:
            self._released.append(lease)
        else:
            self._free(lease)

    @property
    def budget_extents(self) -> int:
        return self._cache.arena.budget_extents

    @property
    def num_extents(self) -> int:
        """The upper limit of the budget."""
        return self._cache.arena.num_extents

    @property
    def excess(self) -> int:
        """The number of mapped extents above the budget."""
        return self._cache.arena.excess

    @property
    def num_slots(self) -> int:
        """The number of unshared states of requests: 1 to 3 per idle lease, by strategy."""
        return sum(lease.num_slots for lease in self._leases.values())

    @property
    def num_leases(self) -> int:
        return len(self._leases) + len(self._released)

    def check(self) -> None:
        """Prove that every byte has exactly one owner, and that every pin has a reason."""
        leases = [*self._leases.values(), *self._released]
        pins = Counter(entry for lease in leases for entry in lease.shared_entries)
        reading = Counter(entry for lease in leases for entry in lease.sources())
        for entry in self.index:
            found = (entry.pins, entry.checkpoint_pins)
            assert found == (pins[entry], reading[entry]), "a pin has no lease"
        self._cache.check(lease.owned() for lease in leases)
        assert self._cache.promised_pages == sum(lease.promised_pages for lease in leases)
        for lease in leases:
            lease.check()
            assert lease.ended == (lease in self._released)

    def _commit(
        self, lease: Lease, num_tokens: int, keys: Sequence[PageKey], flight: StepInFlight | None = None
    ) -> None:
        lease.committed = num_tokens
        lease.launched = max(lease.launched, num_tokens)
        while (len(lease.shared_entries) + 1) * self.layout.page_tokens <= num_tokens:
            parent = lease.shared_entries[-1] if lease.shared_entries else None
            page = lease.private_pages.pop(0)
            entry, taken_over = self._cache.insert(parent, keys[len(lease.shared_entries)], page)
            lease.shared_entries.append(entry)
            if self.index.log is not None and taken_over:
                entry.tokens, entry.salt = lease.tokens_of(entry), lease.text.salt
            if not taken_over:
                lease.rebuild_page_table()
                if lease.flights:
                    lease.flights[-1].deferred.append((PAGES, page))
                else:
                    self._pools[PAGES].unpin(page)
        if flight is not None:
            for depth in flight.inside:
                if depth <= num_tokens:
                    self._checkpoints.keep_inside(lease, depth, spare=depth in flight.spare)
        for name, slots in ((STATES, lease.states), (CHECKPOINTS, lease.saved)):
            for depth in [depth for depth in slots if depth < num_tokens]:
                self._checkpoints.return_slot(lease, name, slots.pop(depth))

    def _copy(self, lease: Lease, flight: StepInFlight, depths: Sequence[int]) -> None:
        """Let a step copy the checkpoint from which it goes on to a state, and states at `depths`, inside it
        and at its end, to checkpoints."""
        lease.states.update(flight.writes)
        if flight.source is not None and flight.source.checkpoint is not None:
            [flight.restores] = flight.source.checkpoint.checkpoints
            flight.reads = flight.writes[-1].state
        self._checkpoints.copy(lease, flight, depths)
        flight.inside = tuple(
            sorted(depth for depth in depths if depth in lease.saved and depth < flight.end)
        )

    def _reject(self, lease: Lease, num_tokens: int) -> list[tuple[str, Any]]:
        """Discard the tokens from `num_tokens` on and void the steps after the completed one. Return the
        class and slot of rejected states and their copies; none if a step in flight still uses them: it frees
        them."""
        slots = [
            (name, by_depth.pop(depth))
            for name, by_depth in ((STATES, lease.states), (CHECKPOINTS, lease.saved))
            for depth in list(by_depth)
            if depth > num_tokens
        ]
        lease.launched = num_tokens
        for flight in lease.flights:
            flight.void = True
        if not lease.flights:
            return slots
        lease.flights[-1].deferred += slots
        return []

    def _demand(
        self, lease: Lease, num_tokens: int, drafts: int, windows_end: int | None, others: Demand
    ) -> Demand:
        """Return what the lease lacks for `reserve`, pages last: others may need whole extents."""
        need = dict(others) if others else {}
        if self.layout.has_states and lease.runs:
            converts, spare = self.layout.converts, lease.spare_slots_min
            if num_slots := lease.missing_slots(drafts, 0 if converts else spare):
                need[STATES] = num_slots
            if converts and (num_slots := spare - len(lease.held[CHECKPOINTS])) > 0:
                need[CHECKPOINTS] = num_slots
        end = num_tokens if windows_end is None else windows_end
        if num_windows := windows.count_missing(self.layout, lease, end):
            need[WINDOWS] = num_windows
        if num_tokens > lease.allocated:
            need[PAGES] = -(-(num_tokens - lease.allocated) // self.layout.page_tokens)
        return need

    def _could_grow(self, lease: Lease, need: Demand, headroom: Demand) -> bool:
        """Return whether eviction could make room. Raises OutOfMemory if a test wants that."""
        self._refuse(need)
        wanted = {name: need.get(name, 0) + headroom.get(name, 0) for name in need.keys() | headroom.keys()}
        if PAGES in need:
            wanted[PAGES] -= min(lease.promised_pages, need[PAGES])
        return self._cache.could_hold(wanted)

    def _refuse(self, need: Demand) -> None:
        sites = chain.from_iterable(repeat(name, count) for name, count in need.items())
        if self._fail_allocation is not never and any(map(self._fail_allocation, sites)):
            raise OutOfMemory("refused")

    def _grow(self, lease: Lease, need: Demand) -> None:
        try:
            self._take(lease, need)
        except OutOfMemory:
            # The states took extents that the pages need, but another slot would do.
            self._cache.clear(lease.text.tenant)
            self._take(lease, need)

    def _take(self, lease: Lease, need: Demand) -> None:
        """Take all or nothing."""
        before = {name: len(lease.held.setdefault(name, [])) for name in need}
        try:
            for name, count in need.items():
                lease.held[name].extend(self._cache.take(name, lease.text.tenant) for _ in range(count))
        except OutOfMemory:
            for name, count in before.items():
                self._pools[name].unpin_all(lease.held[name][count:])
                del lease.held[name][count:]
            raise
        if PAGES in need:
            lease.rebuild_page_table()
        if WINDOWS in need:
            lease.rebuild_window_table()

    def _free(self, lease: Lease) -> None:
        if lease.source is not None:
            self._cache.unpin_checkpoint(lease.source)
            lease.source = None
        for name, ids in lease.owned().items():
            self._pools[name].unpin_all(ids)
        lease.states.clear()
        lease.saved.clear()
        for ids in lease.held.values():
            ids.clear()
        while lease.shared_entries:
            self._cache.unpin(lease.shared_entries.pop())
        lease.rebuild_page_table()
