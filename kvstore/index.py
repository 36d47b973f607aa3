"""The prefix index: which pages and checkpoints are kept for reuse, found by a walk along chained keys.

    key of [0, P)      key of [0, 2P)     key of [0, 3P)
    page 7, no ckpt <- page 2, ckpt 31 <- page 9, no ckpt        restorable depth of a hybrid here: 2P
                                     ^--- page 4, ckpt 12        ... and 3P along this branch

A checkpoint belongs to the entry at whose end it was taken. An entry outlives its children, so a page that is
found has every page before it. A lease pins its whole path; a pinned entry or checkpoint is never evicted.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PageId, StateId

STALE_RECORDS_MAX = 256


@dataclass(slots=True, eq=False)
class Entry:
    """One full page that is kept. `depth_pages` counts the pages of the path, this one included."""

    key: PageKey
    parent: "Entry | None"
    depth_pages: int
    page: PageId
    checkpoint: StateId | None = None
    pins: int = 0
    checkpoint_pins: int = 0
    children: int = 0
    last_use: int = 0
    hits: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """The kept pages of a prompt, left to right, and how many of them end at a restorable depth."""

    path: tuple[Entry, ...]
    restorable_pages: int


@dataclass(slots=True)
class Changes:
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
    """Owns the pages and checkpoints of its entries until eviction hands them back to the caller."""

    def __init__(self, *, hybrid: bool) -> None:
        self._hybrid = hybrid
        self._entries: dict[PageKey, Entry] = {}
        self._uses = 0
        # Candidates for eviction, oldest first; a stale record is dropped or renewed when it surfaces.
        self._leaves: list[tuple[bool, int, PageKey]] = []
        self._checkpoints: list[tuple[int, PageKey]] = []
        self._changes = Changes()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def match(self, keys: Sequence[PageKey]) -> Match:
        """The longest kept path along `keys`, and its deepest restorable depth. Counts as a use."""
        path: list[Entry] = []
        restorable = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                break
            path.append(entry)
            if self._is_restorable(entry):
                restorable = len(path)
        self._uses += 1
        for entry in path:
            entry.last_use = self._uses
            entry.hits += 1
        return Match(tuple(path), restorable)

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
        if parent is not None:
            parent.children += 1
        if self._is_restorable(entry):
            self._changes.add(key)
        return entry, True

    def keep_checkpoint(self, entry: Entry, state: StateId) -> None:
        """Take over `state` as the checkpoint of `entry`, which has none."""
        assert entry.checkpoint is None
        entry.checkpoint = state
        self._changes.add(entry.key)
        self._offer(entry)

    def drop_checkpoint(self, entry: Entry) -> StateId:
        """Give up the checkpoint of `entry`; the caller owns it."""
        assert entry.checkpoint is not None
        assert entry.checkpoint_pins == 0
        state, entry.checkpoint = entry.checkpoint, None
        self._changes.remove(entry.key)
        self._offer(entry)
        return state

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

    def evict_leaf(self) -> Entry | None:
        """Remove the least useful entry without children: first those that lead to no checkpoint, then by
        least recent use. The caller owns its page and its checkpoint. None when everything is pinned."""
        while self._leaves:
            useful, last_use, key = heapq.heappop(self._leaves)
            entry = self._entries.get(key)
            if entry is None or not self._is_evictable(entry):
                continue
            if (useful, last_use) != self._leaf_rank(entry):
                heapq.heappush(self._leaves, (*self._leaf_rank(entry), key))
                continue
            del self._entries[key]
            if self._is_restorable(entry):
                self._changes.remove(key)
            if entry.parent is not None:
                entry.parent.children -= 1
                self._offer(entry.parent)
            return entry
        return None

    def evict_checkpoint(self) -> StateId | None:
        """Take the least recently used checkpoint from its entry, whose page stays. None when all are
        pinned."""
        while self._checkpoints:
            last_use, key = heapq.heappop(self._checkpoints)
            entry = self._entries.get(key)
            if entry is None or entry.checkpoint is None or entry.checkpoint_pins:
                continue
            if last_use != entry.last_use:
                heapq.heappush(self._checkpoints, (entry.last_use, key))
                continue
            return self.drop_checkpoint(entry)
        return None

    def take_changes(self) -> Changes:
        """Restorable depths that came and went since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def restorable_keys(self) -> list[PageKey]:
        return [entry.key for entry in self._entries.values() if self._is_restorable(entry)]

    def check(self) -> None:
        children: dict[PageKey, int] = {}
        for key, entry in self._entries.items():
            assert entry.key == key
            assert entry.pins >= 0
            assert entry.checkpoint is not None or entry.checkpoint_pins == 0
            if entry.parent is None:
                assert entry.depth_pages == 1
            else:
                assert self._entries.get(entry.parent.key) is entry.parent, "an entry outlived its parent"
                assert entry.depth_pages == entry.parent.depth_pages + 1
                assert entry.pins == 0 or entry.parent.pins > 0, "a path is pinned with a hole in it"
                children[entry.parent.key] = children.get(entry.parent.key, 0) + 1
        assert all(entry.children == children.get(key, 0) for key, entry in self._entries.items())
        leaves = {key for _, _, key in self._leaves}
        kept = {key for _, key in self._checkpoints}
        for key, entry in self._entries.items():
            assert key in leaves or not self._is_evictable(entry), "an evictable entry would never be found"
            assert key in kept or entry.checkpoint is None or entry.checkpoint_pins, "a checkpoint would stay"

    def _is_restorable(self, entry: Entry) -> bool:
        return entry.checkpoint is not None or not self._hybrid

    def _is_evictable(self, entry: Entry) -> bool:
        return not (entry.children or entry.pins or entry.checkpoint_pins)

    def _leaf_rank(self, entry: Entry) -> tuple[bool, int]:
        return self._is_restorable(entry), entry.last_use

    def _offer(self, entry: Entry) -> None:
        """Record `entry` where eviction will look for it; records of the past are swept out when they
        prevail."""
        if self._is_evictable(entry):
            heapq.heappush(self._leaves, (*self._leaf_rank(entry), entry.key))
        if entry.checkpoint is not None and not entry.checkpoint_pins:
            heapq.heappush(self._checkpoints, (entry.last_use, entry.key))
        if len(self._leaves) + len(self._checkpoints) > 4 * len(self._entries) + STALE_RECORDS_MAX:
            entries = self._entries.values()
            self._leaves = [
                (*self._leaf_rank(entry), entry.key) for entry in entries if self._is_evictable(entry)
            ]
            self._checkpoints = [
                (entry.last_use, entry.key)
                for entry in entries
                if entry.checkpoint is not None and not entry.checkpoint_pins
            ]
            heapq.heapify(self._leaves)
            heapq.heapify(self._checkpoints)
