"""The prefix index against a dictionary that remembers everything and searches by brute force."""
# The number of records in the heaps is no part of any interface.
# pyright: reportPrivateUsage=false

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.kvstore.indexes import PAGE_BYTES, STATE_BYTES, an_index, evicted, kept_path, keys_of
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PageId, StateId, WindowId
from tidemill.kvstore.memory.prefix_index import STALE_RECORDS_MAX, Checkpoint, Entry
from tidemill.kvstore.memory.recompute_cost import Policy, RecomputeCost

paths = st.text("ab", min_size=1, max_size=4)
"""A letter stands for a page: "aba" is the prefix of three pages, and its own key."""

choices = st.integers(0, 999)


@dataclass
class Kept:
    """What the model knows of an entry."""

    page: int
    last_use: int
    pins: int = 0
    checkpoint: Checkpoint | None = None
    checkpoint_pins: int = 0
    worth: float = 0.0  # of the checkpoint, or of the page in a model without states
    saves: float = 0.0  # FLOPs per byte
    used: int = 0  # when its worth was last seen to
    uses: int = 1

    @property
    def loose(self) -> bool:
        return self.checkpoint is not None and not self.checkpoint_pins


class IndexAgainstDict(RuleBasedStateMachine):
    """`held` are the paths that somebody has pinned, `reading` the entries with a pinned checkpoint."""

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
        self.kept: dict[PageKey, Kept] = {}
        self.held: list[list[Entry]] = []
        self.reading: list[Entry] = []
        self.announced: set[PageKey] = set()
        self.clock = 0.0
        self.uses = self.serial = 0

    @rule(path=paths)
    def match(self, path: str) -> None:
        """The deepest restorable depth, and how far the pages alone reach. Changes nothing."""
        match = self.index.match(keys_of(path))
        found = [key for key in keys_of(path) if key in self.kept]
        assert [entry.key for entry in match.path] == found
        restorable = [len(key) for key in found if self._is_restorable(key)]
        assert match.restorable_pages == max(restorable, default=0)

    @rule(path=paths)
    def hold(self, path: str) -> None:
        """As a request does: resume as deep as possible, pin that, insert the rest, pin everything."""
        match = self.index.match(keys_of(path))
        shared = match.path[: match.restorable_pages]
        self.index.use(shared)
        self.uses += 1
        self.held.append([])
        for entry in shared:
            self.kept[entry.key].last_use = self.uses
            if not self.hybrid or entry is shared[-1]:
                self.kept[entry.key].uses += 1
                self._seen_to(entry.key)
            self.index.pin(entry)
            self._pinned(entry)
        for key in keys_of(path)[len(shared) :]:
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
            windows = tuple(WindowId(choice % 7 + place) for place in range(choice % 3))  # shared with others
            checkpoint = Checkpoint(StateId(self._serial()), windows)
            self.index.keep_checkpoint(entry, checkpoint)
            self.kept[entry.key].checkpoint = checkpoint
            above = [len(key) for key in self._above(entry.key) if self.kept[key].checkpoint is not None]
            self._appraised(entry.key, max(above, default=0))

    @rule(choice=choices)
    def drop_checkpoint(self, choice: int) -> None:
        loose = [entry for entry in self.index if self.kept[entry.key].loose]
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

    @rule(count=st.integers(1, 3))
    def evict_leaves(self, count: int) -> None:
        """What leads to no checkpoint by recency, then by worth; the clock follows."""
        ranks = sorted(self._leaf_rank(key) for key in self._leaves())
        found = self.index.cheapest_leaves(count)
        assert [self._leaf_rank(entry.key) for entry in found] == ranks[:count]
        assert self.index.cheapest_leaf() is (found[0] if found else None)
        if found:
            if self.index.is_restorable(found[0]):
                self._age(found[0])
            gone = self.kept.pop(found[0].key)
            self.index.remove(found[0])
            assert (found[0].page, found[0].checkpoint) == (gone.page, gone.checkpoint)

    @rule()
    def evict_checkpoint(self) -> None:
        loose = [kept for kept in self.kept.values() if kept.loose]
        entry = self.index.cheapest_checkpoint()
        if entry is None:
            assert not loose
            return
        gone = self.kept[entry.key]
        assert (gone.worth, gone.used) == min((kept.worth, kept.used) for kept in loose)
        self._age(entry)
        assert self.index.drop_checkpoint(entry) == gone.checkpoint
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
            assert {child.key for child in entry.children} == self._children(entry.key)
            assert entry.depth_pages == len(entry.key)
            assert self.index.owner_of_page(entry.page) is entry
            if entry.checkpoint is not None:
                assert entry.checkpoint.state is not None
                assert self.index.owner_of_state(entry.checkpoint.state) is entry
                for window in entry.checkpoint.windows:
                    owners = {entry.key for entry in self.index.owners_of_window(window)}
                    assert owners == {
                        key
                        for key, entry in self.kept.items()
                        if entry.checkpoint and window in entry.checkpoint.windows
                    }
            if self._is_restorable(entry.key):
                assert self.index.credit(entry) == pytest.approx(max(0.0, kept.worth - self.clock))
        assert sorted(self.index.restorable_keys()) == sorted(filter(self._is_restorable, self.kept))
        assert self.index.owner_of_page(PageId(self.serial + 1)) is None
        assert self.index.owner_of_state(StateId(self.serial + 1)) is None

    def _insert(self, key: PageKey) -> None:
        path = self.held[-1]
        entry, taken_over = self.index.insert(path[-1] if path else None, key, PageId(self._serial()))
        assert taken_over == (key not in self.kept), "the first writer wins"
        if taken_over:
            self.uses += 1
            self.kept[key] = Kept(page=self.serial, last_use=self.uses)
            if not self.hybrid:
                self._appraised(key, len(key) - 1)
        self._pinned(entry)

    def _pinned(self, entry: Entry) -> None:
        self.kept[entry.key].pins += 1
        self.held[-1].append(entry)

    def _appraised(self, key: PageKey, above_pages: int) -> None:
        """Every token from `above_pages` on is computed again without it, each over all tokens before."""
        flops = sum(3.0 + self.context * (position + 1) for position in range(above_pages, len(key)))
        freed_bytes = (len(key) - above_pages) * PAGE_BYTES + STATE_BYTES * self.hybrid
        self.kept[key].saves = flops / freed_bytes
        self.uses += 1
        self._seen_to(key)

    def _seen_to(self, key: PageKey) -> None:
        kept = self.kept[key]
        kept.used = self.uses
        kept.worth = self.uses if self.policy == "lru" else self.clock + kept.uses * kept.saves

    def _age(self, entry: Entry) -> None:
        self.index.age(self.index.credit(entry))
        self.clock += max(0.0, self.kept[entry.key].worth - self.clock)

    def _leaves(self) -> list[PageKey]:
        return [
            key
            for key, kept in self.kept.items()
            if not (kept.pins or kept.checkpoint_pins or self._children(key))
        ]

    def _leaf_rank(self, key: PageKey) -> tuple[bool, float, int]:
        kept = self.kept[key]
        return (True, kept.worth, kept.used) if self._is_restorable(key) else (False, 0.0, kept.last_use)

    def _is_restorable(self, key: PageKey) -> bool:
        return not self.hybrid or self.kept[key].checkpoint is not None

    def _children(self, key: PageKey) -> set[PageKey]:
        return {other for other in self.kept if other[:-1] == key}

    def _above(self, key: PageKey) -> list[PageKey]:
        return [PageKey(key[:end]) for end in range(1, len(key))]

    def _serial(self) -> int:
        self.serial += 1
        return self.serial


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(
    deadline=None, derandomize=True, max_examples=120, stateful_step_count=40
)


def test_a_checkpoint_inside_a_path_goes_alone() -> None:
    index = an_index(hybrid=True, policy="lru")
    first, _, last = kept_path(index, "abc", checkpoints="x.x")
    index.use((first,))
    assert index.cheapest_checkpoint() is last, "it was used less recently"
    index.drop_checkpoint(last)
    assert index.match(keys_of("abc")).restorable_pages == 1
    assert index.cheapest_checkpoint() is first
    index.drop_checkpoint(first)
    assert index.cheapest_checkpoint() is None
    match = index.match(keys_of("abc"))
    assert (len(match.path), match.restorable_pages) == (3, 0)


def test_what_is_pinned_stays() -> None:
    index = an_index(hybrid=True)
    a, b = kept_path(index, "ab", checkpoints="xx")
    for entry in (a, b):
        index.pin(entry)
        index.pin_checkpoint(entry)
    assert index.cheapest_leaf() is None
    assert index.cheapest_leaves(3) == []
    assert index.cheapest_checkpoint() is None
    index.unpin_checkpoint(a)
    assert index.cheapest_leaf() is None
    assert index.cheapest_checkpoint() is a
    index.unpin(b)
    index.unpin(a)
    assert index.cheapest_leaf() is None, "its checkpoint is being read"
    index.unpin_checkpoint(b)
    assert evicted(index) == ["ab", "a"]


def test_records_of_the_past_are_swept_out() -> None:
    index = an_index(hybrid=True)
    entries = kept_path(index, "abcd", checkpoints="xxxx")
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
    assert evicted(index) == ["abcd", "abc", "ab", "a"]


def test_a_checkpoint_is_never_overwritten() -> None:
    index = an_index(hybrid=True)
    (entry,) = kept_path(index, "a", checkpoints="x")
    with pytest.raises(AssertionError):
        index.keep_checkpoint(entry, Checkpoint(StateId(99)))
    index.pin_checkpoint(entry)
    with pytest.raises(AssertionError):
        index.drop_checkpoint(entry)
    with pytest.raises(AssertionError):
        index.remove(entry)


def test_an_entry_with_children_is_not_removed() -> None:
    index = an_index(hybrid=False)
    first, _ = kept_path(index, "ab")
    with pytest.raises(AssertionError):
        index.remove(first)
