"""Who owns which byte of the arena: the free extents, one lease, or the prefix index. Nobody else allocates.

A lease is what one request holds, in tokens:

    |<-- entries: full pages, shared, pinned in the index -->|<-- own: being written, or reserved -->|
    0                                     len(entries) * P <= committed                      allocated
                                                            [0, committed) is written

    state     the slot that the next step writes, or None until that step is reserved
    source    the pinned entry whose checkpoint the next step reads, or None: it reads `state`, or starts
    empty

A checkpoint is made without a copy: the slot that holds the state at a page boundary goes to the index, the
next step reads it there and writes to a fresh slot.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.arena import Arena, Usage
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.index import Entry, Match, PrefixIndex
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId


@dataclass(slots=True, eq=False)
class Lease:
    """What one request holds. Only the ledger changes it."""

    entries: list[Entry] = field(default_factory=list[Entry])
    own: list[PageId] = field(default_factory=list[PageId])
    committed: int = 0
    state: StateId | None = None
    source: Entry | None = None
    rolling: Entry | None = None  # the last checkpoint made while decoding: the next one replaces it

    def pages(self) -> list[PageId]:
        """The page table, left to right."""
        return [*(entry.page for entry in self.entries), *self.own]

    @property
    def read_state(self) -> StateId | None:
        """Where the next step reads the state at `committed`; None is the empty state."""
        if self.source is not None:
            return self.source.checkpoint
        return self.state if self.committed else None


class Ledger:
    """Leases over one arena and one index. Memory of the index is taken back when a lease needs it."""

    def __init__(self, layout: Layout, arena: Arena) -> None:
        self.layout = layout
        self.index = PrefixIndex(hybrid=layout.hybrid)
        self.counters: Counter[str] = Counter()
        self._arena = arena
        self._leases: dict[str, Lease] = {}

    def open(self, request_id: str) -> Lease:
        assert request_id not in self._leases, f"{request_id} holds a lease already"
        lease = self._leases[request_id] = Lease()
        return lease

    def attach(self, lease: Lease, match: Match, num_pages: int) -> None:
        """Share the first `num_pages` pages of `match`; resume from the checkpoint at their end, if any."""
        assert not lease.entries
        assert not lease.own
        for entry in match.path[:num_pages]:
            self.index.pin(entry)
            lease.entries.append(entry)
        lease.committed = num_pages * self.layout.page_tokens
        self._resume_at_end(lease)

    def share(self, request_id: str, lease: Lease, num_pages: int) -> Lease:
        """A second lease on the first `num_pages` pages of `lease`, to read them after it has ended."""
        second = self.open(request_id)
        self.attach(second, Match(tuple(lease.entries[:num_pages]), num_pages), num_pages)
        return second

    def reserve(self, lease: Lease, num_tokens: int) -> None:
        """Grow the lease to hold `num_tokens` and, for a hybrid, a slot to write. All or nothing:
        OutOfMemory."""
        try:
            self._grow(lease, num_tokens)
        except OutOfMemory:
            self._grow(lease, num_tokens)  # what was evicted on the way may have left whole extents

    def commit(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """`[0, num_tokens)` is written, by a step that has completed. Pages that became full go to the index;
        where it holds that page already, the lease shares it and its own is freed."""
        size = self.layout.page_tokens
        assert lease.committed <= num_tokens <= (len(lease.entries) + len(lease.own)) * size
        lease.committed = num_tokens
        if lease.source is not None:
            self.index.unpin_checkpoint(lease.source)
            lease.source = None
        while (len(lease.entries) + 1) * size <= num_tokens:
            parent = lease.entries[-1] if lease.entries else None
            page = lease.own.pop(0)
            entry, taken_over = self.index.insert(parent, keys[len(lease.entries)], page)
            lease.entries.append(entry)
            if not taken_over:
                self._arena.give_page(page)

    def adopt(self, lease: Lease, num_tokens: int, keys: Sequence[PageKey]) -> None:
        """Pages up to `num_tokens` and the state there were fetched: keep them as if computed."""
        self.commit(lease, num_tokens, keys)
        self.keep_state(lease)

    def keep_state(self, lease: Lease, *, last: bool = False) -> None:
        """The state at `committed`, a page boundary, becomes the checkpoint there. The next step reads it
        there and writes to a fresh slot; with `last` there is no next step.

        Cache memory is optional: when no second slot is free, the lease keeps its state to itself.
        """
        entry = self._boundary(lease)
        if not self.layout.hybrid:
            return
        if entry.checkpoint is None:
            assert lease.state is not None
            try:
                fresh = None if last else self._take_state()
            except OutOfMemory:
                self.counters["checkpoints_skipped"] += 1
                return
            self.index.keep_checkpoint(entry, lease.state)
            lease.state = fresh
        self._resume_at_end(lease)

    def roll_checkpoint(self, lease: Lease) -> None:
        """Keep the state at `committed`, a page boundary reached while decoding, in place of the one kept
        before. When no second slot is free the earlier one stays, and the next boundary tries again."""
        entry = self._boundary(lease)
        if not self.layout.hybrid or entry.checkpoint is not None:
            return
        self.keep_state(lease)
        if entry.checkpoint is None:
            return
        earlier, lease.rolling = lease.rolling, entry
        if earlier is not None and earlier.checkpoint is not None and not earlier.checkpoint_pins:
            self._arena.give_state(self.index.drop_checkpoint(earlier))

    def release(self, request_id: str) -> None:
        """The only way memory comes back, whatever ended the request."""
        lease = self._leases.pop(request_id)
        self._let_go(lease)
        while lease.entries:
            self.index.unpin(lease.entries.pop())

    def forget(self) -> None:
        """Give up everything that is kept, which nobody uses: pages that lie scattered over all extents leave
        none for a state."""
        assert not self._leases
        assert len(self.index), "the memory is empty, and still too small for a request that was let in"
        while self._evict_leaf():
            pass

    def live_bytes(self) -> int:
        """Bytes that running requests hold, alone or shared."""
        pages = {page for lease in self._leases.values() for page in lease.pages()}
        states = {state for lease in self._leases.values() for state in (lease.state, lease.read_state)} - {
            None
        }
        return len(pages) * self.layout.page_bytes + len(states) * self.layout.state_stride_bytes

    def usage(self) -> Usage:
        return self._arena.usage()

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check(self) -> None:
        """Prove that every byte has exactly one owner, and that every pin has a reason."""
        entries = list(self.index)
        leases = list(self._leases.values())
        self._arena.check(
            [*(entry.page for entry in entries), *(page for lease in leases for page in lease.own)],
            [
                *(entry.checkpoint for entry in entries if entry.checkpoint is not None),
                *(lease.state for lease in leases if lease.state is not None),
            ],
        )
        self.index.check()
        pins = Counter(entry.key for lease in leases for entry in lease.entries)
        checkpoint_pins = Counter(lease.source.key for lease in leases if lease.source is not None)
        for entry in entries:
            assert entry.pins >= pins[entry.key]
            assert entry.checkpoint_pins >= checkpoint_pins[entry.key]
            if not leases:
                assert entry.pins == 0, "a pin outlived its lease"
                assert entry.checkpoint_pins == 0, "a checkpoint pin outlived its lease"
        for lease in leases:
            assert len(lease.entries) == lease.committed // self.layout.page_tokens
            assert lease.committed <= (len(lease.entries) + len(lease.own)) * self.layout.page_tokens
            assert lease.source is None or lease.source is lease.entries[-1]

    def _grow(self, lease: Lease, num_tokens: int) -> None:
        """The state first: pages fit between other pages, a state may need an extent."""
        wanted = -(-num_tokens // self.layout.page_tokens) - len(lease.entries) - len(lease.own)
        before, state = len(lease.own), lease.state
        try:
            if self.layout.hybrid and state is None:
                lease.state = self._take_state()
            lease.own.extend(self._take_page() for _ in range(wanted))
        except OutOfMemory:
            while len(lease.own) > before:
                self._arena.give_page(lease.own.pop())
            if lease.state is not None and state is None:
                self._arena.give_state(lease.state)
                lease.state = None
            raise

    def _boundary(self, lease: Lease) -> Entry:
        assert lease.committed % self.layout.page_tokens == 0
        assert lease.committed > 0
        return lease.entries[-1]

    def _resume_at_end(self, lease: Lease) -> None:
        """Read from the checkpoint at the end of the shared pages next, where there is one."""
        assert lease.source is None
        if lease.entries and lease.entries[-1].checkpoint is not None:
            lease.source = lease.entries[-1]
            self.index.pin_checkpoint(lease.source)

    def _let_go(self, lease: Lease) -> None:
        if lease.source is not None:
            self.index.unpin_checkpoint(lease.source)
            lease.source = None
        if lease.state is not None:
            self._arena.give_state(lease.state)
            lease.state = None
        while lease.own:
            self._arena.give_page(lease.own.pop())

    def _take_page(self) -> PageId:
        while True:
            try:
                return self._arena.take_page()
            except OutOfMemory:
                if not self._evict_leaf() and not self._evict_checkpoint():
                    raise

    def _take_state(self) -> StateId:
        while True:
            try:
                return self._arena.take_state()
            except OutOfMemory:
                if not self._evict_checkpoint() and not self._evict_leaf():
                    raise

    def _evict_checkpoint(self) -> bool:
        state = self.index.evict_checkpoint()
        if state is None:
            return False
        self.counters["checkpoints_evicted"] += 1
        self._arena.give_state(state)
        return True

    def _evict_leaf(self) -> bool:
        entry = self.index.evict_leaf()
        if entry is None:
            return False
        self.counters["pages_evicted"] += 1
        self._arena.give_page(entry.page)
        if entry.checkpoint is not None:
            self.counters["checkpoints_evicted"] += 1
            self._arena.give_state(entry.checkpoint)
        return True
