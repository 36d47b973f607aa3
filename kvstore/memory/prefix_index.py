"""The prefix index: the pages and checkpoints kept for reuse, found by a walk along chained keys.

    key of [0, P)      key of [0, 2P)     key of [0, 3P)         restorable depth of a hybrid model:
    page 7, no ckpt <- page 2, ckpt 31 <- page 9, no ckpt        2P along this branch.
                                     ^--- page 4, ckpt 12        3P along this one.

A checkpoint belongs to the entry of the last page before it: a state, or the last window pages, or
both, added and dropped together. An entry outlives its children, so a match has every page before
it. A lease pins its whole path, and pinned entries are never removed. `eviction.py` chooses among
the others.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import Layout, PageId
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost

STALE_RECORDS_MAX = 256

RETAINED_USES = 8
"""The number of uses that a fresh credit of a client counts for. What is used more often needs none."""


ChangeKind = Literal["stored", "kept", "dropped", "removed"]
"""A page was stored, a checkpoint kept, a checkpoint dropped, or a page removed."""


@dataclass(frozen=True, slots=True)
class Match:
    """The cached entries of a prompt, left to right, and the deepest restorable depth in pages."""

    path: tuple[Entry, ...]
    restorable_pages: int


@dataclass(slots=True)
class IndexChanges:
    """The restorable depths that were added and removed, by key; the last change counts."""

    added: set[PageKey] = field(default_factory=set[PageKey])
    removed: set[PageKey] = field(default_factory=set[PageKey])

    def add(self, key: PageKey) -> None:
        self.removed.discard(key)
        self.added.add(key)

    def remove(self, key: PageKey) -> None:
        self.added.discard(key)
        self.removed.add(key)


class PrefixIndex:
    """Owns the pages and checkpoints of its entries until the caller removes them.

    The score decides the eviction order; the least goes first:

    lru     the serial number of the last use
    value   clock at the last use + uses * (FLOPs that a hit saves) / (bytes that eviction frees).
            Each eviction advances the clock by its loss per freed byte.

    Recency and FLOP efficiency are the two terms of Marconi (Pan et al., MLSys 2025). Aging by a
    clock is from GreedyDual (Young, 1994), counting uses from GDSF (Cherkasova, 1998). Together
    they need neither a weight between the terms nor a pass over all entries.

    A credit that a client asked for (`retention.py`) adds RETAINED_USES uses, which fade to nothing until its
    end. A record in a heap does not fade; when the credit ends, `add_candidate` adds a right one.
    """

    def __init__(self, layout: Layout, policy: Policy = "value", cost: RecomputeCost | None = None) -> None:
        self.policy = policy
        self._layout = layout
        self.cost = cost or RecomputeCost()
        self._entries: dict[PageKey, Entry] = {}
        self._uses = 0
        self._clock = 0.0
        self.now_s = 0.0
        # Heaps of eviction candidates; a stale record is renewed when it reaches the top.
        self._leaves: list[tuple[bool, tuple[float, int], PageKey]] = []
        self._checkpoints: list[tuple[tuple[float, int], PageKey]] = []
        self._changes = IndexChanges()
        self.log: list[tuple[ChangeKind, Entry]] | None = None  # all changes in order, if it is a list

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def match(self, keys: Sequence[PageKey]) -> Match:
        """Return the longest path along `keys`, with its restorable depth. Changes nothing."""
        path: list[Entry] = []
        restorable = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            path.append(entry)
            if self.is_restorable(entry):
                restorable = len(path)
        return Match(tuple(path), restorable)

    def use(self, path: Sequence[Entry]) -> None:
        """Count a hit of a request that resumes at the end of `path`. In a hybrid model only the checkpoint
        at the end counts as used, not those above it."""
        self._uses += 1
        for entry in path:
            entry.last_use = self._uses
        for entry in path[-1:] if self._layout.hybrid else path:
            entry.uses += 1
            self._score(entry)

    def insert(self, parent: Entry | None, key: PageKey, page: PageId) -> tuple[Entry, bool]:
        """Pin the entry of `key`, or insert `page` as one; return it and whether it took `page`.

        The first page under a key stays. If the entry did not take `page`, the caller still owns
        it.
        """
        entry = self._entries.get(key)
        if entry is not None:
            assert entry.parent is parent
            entry.pins += 1
            return entry, False
        self._uses += 1
        depth_pages = 1 if parent is None else parent.depth_pages + 1
        entry = Entry(key, parent, depth_pages, page, pins=1, last_use=self._uses, clock=self._clock)
        self._entries[key] = entry
        if parent is not None:
            entry.child_index = len(parent.children)
            parent.children.append(entry)
        if self.log is not None:
            self.log.append(("stored", entry))
        if not self._layout.hybrid:
            self._appraise(entry, depth_pages - 1, self._layout.page_bytes)
            self._changes.add(key)
        return entry, True

    def keep_checkpoint(
        self, entry: Entry, checkpoint: Checkpoint, *, spare: bool = False, credit: float = 0.0
    ) -> None:
        """Give `checkpoint` to `entry`, which has none.

        Until a request resumes at a spare one it has the credit that is given, and the checkpoints below it
        are valued as if it were not there.
        """
        assert entry.checkpoint is None
        if not spare:
            entry.uses = max(1, entry.uses)
        elif not entry.freed_bytes:  # it never had a checkpoint
            entry.uses = 0
        above = next((above for above in self.checkpoints_above(entry) if above.uses), None)
        above_pages = 0 if above is None else above.depth_pages
        entry.checkpoint = checkpoint
        segment_bytes = (entry.depth_pages - above_pages) * self._layout.page_bytes
        self._appraise(entry, above_pages, segment_bytes + checkpoint.num_bytes(self._layout))
        if credit and not entry.uses:
            entry.score = (self._clock + credit, self._uses)
        self._changes.add(entry.key)
        if self.log is not None:
            self.log.append(("kept", entry))
        self.add_candidate(entry)

    def drop_checkpoint(self, entry: Entry) -> Checkpoint:
        """Remove the checkpoint of `entry` and return it; the caller owns it."""
        assert entry.checkpoint is not None
        assert entry.checkpoint_pins == 0
        checkpoint = entry.checkpoint
        entry.checkpoint = None
        if self.log is not None:
            self.log.append(("dropped", entry))
        self._changes.remove(entry.key)
        self.add_candidate(entry)
        return checkpoint

    def remove(self, entry: Entry) -> None:
        """Remove an entry without children and pins; the caller owns its page and checkpoint."""
        assert self._is_leaf(entry)
        del self._entries[entry.key]
        if self.is_restorable(entry):
            self._changes.remove(entry.key)
        if self.log is not None:
            kinds: list[ChangeKind] = ["removed"] if entry.checkpoint is None else ["dropped", "removed"]
            self.log.extend((kind, entry) for kind in kinds)
        if entry.parent is not None:
            siblings = entry.parent.children
            last = siblings.pop()
            if last is not entry:
                siblings[entry.child_index] = last
                last.child_index = entry.child_index
            self.add_candidate(entry.parent)

    def pin(self, entry: Entry) -> None:
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        entry.pins -= 1
        self.add_candidate(entry)

    def pin_checkpoint(self, entry: Entry) -> None:
        assert entry.checkpoint is not None
        entry.checkpoint_pins += 1

    def unpin_checkpoint(self, entry: Entry) -> None:
        assert entry.checkpoint_pins > 0
        entry.checkpoint_pins -= 1
        self.add_candidate(entry)

    def cheapest_leaf(self) -> Entry | None:
        """Return the least valuable entry without children and pins; unrestorable ones first."""
        while self._leaves:
            restorable, score, key = self._leaves[0]
            entry = self._entries.get(key)
            if entry is not None and self._is_leaf(entry):
                if (restorable, score) == self._leaf_rank(entry):
                    return entry
                heapq.heapreplace(self._leaves, (*self._leaf_rank(entry), key))
            else:
                heapq.heappop(self._leaves)
        return None

    def cheapest_leaves(self, count: int) -> list[Entry]:
        """Return up to `count` entries in the order of `cheapest_leaf`."""
        found: list[Entry] = []
        while len(found) < count and (entry := self.cheapest_leaf()) is not None:
            heapq.heappop(self._leaves)
            if entry not in found:  # an entry may have several records
                found.append(entry)
        for entry in found:
            heapq.heappush(self._leaves, (*self._leaf_rank(entry), entry.key))
        return found

    def cheapest_checkpoint(self) -> Entry | None:
        """Return the entry with the least valuable unpinned checkpoint."""
        while self._checkpoints:
            score, key = self._checkpoints[0]
            entry = self._entries.get(key)
            if entry is not None and entry.checkpoint is not None and not entry.checkpoint_pins:
                if score == self.rank(entry):
                    return entry
                heapq.heapreplace(self._checkpoints, (self.rank(entry), key))
            else:
                heapq.heappop(self._checkpoints)
        return None

    def checkpoints_above(self, entry: Entry) -> Iterator[Entry]:
        """Yield the entries with a checkpoint on the path to `entry`, the nearest first."""
        above = entry.parent
        while above is not None:
            if above.checkpoint is not None:
                yield above
            above = above.parent

    def credit(self, entry: Entry) -> float:
        """Return the loss per byte freed by evicting `entry`: its value minus the clock."""
        return max(0.0, self.rank(entry)[0] - self._clock)

    def rank(self, entry: Entry) -> tuple[float, int]:
        """Return the score of `entry` with what is left of the credit that a client asked for."""
        left_s = entry.retained_until_s - self.now_s
        if left_s <= 0 or not entry.uses:
            return entry.score
        value, last_use = entry.score
        use_value = self._uses - self._clock if self.policy == "lru" else self._value_of_use(entry)
        return max(value, self._clock) + RETAINED_USES * use_value * left_s / entry.retained_s, last_use

    @property
    def clock(self) -> float:
        """The sum of the prices of all evictions: what a byte has cost so far."""
        return self._clock

    def age(self, credit: float) -> None:
        """Advance the clock after the eviction of an entry with this credit."""
        self._clock += credit

    def take_changes(self) -> IndexChanges:
        """Return the changes since the last call."""
        changes, self._changes = self._changes, IndexChanges()
        return changes

    def restorable_keys(self) -> list[PageKey]:
        return [entry.key for entry in self._entries.values() if self.is_restorable(entry)]

    def is_restorable(self, entry: Entry) -> bool:
        return entry.checkpoint is not None or not self._layout.hybrid

    def check(self) -> None:
        """Prove that entries, pins and eviction candidates are consistent."""
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.pins >= 0
            assert entry.checkpoint is not None or entry.checkpoint_pins == 0
            if entry.parent is None:
                assert entry.depth_pages == 1
            else:
                assert self._entries.get(entry.parent.key) is entry.parent, "an entry has lost its parent"
                assert entry.depth_pages == entry.parent.depth_pages + 1
                assert entry.pins == 0 or entry.parent.pins > 0, "an entry is pinned below an unpinned one"
                assert entry.parent.children[entry.child_index] is entry
            for child in entry.children:
                assert child.parent is entry
                assert self._entries.get(child.key) is child
        leaves = {key for _, _, key in self._leaves}
        checkpoints = {key for _, key in self._checkpoints}
        for key, entry in self._entries.items():
            assert key in leaves or not self._is_leaf(entry), "an evictable entry would never be found"
            evictable = entry.checkpoint is not None and not entry.checkpoint_pins
            assert key in checkpoints or not evictable, "an evictable checkpoint would never be found"

    def _is_leaf(self, entry: Entry) -> bool:
        return not (entry.children or entry.pins or entry.checkpoint_pins)

    def _leaf_rank(self, entry: Entry) -> tuple[bool, tuple[float, int]]:
        return (True, self.rank(entry)) if self.is_restorable(entry) else (False, (0.0, entry.last_use))

    def _appraise(self, entry: Entry, above_pages: int, freed_bytes: int) -> None:
        """Set the value of `entry`: it saves the pages `[above_pages, depth_pages)`."""
        size = self._layout.page_tokens
        entry.saved_flops = self.cost.flops(above_pages * size, entry.depth_pages * size)
        entry.freed_bytes = freed_bytes
        self._uses += 1
        self._score(entry)

    def _value_of_use(self, entry: Entry) -> float:
        return entry.saved_flops / entry.freed_bytes if entry.freed_bytes else 0.0

    def _score(self, entry: Entry) -> None:
        if not entry.uses:
            value = 0.0
        elif self.policy == "lru":
            value = float(self._uses)
        elif entry.freed_bytes:
            value = self._clock + entry.uses * entry.saved_flops / entry.freed_bytes
        else:  # the entry never had a checkpoint
            value = 0.0
        entry.score = (value, self._uses)

    def add_candidate(self, entry: Entry) -> None:
        """Add `entry` to the eviction candidates; rebuild the heaps when most records are stale."""
        if self._is_leaf(entry):
            heapq.heappush(self._leaves, (*self._leaf_rank(entry), entry.key))
        if entry.checkpoint is not None and not entry.checkpoint_pins:
            heapq.heappush(self._checkpoints, (self.rank(entry), entry.key))
        if len(self._leaves) + len(self._checkpoints) > 4 * len(self._entries) + STALE_RECORDS_MAX:
            entries = self._entries.values()
            self._leaves = [(*self._leaf_rank(entry), entry.key) for entry in entries if self._is_leaf(entry)]
            self._checkpoints = [
                (self.rank(entry), entry.key)
                for entry in entries
                if entry.checkpoint is not None and not entry.checkpoint_pins
            ]
            heapq.heapify(self._leaves)
            heapq.heapify(self._checkpoints)
