"""The prefix index against a dictionary that remembers everything and searches by brute force."""
# The number of records in the heaps is no part of any interface.
# pyright: reportPrivateUsage=false

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.kvstore.index import STALE_RECORDS_MAX, Entry, PrefixIndex
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PageId, StateId

paths = st.text("ab", min_size=1, max_size=4)
"""A letter stands for a page: "aba" is the prefix of three pages, and its own key."""

choices = st.integers(0, 999)


def keys_of(path: str) -> list[PageKey]:
    return [PageKey(path[:end].encode()) for end in range(1, len(path) + 1)]


@dataclass
class Kept:
    """What the model knows of an entry."""

    page: int
    last_use: int
    pins: int = 0
    checkpoint: int | None = None
    checkpoint_pins: int = 0


class IndexAgainstDict(RuleBasedStateMachine):
    """`held` are the paths that somebody has pinned, `reading` the entries with a pinned checkpoint."""

    @initialize(hybrid=st.booleans())
    def build(self, hybrid: bool) -> None:  # noqa: FBT001  drawn
        self.hybrid = hybrid
        self.index = PrefixIndex(hybrid=hybrid)
        self.kept: dict[PageKey, Kept] = {}
        self.held: list[list[Entry]] = []
        self.reading: list[Entry] = []
        self.announced: set[PageKey] = set()
        self.uses = self.serial = 0

    @rule(path=paths)
    def match(self, path: str) -> None:
        self._match(path)

    @rule(path=paths)
    def hold(self, path: str) -> None:
        """As a request does: share what is kept, insert the rest, pin everything."""
        match = self._match(path)
        self.held.append([])
        for entry in match:
            self.index.pin(entry)
            self._pinned(entry)
        for key in keys_of(path)[len(match) :]:
            self._insert(key)

    @rule(path=paths)
    def insert_again(self, path: str) -> None:
        """As a request does that computed what another one has kept meanwhile."""
        self.held.append([])
        for key in keys_of(path):
            self._insert(key)

    @precondition(lambda self: self.held)
    @rule(choice=choices)
    def let_go(self, choice: int) -> None:
        entries = self.held.pop(choice % len(self.held))
        while entries:
            self.index.unpin(entries[-1])
            self.kept[entries.pop().key].pins -= 1

    @rule(choice=choices)
    def keep_checkpoint(self, choice: int) -> None:
        bare = [entry for entry in self.index if entry.checkpoint is None]
        if bare and self.hybrid:
            entry = bare[choice % len(bare)]
            self.index.keep_checkpoint(entry, StateId(self._serial()))
            self.kept[entry.key].checkpoint = self.serial

    @rule(choice=choices)
    def drop_checkpoint(self, choice: int) -> None:
        loose = self._loose_checkpoints()
        if loose:
            entry = loose[choice % len(loose)]
            assert self.index.drop_checkpoint(entry) == self.kept[entry.key].checkpoint
            self.kept[entry.key].checkpoint = None

    @rule(choice=choices)
    def read_checkpoint(self, choice: int) -> None:
        there = [entry for entry in self.index if entry.checkpoint is not None]
        if there:
            entry = there[choice % len(there)]
            self.index.pin_checkpoint(entry)
            self.kept[entry.key].checkpoint_pins += 1
            self.reading.append(entry)

    @precondition(lambda self: self.reading)
    @rule(choice=choices)
    def stop_reading(self, choice: int) -> None:
        entry = self.reading.pop(choice % len(self.reading))
        self.index.unpin_checkpoint(entry)
        self.kept[entry.key].checkpoint_pins -= 1

    @rule()
    def evict_leaf(self) -> None:
        """First what leads to no checkpoint, then by least recent use."""
        leaves = {
            key: (self._is_restorable(key), kept.last_use)
            for key, kept in self.kept.items()
            if not (kept.pins or kept.checkpoint_pins or self._children(key))
        }
        entry = self.index.evict_leaf()
        if entry is None:
            assert not leaves
            return
        assert leaves[entry.key] == min(leaves.values())
        gone = self.kept.pop(entry.key)
        assert (entry.page, entry.checkpoint) == (gone.page, gone.checkpoint)

    @rule()
    def evict_checkpoint(self) -> None:
        loose = {entry.key: self.kept[entry.key] for entry in self._loose_checkpoints()}
        state = self.index.evict_checkpoint()
        if state is None:
            assert not loose
            return
        gone = next(kept for kept in loose.values() if kept.checkpoint == state)
        assert gone.last_use == min(kept.last_use for kept in loose.values())
        gone.checkpoint = None

    @rule()
    def announce(self) -> None:
        """What came and went, applied to what was known, is what there is."""
        changes = self.index.take_changes()
        assert changes.added.isdisjoint(changes.removed)
        self.announced = (self.announced - changes.removed) | changes.added
        assert self.announced == set(self.index.restorable_keys())
        again = self.index.take_changes()
        assert not again.added
        assert not again.removed

    @invariant()
    def it_holds_what_the_model_holds(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.kept)
        for entry in self.index:
            kept = self.kept[entry.key]
            assert (entry.page, entry.checkpoint) == (kept.page, kept.checkpoint)
            assert (entry.pins, entry.checkpoint_pins) == (kept.pins, kept.checkpoint_pins)
            assert entry.children == self._children(entry.key)
            assert entry.depth_pages == len(entry.key)
        assert sorted(self.index.restorable_keys()) == sorted(filter(self._is_restorable, self.kept))

    def _match(self, path: str) -> tuple[Entry, ...]:
        match = self.index.match(keys_of(path))
        self.uses += 1
        found = [key for key in keys_of(path) if key in self.kept]
        assert [entry.key for entry in match.path] == found
        assert match.restorable_pages == max(
            (len(key) for key in found if self._is_restorable(key)), default=0
        )
        for key in found:
            self.kept[key].last_use = self.uses
        return match.path

    def _insert(self, key: PageKey) -> None:
        path = self.held[-1]
        entry, taken_over = self.index.insert(path[-1] if path else None, key, PageId(self._serial()))
        assert taken_over == (key not in self.kept), "the first writer wins"
        if taken_over:
            self.uses += 1
            self.kept[key] = Kept(page=self.serial, last_use=self.uses)
        self._pinned(entry)

    def _pinned(self, entry: Entry) -> None:
        self.kept[entry.key].pins += 1
        self.held[-1].append(entry)

    def _loose_checkpoints(self) -> list[Entry]:
        return [entry for entry in self.index if entry.checkpoint is not None and not entry.checkpoint_pins]

    def _is_restorable(self, key: PageKey) -> bool:
        return not self.hybrid or self.kept[key].checkpoint is not None

    def _children(self, key: PageKey) -> int:
        return sum(other[:-1] == key for other in self.kept)

    def _serial(self) -> int:
        self.serial += 1
        return self.serial


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(
    deadline=None, derandomize=True, max_examples=150, stateful_step_count=40
)


def kept_path(index: PrefixIndex, path: str, *, checkpoints: str = "") -> list[Entry]:
    """Insert the pages of `path`, with a checkpoint where `checkpoints` has an x; nothing stays pinned."""
    entries: list[Entry] = []
    for key in keys_of(path):
        entry, _ = index.insert(entries[-1] if entries else None, key, PageId(len(index)))
        entries.append(entry)
    for entry, mark in zip(entries, checkpoints, strict=False):
        if mark == "x":
            index.keep_checkpoint(entry, StateId(len(index) * 10 + entry.depth_pages))
    for entry in reversed(entries):
        index.unpin(entry)
    return entries


def evicted(index: PrefixIndex) -> list[str]:
    order: list[str] = []
    while (entry := index.evict_leaf()) is not None:
        index.check()
        order.append(entry.key.decode())
    return order


def test_leaves_that_lead_to_no_checkpoint_go_first() -> None:
    index = PrefixIndex(hybrid=True)
    kept_path(index, "aaa", checkpoints=".x.")
    kept_path(index, "bb", checkpoints=".x")
    kept_path(index, "ccc")
    assert evicted(index) == ["aaa", "ccc", "cc", "c", "aa", "a", "bb", "b"]


def test_without_states_the_least_recently_used_leaf_goes_first() -> None:
    index = PrefixIndex(hybrid=False)
    for path in ("aa", "b", "c"):
        kept_path(index, path)
    index.match(keys_of("b"))
    assert evicted(index) == ["aa", "a", "c", "b"]


def test_a_checkpoint_inside_a_path_goes_alone() -> None:
    index = PrefixIndex(hybrid=True)
    entries = kept_path(index, "abc", checkpoints="x.x")
    first, _, last = (entry.checkpoint for entry in entries)
    index.match(keys_of("a"))
    assert index.evict_checkpoint() == last, "it was used less recently"
    assert index.match(keys_of("abc")).restorable_pages == 1
    assert index.evict_checkpoint() == first
    assert index.evict_checkpoint() is None
    match = index.match(keys_of("abc"))
    assert (len(match.path), match.restorable_pages) == (3, 0)


def test_what_is_pinned_stays() -> None:
    index = PrefixIndex(hybrid=True)
    a, b = kept_path(index, "ab", checkpoints="xx")
    for entry in (a, b):
        index.pin(entry)
        index.pin_checkpoint(entry)
    assert index.evict_leaf() is None
    assert index.evict_checkpoint() is None
    index.unpin_checkpoint(a)
    assert index.evict_leaf() is None
    assert index.evict_checkpoint() is not None
    index.unpin(b)
    index.unpin(a)
    assert index.evict_leaf() is None, "its checkpoint is being read"
    index.unpin_checkpoint(b)
    assert evicted(index) == ["ab", "a"]


def test_records_of_the_past_are_swept_out() -> None:
    index = PrefixIndex(hybrid=True)
    entries = kept_path(index, "abcd", checkpoints="xxxx")
    for _ in range(2000):
        for entry in entries:
            index.pin(entry)
            index.pin_checkpoint(entry)
        index.match(keys_of("abcd"))
        for entry in reversed(entries):
            index.unpin_checkpoint(entry)
            index.unpin(entry)
        assert len(index._leaves) + len(index._checkpoints) <= 4 * len(index) + STALE_RECORDS_MAX
    index.check()
    assert evicted(index) == ["abcd", "abc", "ab", "a"]


def test_a_checkpoint_is_never_overwritten() -> None:
    index = PrefixIndex(hybrid=True)
    (entry,) = kept_path(index, "a", checkpoints="x")
    with pytest.raises(AssertionError):
        index.keep_checkpoint(entry, StateId(99))
    index.pin_checkpoint(entry)
    with pytest.raises(AssertionError):
        index.drop_checkpoint(entry)
