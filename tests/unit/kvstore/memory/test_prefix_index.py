"""The prefix index against a dictionary that stores everything and searches by brute force."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.kvstore.indexes import PAGE_BYTES, STATE_BYTES, an_index, evict_all, insert_path, keys_of
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PageId, StateId, WindowId
from tidemill.kvstore.memory.entry import Checkpoint, Entry
from tidemill.kvstore.memory.prefix_index import STALE_RECORDS_MAX
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost

paths = st.text("ab", min_size=1, max_size=4)
"""A letter is a page: "aba" is the prefix of three pages, and its own key."""

choices = st.integers(0, 999)


@dataclass
class EntryModel:
    """The model of an entry."""

    page: int
    last_use: int
    pins: int = 0
    checkpoint: Checkpoint | None = None
    checkpoint_pins: int = 0
    value: float = 0.0  # of the checkpoint, or of the page in a model without states
    flops_per_byte: float = 0.0  # FLOPs per byte
    valued_at: int = 0  # the serial number of the last change of its value
    uses: int = 1

    @property
    def evictable(self) -> bool:
        return self.checkpoint is not None and not self.checkpoint_pins


class IndexAgainstDict(RuleBasedStateMachine):
    """The index and its model; `reading` are the entries with a pinned checkpoint."""

    @initialize(
        hybrid=st.booleans(),
        policy=st.sampled_from(["lru", "value"]),
        context=st.sampled_from([0.0, 1.0, 10.0]),
    )
    def build(self, hybrid: bool, policy: Policy, context: float) -> None:  # noqa: FBT001  drawn
        self.hybrid = hybrid
        self.policy = policy
        self.context = context
        self.index = an_index(
            hybrid=hybrid, policy=policy, cost=RecomputeCost(token_flops=3.0, context_flops=context)
        )
        self.model: dict[PageKey, EntryModel] = {}
        self.pinned_paths: list[list[Entry]] = []
        self.reading: list[Entry] = []
        self.announced: set[PageKey] = set()
        self.clock = 0.0
        self.uses = self.serial = 0

    @rule(path=paths)
    def match(self, path: str) -> None:
        """Match a path: its cached pages, and its deepest restorable depth."""
        match = self.index.match(keys_of(path))
        found = [key for key in keys_of(path) if key in self.model]
        assert [entry.key for entry in match.path] == found
        restorable = [len(key) for key in found if self._is_restorable(key)]
        assert match.restorable_pages == max(restorable, default=0)

    @rule(path=paths)
    def pin_path(self, path: str) -> None:
        """Resume a request as deep as possible, insert the rest, and pin the whole path."""
        match = self.index.match(keys_of(path))
        shared = match.path[: match.restorable_pages]
        self.index.use(shared)
        self.uses += 1
        self.pinned_paths.append([])
        for entry in shared:
            self.model[entry.key].last_use = self.uses
            if not self.hybrid or entry is shared[-1]:
                self.model[entry.key].uses += 1
                self._revalue(entry.key)
            self.index.pin(entry)
            self._count_pin(entry)
        for key in keys_of(path)[len(shared) :]:
            self._insert(key)

    @rule(path=paths)
    def insert_again(self, path: str) -> None:
        """Insert all pages of a path, also those that another request has inserted."""
        self.pinned_paths.append([])
        for key in keys_of(path):
            self._insert(key)

    @precondition(lambda self: self.pinned_paths)
    @rule(choice=choices)
    def unpin_path(self, choice: int) -> None:
        entries = self.pinned_paths.pop(choice % len(self.pinned_paths))
        while entries:
            self.index.unpin(entries[-1])
            self.model[entries.pop().key].pins -= 1

    @rule(choice=choices)
    def keep_checkpoint(self, choice: int) -> None:
        without = [entry for entry in self.index if entry.checkpoint is None]
        if without and self.hybrid:
            entry = without[choice % len(without)]
            windows = tuple(WindowId(choice % 7 + index) for index in range(choice % 3))  # shared with others
            checkpoint = Checkpoint((StateId(self._serial()),), windows)
            self.index.keep_checkpoint(entry, checkpoint)
            self.model[entry.key].checkpoint = checkpoint
            above = [len(key) for key in self._above(entry.key) if self.model[key].checkpoint is not None]
            self._appraise(entry.key, max(above, default=0))

    @rule(choice=choices)
    def drop_checkpoint(self, choice: int) -> None:
        evictable = [entry for entry in self.index if self.model[entry.key].evictable]
        if evictable:
            entry = evictable[choice % len(evictable)]
            assert self.index.drop_checkpoint(entry) == self.model[entry.key].checkpoint
            self.model[entry.key].checkpoint = None

    @rule(choice=choices)
    def read_checkpoint(self, choice: int) -> None:
        found = [entry for entry in self.index if entry.checkpoint is not None]
        if found:
            entry = found[choice % len(found)]
            self.index.pin_checkpoint(entry)
            self.model[entry.key].checkpoint_pins += 1
            self.reading.append(entry)
            assert self.index.cheapest_checkpoint() not in self.reading

    @precondition(lambda self: self.reading)
    @rule(choice=choices)
    def stop_reading(self, choice: int) -> None:
        entry = self.reading.pop(choice % len(self.reading))
        self.index.unpin_checkpoint(entry)
        self.model[entry.key].checkpoint_pins -= 1

    @rule(count=st.integers(1, 3))
    def evict_leaves(self, count: int) -> None:
        """Evict the cheapest leaf: first those without a checkpoint by recency, then by value."""
        ranks = sorted(self._leaf_rank(key) for key in self._leaves())
        found = self.index.cheapest_leaves(count)
        assert [self._leaf_rank(entry.key) for entry in found] == ranks[:count]
        assert self.index.cheapest_leaf() is (found[0] if found else None)
        if found:
            if self.index.is_restorable(found[0]):
                self._age(found[0])
            removed = self.model.pop(found[0].key)
            self.index.remove(found[0])
            assert (found[0].page, found[0].checkpoint) == (removed.page, removed.checkpoint)

    @rule()
    def evict_checkpoint(self) -> None:
        evictable = [kept for kept in self.model.values() if kept.evictable]
        entry = self.index.cheapest_checkpoint()
        if entry is None:
            assert not evictable
            return
        removed = self.model[entry.key]
        assert (removed.value, removed.valued_at) == min((kept.value, kept.valued_at) for kept in evictable)
        self._age(entry)
        assert self.index.drop_checkpoint(entry) == removed.checkpoint
        removed.checkpoint = None

    @rule()
    def announce(self) -> None:
        """Assert that the announced changes add up to the restorable keys."""
        changes = self.index.take_changes()
        assert changes.added.isdisjoint(changes.removed)
        self.announced = (self.announced - changes.removed) | changes.added
        assert self.announced == set(self.index.restorable_keys())
        again = self.index.take_changes()
        assert not again.added
        assert not again.removed

    @invariant()
    def index_matches_the_model(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)
        for entry in self.index:
            kept = self.model[entry.key]
            assert (entry.page, entry.checkpoint) == (kept.page, kept.checkpoint)
            assert (entry.pins, entry.checkpoint_pins) == (kept.pins, kept.checkpoint_pins)
            assert {child.key for child in entry.children} == self._children(entry.key)
            assert (entry.depth_pages, entry.last_use) == (len(entry.key), kept.last_use)
            if self._is_restorable(entry.key):
                assert self.index.credit(entry) == pytest.approx(max(0.0, kept.value - self.clock))
        assert sorted(self.index.restorable_keys()) == sorted(filter(self._is_restorable, self.model))

    def _insert(self, key: PageKey) -> None:
        path = self.pinned_paths[-1]
        entry, taken_over = self.index.insert(path[-1] if path else None, key, PageId(self._serial()))
        assert taken_over == (key not in self.model), "the first writer wins"
        if taken_over:
            self.uses += 1
            self.model[key] = EntryModel(page=self.serial, last_use=self.uses)
            if not self.hybrid:
                self._appraise(key, len(key) - 1)
        self._count_pin(entry)

    def _count_pin(self, entry: Entry) -> None:
        self.model[entry.key].pins += 1
        self.pinned_paths[-1].append(entry)

    def _appraise(self, key: PageKey, above_pages: int) -> None:
        """Set the value: without the entry, the tokens from `above_pages` on are recomputed."""
        flops = sum(3.0 + self.context * (position + 1) for position in range(above_pages, len(key)))
        freed_bytes = (len(key) - above_pages) * PAGE_BYTES + STATE_BYTES * self.hybrid
        self.model[key].flops_per_byte = flops / freed_bytes
        self.uses += 1
        self._revalue(key)

    def _revalue(self, key: PageKey) -> None:
        kept = self.model[key]
        kept.valued_at = self.uses
        kept.value = self.uses if self.policy == "lru" else self.clock + kept.uses * kept.flops_per_byte

    def _age(self, entry: Entry) -> None:
        self.index.age(self.index.credit(entry))
        self.clock += max(0.0, self.model[entry.key].value - self.clock)

    def _leaves(self) -> list[PageKey]:
        return [
            key
            for key, kept in self.model.items()
            if not (kept.pins or kept.checkpoint_pins or self._children(key))
        ]

    def _leaf_rank(self, key: PageKey) -> tuple[bool, float, int]:
        kept = self.model[key]
        return (True, kept.value, kept.valued_at) if self._is_restorable(key) else (False, 0.0, kept.last_use)

    def _is_restorable(self, key: PageKey) -> bool:
        return not self.hybrid or self.model[key].checkpoint is not None

    def _children(self, key: PageKey) -> set[PageKey]:
        return {other for other in self.model if other[:-1] == key}

    def _above(self, key: PageKey) -> list[PageKey]:
        return [PageKey(key[:end]) for end in range(1, len(key))]

    def _serial(self) -> int:
        self.serial += 1
        return self.serial


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(
    deadline=None, derandomize=True, max_examples=120, stateful_step_count=40
)


def test_index_removes_stale_eviction_records() -> None:
    index = an_index(hybrid=True)
    entries = insert_path(index, "abcd", checkpoints="xxxx")
    for _ in range(1000):
        for entry in entries:
            index.pin(entry)
            index.pin_checkpoint(entry)
        index.use(entries)
        for entry in reversed(entries):
            index.unpin_checkpoint(entry)
            index.unpin(entry)
        assert len(index._leaves) + len(index._checkpoints) <= 4 * len(index) + STALE_RECORDS_MAX
    index.check()
    assert evict_all(index) == ["abcd", "abc", "ab", "a"]


def test_index_asserts_what_its_caller_guarantees() -> None:
    index = an_index(hybrid=True)
    parent, entry = insert_path(index, "ab", checkpoints=".x")
    index.pin_checkpoint(entry)
    for wrong in (
        lambda: index.keep_checkpoint(entry, Checkpoint((StateId(99),))),
        lambda: index.drop_checkpoint(entry),
        lambda: index.remove(entry),
        lambda: index.remove(parent),
    ):
        with pytest.raises(AssertionError):
            wrong()
