"""Who owns which byte of the arena: the free places, one lease, or the prefix index. Nobody else allocates.

    open -> attach -> reserve -> launch -> land ... -> release
                         ^                   |  keep_state: a state at a page boundary becomes a checkpoint
                         +-------------------+  at most two steps in flight: the next is launched before this
                                                one has landed

A checkpoint is made without a copy: the slot that holds the state at a page boundary goes to the index, the
next step reads it there and writes to another slot. What is committed has landed; what is released while its
steps are in flight comes back when the last of them has landed.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import StateId, WindowId
from tidemill.kvstore.memory import windows
from tidemill.kvstore.memory.allocation_sites import AllocationSite, never
from tidemill.kvstore.memory.arena import ArenaUsage
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.checkpoints import Checkpoints
from tidemill.kvstore.memory.lease import Lease, StepInFlight
from tidemill.kvstore.memory.prefix_index import Match

FLIGHTS_MAX = 2
CHECKPOINTS_PER_PATH = 16


class Ledger:
    """Leases over one cache, which gives up what it keeps when a lease needs memory."""

    def __init__(
        self,
        cache: Cache,
        checkpoints_per_path: int = CHECKPOINTS_PER_PATH,
        fail_allocation: Callable[[AllocationSite], bool] = never,
    ) -> None:
        """`refuses` is asked before each allocation, so that tests can make any of them fail."""
        self.layout = cache.layout
        self.index = cache.index
        self.counters = cache.counters
        self._cache = cache
        self._checkpoints = Checkpoints(cache, checkpoints_per_path, fail_allocation)
        self._fail_allocation = fail_allocation
        self._leases: dict[str, Lease] = {}
        self._landing: list[Lease] = []  # released, with steps in flight

    def open(self, request_id: str, *, spares_min: int = 0, runs: bool = True) -> Lease:
        assert request_id not in self._leases, f"{request_id} holds a lease already"
        lease = self._leases[request_id] = Lease(self.layout.page_tokens, spares_min, runs)
        return lease

    def rename(self, request_id: str, new_id: str) -> None:
        """What `request_id` holds is not its any more: a transfer that it does not wait for still uses it."""
        assert new_id not in self._leases
        self._leases[new_id] = self._leases.pop(request_id)

    def attach(self, lease: Lease, match: Match, num_pages: int) -> None:
        """Share the first `num_pages` pages of `match`; resume from the checkpoint at their end, if any."""
        assert not lease.allocated
        lease.shared_entries += match.path[:num_pages]
        for entry in lease.shared_entries:
            self._cache.pin(entry)
        lease.count_pages()
        lease.committed = lease.launched = num_pages * self.layout.page_tokens
        if lease.shared_entries and lease.shared_entries[-1].checkpoint is not None:
            lease.source = self._cache.pin_checkpoint(lease.shared_entries[-1])
            self._share_windows(lease, lease.shared_entries[-1].checkpoint.windows)

    def share(self, request_id: str, lease: Lease, num_pages: int) -> Lease:
        """A second lease on the first `num_pages` pages of `lease`, to read them after it has ended."""
        second = self.open(request_id)
        self.attach(second, Match(tuple(lease.shared_entries[:num_pages]), num_pages), num_pages)
        return second

    def reserve(
        self,
        lease: Lease,
        num_tokens: int,
        *,
        drafts: int = 0,
        pages_beside: int = 0,
        windows_beside: int = 0,
        windows_end: int | None = None,
    ) -> None:
        """Grow the lease to hold `num_tokens` and, for a hybrid, the slots that its next step writes: one, or
        one for each of `drafts` tokens more that may be rejected. All or nothing: OutOfMemory, also when
        `pages_beside` pages, and `windows_beside` window pages, could not be had after that. Window pages are
        taken up to `windows_end` tokens (None: all), the others come step by step.

        Before it fails, what the lease holds for its checkpoints is used to run (`_spared`), not for drafts.
        """
        assert not lease.ended, "memory for a request that has ended"
        slots = lease.slots_lacking(drafts) if self.layout.has_states and lease.runs else []
        views = windows.lacking(self.layout, lease, num_tokens if windows_end is None else windows_end)
        beside = pages_beside or windows_beside
        if not slots and not views and not beside and num_tokens <= lease.allocated:
            return
        pages = max(
            0,
            -(-num_tokens // self.layout.page_tokens) - len(lease.shared_entries) - len(lease.private_pages),
        )
        if any(
            map(
                self._fail_allocation,
                [*slots, *[AllocationSite.RUN_WINDOW] * views, *[AllocationSite.RUN_PAGE] * pages],
            )
        ):
            raise OutOfMemory("refused")
        if not self._cache.could_hold(pages + pages_beside, len(slots), views + windows_beside):
            if not pages_beside and not drafts and self._spared(lease):
                self.reserve(lease, num_tokens, windows_beside=windows_beside, windows_end=windows_end)
                return
            wanted = f"{pages} pages, {views} window pages and {len(slots)} states"
            raise OutOfMemory(f"{wanted} are more than all that is not held")
        self._grow(lease, pages, len(slots), views)

    def reserve_fetched(self, lease: Lease, num_pages: int) -> None:
        """Take the window pages that a checkpoint at the end of `num_pages` has and the lease lacks: a fetch
        fills them. Others are given back: the lease is of no use if the fetch fails. Raises OutOfMemory."""
        places = self.layout.last_window(num_pages)
        gone = windows.out_of_sight(self.layout, lease, num_pages * self.layout.page_tokens)
        self._cache.windows.unpin(gone)
        if not lease.windows:
            lease.first_window = places.start
        lacking = range(lease.windows_end, places.stop)
        if any(self._fail_allocation(AllocationSite.RUN_WINDOW) for _ in lacking):
            raise OutOfMemory("refused")
        self._grow(lease, 0, 0, len(lacking))
        lease.fetched_windows = lacking

    def launch(self, lease: Lease, end: int, *, keep: bool = False, drafts: int = 0) -> StepInFlight:
        """A step goes off that runs `[launched, end)`, the last `drafts` tokens of it on trial.

        `keep`: the state where it starts is wanted as a checkpoint (call `keep_state` when the step before
        has landed), so it is not overwritten if another slot can be had.
        """
        assert not lease.ended
        assert len(lease.flights) < FLIGHTS_MAX
        start = lease.launched
        assert start < end - drafts <= end <= lease.allocated
        assert not windows.lacking(self.layout, lease, end)
        flight = StepInFlight(start, end, None, (), lease.source)
        lease.source = None
        if self.layout.has_states:
            if flight.source is not None and flight.source.checkpoint is not None:
                flight.reads = flight.source.checkpoint.state
            elif start:
                flight.reads = lease.states[start]
            if lease.writes_in_place(drafts) and not (keep and self._checkpoints.borrow(lease)):
                flight.writes = (lease.states.pop(start),)
            else:
                flight.writes = tuple(lease.spare_slots.pop() for _ in range(drafts + 1))
            lease.states |= zip(range(end - drafts, end + 1), flight.writes, strict=True)
        lease.flights.append(flight)
        lease.launched = end
        return flight

    def commit(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """The oldest step in flight has completed, and `[0, num_tokens)` is written and accepted. If that is
        less than it ran, the steps after it are void; if it is where it started, nothing of it counts, and a
        state that it overwrote is lost: such a lease can only be released.

        Pages that became full go to the index; where it holds that page already, the lease shares it and its
        own is freed. For a request that has ended nothing is committed.
        """
        flight = lease.flights.popleft()
        if flight.source is not None:
            self._cache.unpin_checkpoint(flight.source)
        for slot in flight.deferred_free:
            self._cache.free_state(slot)
        for page in flight.deferred_free_pages:
            self._cache.free_page(page)
        if not flight.void and not lease.ended:
            assert flight.start <= num_tokens <= flight.end
            rejected = self._reject(lease, num_tokens) if num_tokens < flight.end else []
            self._commit(lease, num_tokens, keys)
            self._cache.windows.unpin(windows.out_of_sight(self.layout, lease, num_tokens))
            for slot in rejected:
                self._checkpoints.return_slot(lease, slot)
        if lease.ended and not lease.flights:
            self._landing.remove(lease)
            self._free(lease)

    def adopt(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """Pages up to `num_tokens` and what `reserve_fetched` and `fetch_slot` gave for the checkpoint there
        were fetched: keep them as if computed. A lease that does not run has pages alone."""
        assert not lease.flights
        if lease.source is not None:
            self._cache.unpin_checkpoint(lease.source)
            lease.source = None
        if self.layout.has_states and lease.runs:
            slot = lease.spare_slots.pop() if lease.spare_slots else lease.states.pop(lease.committed)
            lease.states[num_tokens] = slot
        self._commit(lease, num_tokens, keys)
        if lease.runs:
            self.keep_state(lease)

    def keep_state(self, lease: Lease, *, last: bool = False) -> bool:
        """`Checkpoints.keep`: what is at `committed`, a page boundary, becomes the checkpoint there."""
        return self._checkpoints.keep(lease, last=last)

    def roll_checkpoint(self, lease: Lease) -> bool:
        """`Checkpoints.roll`: ... in place of the one that it kept before while decoding."""
        return self._checkpoints.roll(lease)

    def release(self, request_id: str) -> None:
        """The only way memory comes back, whatever ended the request."""
        lease = self._leases.pop(request_id)
        lease.ended = True
        if lease.flights:
            self._landing.append(lease)
        else:
            self._free(lease)

    def resize(self, budget_extents: int) -> bool:
        """Change what the arena may map; evicts what is kept, and answers whether that was enough. If not,
        preempt and call again."""
        return self._cache.resize(budget_extents)

    def usage(self) -> ArenaUsage:
        return self._cache.arena.usage()

    @property
    def budget_extents(self) -> int:
        return self._cache.arena.budget_extents

    @property
    def num_extents(self) -> int:
        """The most that the budget can be."""
        return self._cache.arena.num_extents

    @property
    def excess(self) -> int:
        """Extents that are mapped above the budget."""
        return self._cache.arena.excess

    @property
    def num_slots(self) -> int:
        """States held for requests, shared ones left out; 1, 2 or 3 for each at rest, by strategy."""
        return sum(lease.num_slots for lease in self._leases.values())

    @property
    def num_leases(self) -> int:
        return len(self._leases) + len(self._landing)

    def check(self) -> None:
        """Prove that every byte has exactly one owner, and that every pin has a reason."""
        leases = [*self._leases.values(), *self._landing]
        pins = Counter(entry for lease in leases for entry in lease.shared_entries)
        reading = Counter(entry for lease in leases for entry in lease.sources())
        for entry in self.index:
            found = (entry.pins, entry.checkpoint_pins)
            assert found == (pins[entry], reading[entry]), "a pin without a reason"
        self._cache.check(
            [page for lease in leases for page in lease.own_pages()],
            [state for lease in leases for state in lease.own_states()],
            [window for lease in leases for window in lease.windows],
        )
        for lease in leases:
            lease.check()
            assert lease.ended == (lease in self._landing)

    def _share_windows(self, lease: Lease, shared: Sequence[WindowId]) -> None:
        if shared:
            self._cache.windows.pin(shared)
            lease.windows += shared
            lease.first_window = len(lease.shared_entries) - len(shared)
            lease.count_windows()

    def _commit(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        lease.committed = num_tokens
        lease.launched = max(lease.launched, num_tokens)
        while (len(lease.shared_entries) + 1) * self.layout.page_tokens <= num_tokens:
            parent = lease.shared_entries[-1] if lease.shared_entries else None
            page = lease.private_pages.pop(0)
            entry, taken_over = self._cache.insert(parent, keys[len(lease.shared_entries)], page)
            lease.shared_entries.append(entry)
            if not taken_over:
                lease.count_pages()
                if lease.flights:
                    lease.flights[-1].deferred_free_pages.append(page)
                else:
                    self._cache.free_page(page)
        for depth in [depth for depth in lease.states if depth < num_tokens]:
            self._checkpoints.return_slot(lease, lease.states.pop(depth))

    def _reject(self, lease: Lease, landed: int) -> list[StateId]:
        """Of the step that has just landed, the tokens from `landed` on do not count, nor do the steps after
        it. Answers the states there, unless those still use them: then they come back when they have landed.
        """
        slots = [lease.states.pop(depth) for depth in list(lease.states) if depth > landed]
        lease.launched = landed
        for flight in lease.flights:
            flight.void = True
        if not lease.flights:
            return slots
        lease.flights[-1].deferred_free = tuple(slots)
        return []

    def _spared(self, lease: Lease) -> bool:
        """Checkpoints are optional: take back what the lease holds for them, and say whether it had any. If
        nobody else reads the checkpoint that its next step reads, that step can as well overwrite it; and
        the second slot of `double` can be borrowed when it is needed, as with `lazy`."""
        source = lease.source
        if source is not None and source.checkpoint_pins == 1 and self.layout.has_states:
            lease.source = None
            if lease.rolling is source:
                lease.rolling = None
            self._cache.unpin_checkpoint(source)
            slot = self._cache.reclaim_checkpoint(source)
            assert slot is not None
            lease.states[lease.committed] = slot
            self.counters["evicted_checkpoints_for_run"] += 1
        elif not lease.spare_slots_min:
            return False
        lease.spare_slots_min = 0
        while lease.spare_slots:
            self._cache.free_state(lease.spare_slots.pop())
        return True

    def _grow(self, lease: Lease, pages: int, slots: int, views: int) -> None:
        try:
            self._take(lease, pages, slots, views)
        except OutOfMemory:
            self._cache.clear()  # the states took extents that the pages need, and there was a slot elsewhere
            self._take(lease, pages, slots, views)

    def _take(self, lease: Lease, pages: int, slots: int, views: int) -> None:
        """All or nothing. States and windows first: they may need an extent, pages fit between pages."""
        num_own, num_spare, num_windows = len(lease.private_pages), len(lease.spare_slots), len(lease.windows)
        try:
            lease.spare_slots.extend(self._cache.take_state() for _ in range(slots))
            lease.windows.extend(self._cache.take_window() for _ in range(views))
            lease.private_pages.extend(self._cache.take_page() for _ in range(pages))
        except OutOfMemory:
            self._free_pages(lease, num_own)
            while len(lease.spare_slots) > num_spare:
                self._cache.free_state(lease.spare_slots.pop())
            self._cache.windows.unpin(lease.windows[num_windows:])
            del lease.windows[num_windows:]
            raise
        if pages:
            lease.count_pages()
        if views:
            lease.count_windows()

    def _free(self, lease: Lease) -> None:
        if lease.source is not None:
            self._cache.unpin_checkpoint(lease.source)
            lease.source = None
        for slot in [*lease.states.values(), *lease.spare_slots]:
            self._cache.free_state(slot)
        lease.states.clear()
        lease.spare_slots.clear()
        self._cache.windows.unpin(lease.windows)
        lease.windows.clear()
        while lease.shared_entries:
            self._cache.unpin(lease.shared_entries.pop())
        self._free_pages(lease, 0)

    def _free_pages(self, lease: Lease, num_kept: int) -> None:
        while len(lease.private_pages) > num_kept:
            self._cache.free_page(lease.private_pages.pop())
        lease.count_pages()
