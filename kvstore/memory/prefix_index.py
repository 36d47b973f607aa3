"""The prefix index: which pages and checkpoints are kept for reuse, found by a walk along chained keys.

    key of [0, P)      key of [0, 2P)     key of [0, 3P)
    page 7, no ckpt <- page 2, ckpt 31 <- page 9, no ckpt        restorable depth of a hybrid here: 2P
                                     ^--- page 4, ckpt 12        ... and 3P along this branch

A checkpoint belongs to the entry at whose end it was taken: a state, or the last window pages, or both, that
come and go as one. An entry outlives its children, so a page that is
found has every page before it. A lease pins its whole path; what is pinned is never removed. Which of the
rest goes first is up to `eviction.py`.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import Layout, PageId, StateId, WindowId
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost

STALE_RECORDS_MAX = 256


class Checkpoint(NamedTuple):
    """What a depth needs besides its pages: the state, if the model has states, and the last window, left to
    right, if it has windows."""

    state: StateId | None
    windows: tuple[WindowId, ...] = ()


@dataclass(slots=True, eq=False)
class Entry:
    """One full page that is kept. `depth_pages` counts the pages of the path, this one included.

    `score`, `saved_flops` and `freed_bytes` are those of its checkpoint or, in a model without states, of the
    page: when it goes, what it spares, and how much memory comes free with it.
    """

    key: PageKey
    parent: "Entry | None"
    depth_pages: int
    page: PageId
    checkpoint: Checkpoint | None = None
    pins: int = 0
    checkpoint_pins: int = 0
    children: list["Entry"] = field(default_factory=list["Entry"])
    place: int = 0  # among the children of its parent
    last_use: int = 0
    uses: int = 1
    score: tuple[float, int] = (0.0, 0)  # ties go to the one that was used longer ago
    saved_flops: float = 0.0
    freed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The kept pages of a prompt, left to right, and how many of them end at a restorable depth."""

    path: tuple[Entry, ...]
    restorable_pages: int


@dataclass(slots=True)
class IndexChanges:
    """Restorable depths that came and went, by key; the last word on a key wins."""

    added: set[PageKey] = field(default_factory=set[PageKey])
    removed: set[PageKey] = field(default_factory=set[PageKey])

    def add(self, key: PageKey) -> None:
        self.removed.discard(key)
        self.added.add(key)

    def remove(self, key: PageKey) -> None:
        self.added.discard(key)
        self.removed.add(key)


class PrefixIndex:
    """Owns the pages and checkpoints of its entries until the caller takes them back.

    Scores, the least goes first:
        lru     the number of the last use
        value   the clock at the last use, plus the FLOPs that a hit saves per byte that eviction frees, for
                each use so far; the clock is the score of what was evicted last. Recency and FLOP efficiency
                are the two terms of Marconi (Pan et al., MLSys 2025); aging by a clock is GreedyDual (Young,
                1994), counting the uses GDSF (Cherkasova, 1998). Together they need neither a weight between
                the terms nor a pass over all entries.
    """

    def __init__(self, layout: Layout, policy: Policy = "value", cost: RecomputeCost | None = None) -> None:
        self.policy = policy
        self._layout = layout
        self._cost = cost or RecomputeCost()
        self._entries: dict[PageKey, Entry] = {}
        self._by_page: dict[PageId, Entry] = {}
        self._by_state: dict[StateId, Entry] = {}
        self._by_window: dict[WindowId, dict[Entry, None]] = {}  # checkpoints share window pages
        self._uses = 0
        self._clock = 0.0
        # Candidates for eviction, least worth first; a stale record is dropped or renewed when it surfaces.
        self._leaves: list[tuple[bool, tuple[float, int], PageKey]] = []
        self._checkpoints: list[tuple[tuple[float, int], PageKey]] = []
        self._changes = IndexChanges()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def match(self, keys: Sequence[PageKey]) -> Match:
        """The longest kept path along `keys`, and its deepest restorable depth. Changes nothing."""
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
        """A request resumes at the end of `path`. A checkpoint above the end was not of use to it."""
        self._uses += 1
        for entry in path:
            entry.last_use = self._uses
        for entry in path[-1:] if self._layout.hybrid else path:
            entry.uses += 1
            self._score(entry)

    def insert(self, parent: Entry | None, key: PageKey, page: PageId) -> tuple[Entry, bool]:
        """Keep `page` under `key`, pinned once. The first page under a key stays: the second value says
        whether this one was taken over; if not, the entry found is pinned and the caller still owns
        `page`."""
        entry = self._entries.get(key)
        if entry is not None:
            assert entry.parent is parent
            entry.pins += 1
            return entry, False
        self._uses += 1
        depth_pages = 1 if parent is None else parent.depth_pages + 1
        entry = Entry(key, parent, depth_pages, page, pins=1, last_use=self._uses)
        self._entries[key] = entry
        self._by_page[page] = entry
        if parent is not None:
            entry.place = len(parent.children)
            parent.children.append(entry)
        if not self._layout.hybrid:
            self._appraise(entry, depth_pages - 1, self._layout.page_bytes)
            self._changes.add(key)
        return entry, True

    def keep_checkpoint(self, entry: Entry, checkpoint: Checkpoint) -> None:
        """Take over the `checkpoint` of `entry`, which has none."""
        assert entry.checkpoint is None
        above = next(self.checkpoints_above(entry), None)
        above_pages = 0 if above is None else above.depth_pages
        entry.checkpoint = checkpoint
        if checkpoint.state is not None:
            self._by_state[checkpoint.state] = entry
        for window in checkpoint.windows:
            self._by_window.setdefault(window, {})[entry] = None
        segment_bytes = (entry.depth_pages - above_pages) * self._layout.page_bytes
        own_bytes = self._layout.state_stride_bytes + len(checkpoint.windows) * self._layout.window_bytes
        self._appraise(entry, above_pages, segment_bytes + own_bytes)
        self._changes.add(entry.key)
        self._offer(entry)

    def drop_checkpoint(self, entry: Entry) -> Checkpoint:
        """Give up the checkpoint of `entry`; the caller owns it."""
        assert entry.checkpoint is not None
        assert entry.checkpoint_pins == 0
        checkpoint = entry.checkpoint
        self._forget_checkpoint(entry)
        entry.checkpoint = None
        self._changes.remove(entry.key)
        self._offer(entry)
        return checkpoint

    def remove(self, entry: Entry) -> None:
        """Forget an entry that has no children and no pins; the caller owns its page and its checkpoint."""
        assert self._is_leaf(entry)
        del self._entries[entry.key]
        del self._by_page[entry.page]
        self._forget_checkpoint(entry)
        if self.is_restorable(entry):
            self._changes.remove(entry.key)
        if entry.parent is not None:
            siblings = entry.parent.children
            last = siblings.pop()
            if last is not entry:
                siblings[entry.place] = last
                last.place = entry.place
            self._offer(entry.parent)

    def pin(self, entry: Entry) -> None:
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        assert entry.pins > 0
        entry.pins -= 1
        self._offer(entry)

    def pin_checkpoint(self, entry: Entry) -> None:
        assert entry.checkpoint is not None
        entry.checkpoint_pins += 1

    def unpin_checkpoint(self, entry: Entry) -> None:
        assert entry.checkpoint_pins > 0
        entry.checkpoint_pins -= 1
        self._offer(entry)

    def cheapest_leaf(self) -> Entry | None:
        """The entry without children and pins that is worth least: first one that leads to no checkpoint."""
        while self._leaves:
            valued, score, key = self._leaves[0]
            entry = self._entries.get(key)
            if entry is not None and self._is_leaf(entry):
                if (valued, score) == self._leaf_rank(entry):
                    return entry
                heapq.heapreplace(self._leaves, (*self._leaf_rank(entry), key))
            else:
                heapq.heappop(self._leaves)
        return None

    def cheapest_leaves(self, count: int) -> list[Entry]:
        """Up to `count` of them, in that order."""
        found: list[Entry] = []
        while len(found) < count and (entry := self.cheapest_leaf()) is not None:
            heapq.heappop(self._leaves)
            if entry not in found:  # an entry may have several records
                found.append(entry)
        for entry in found:
            heapq.heappush(self._leaves, (*self._leaf_rank(entry), entry.key))
        return found

    def cheapest_checkpoint(self) -> Entry | None:
        """The entry whose unpinned checkpoint is worth least."""
        while self._checkpoints:
            score, key = self._checkpoints[0]
            entry = self._entries.get(key)
            if entry is not None and entry.checkpoint is not None and not entry.checkpoint_pins:
                if score == entry.score:
                    return entry
                heapq.heapreplace(self._checkpoints, (entry.score, key))
            else:
                heapq.heappop(self._checkpoints)
        return None

    def owner_of_page(self, page: PageId) -> Entry | None:
        return self._by_page.get(page)

    def owner_of_state(self, state: StateId) -> Entry | None:
        return self._by_state.get(state)

    def owners_of_window(self, window: WindowId) -> list[Entry]:
        """The entries whose checkpoints have it."""
        return list(self._by_window.get(window, ()))

    def checkpoints_above(self, entry: Entry) -> Iterator[Entry]:
        """The entries with a checkpoint on the path to `entry`, the nearest first."""
        above = entry.parent
        while above is not None:
            if above.checkpoint is not None:
                yield above
            above = above.parent

    def credit(self, entry: Entry) -> float:
        """What is lost with `entry` per byte that comes free; what goes next has none left."""
        return max(0.0, entry.score[0] - self._clock)

    def age(self, credit: float) -> None:
        """Something of this credit was evicted: the clock moves on."""
        self._clock += credit

    def take_changes(self) -> IndexChanges:
        """Restorable depths that came and went since the last call."""
        changes, self._changes = self._changes, IndexChanges()
        return changes

    def restorable_keys(self) -> list[PageKey]:
        return [entry.key for entry in self._entries.values() if self.is_restorable(entry)]

    def is_restorable(self, entry: Entry) -> bool:
        return entry.checkpoint is not None or not self._layout.hybrid

    def check(self) -> None:
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.pins >= 0
            assert entry.checkpoint is not None or entry.checkpoint_pins == 0
            assert self._by_page.get(entry.page) is entry
            if entry.parent is None:
                assert entry.depth_pages == 1
            else:
                assert self._entries.get(entry.parent.key) is entry.parent, "an entry outlived its parent"
                assert entry.depth_pages == entry.parent.depth_pages + 1
                assert entry.pins == 0 or entry.parent.pins > 0, "a path is pinned with a hole in it"
                assert entry.parent.children[entry.place] is entry
            for child in entry.children:
                assert child.parent is entry
                assert self._entries.get(child.key) is child
        assert len(self._by_page) == len(self._entries)
        there = [(entry, entry.checkpoint) for entry in self if entry.checkpoint is not None]
        assert {
            checkpoint.state: entry for entry, checkpoint in there if checkpoint.state is not None
        } == self._by_state
        shared = {window: set(owners) for window, owners in self._by_window.items()}
        windows = {window for _, checkpoint in there for window in checkpoint.windows}
        assert shared == {
            window: {entry for entry, checkpoint in there if window in checkpoint.windows}
            for window in windows
        }
        leaves = {key for _, _, key in self._leaves}
        kept = {key for _, key in self._checkpoints}
        for key, entry in self._entries.items():
            assert key in leaves or not self._is_leaf(entry), "an evictable entry would never be found"
            assert key in kept or entry.checkpoint is None or entry.checkpoint_pins, "a checkpoint would stay"

    def _forget_checkpoint(self, entry: Entry) -> None:
        state, windows = entry.checkpoint or Checkpoint(None)
        if state is not None:
            del self._by_state[state]
        for window in windows:
            del self._by_window[window][entry]
            if not self._by_window[window]:
                del self._by_window[window]

    def _is_leaf(self, entry: Entry) -> bool:
        return not (entry.children or entry.pins or entry.checkpoint_pins)

    def _leaf_rank(self, entry: Entry) -> tuple[bool, tuple[float, int]]:
        return (True, entry.score) if self.is_restorable(entry) else (False, (0.0, entry.last_use))

    def _appraise(self, entry: Entry, above_pages: int, freed_bytes: int) -> None:
        """What is computed again without it: `[above_pages, depth_pages)`."""
        size = self._layout.page_tokens
        entry.saved_flops = self._cost.flops(above_pages * size, entry.depth_pages * size)
        entry.freed_bytes = freed_bytes
        self._uses += 1
        self._score(entry)

    def _score(self, entry: Entry) -> None:
        if self.policy == "lru":
            value = float(self._uses)
        elif entry.freed_bytes:
            value = self._clock + entry.uses * entry.saved_flops / entry.freed_bytes
        else:  # it never had a checkpoint
            value = 0.0
        entry.score = (value, self._uses)

    def _offer(self, entry: Entry) -> None:
        """Record `entry` where eviction will look for it; records of the past are swept out when they
        prevail."""
        if self._is_leaf(entry):
            heapq.heappush(self._leaves, (*self._leaf_rank(entry), entry.key))
        if entry.checkpoint is not None and not entry.checkpoint_pins:
            heapq.heappush(self._checkpoints, (entry.score, entry.key))
        if len(self._leaves) + len(self._checkpoints) > 4 * len(self._entries) + STALE_RECORDS_MAX:
            entries = self._entries.values()
            self._leaves = [(*self._leaf_rank(entry), entry.key) for entry in entries if self._is_leaf(entry)]
            self._checkpoints = [
                (entry.score, entry.key)
                for entry in entries
                if entry.checkpoint is not None and not entry.checkpoint_pins
            ]
            heapq.heapify(self._leaves)
            heapq.heapify(self._checkpoints)
