"""The arena against a model of dictionaries: its extents follow the demand of the classes."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import (
    PAGES,
    STATES,
    Attention,
    Layout,
    Linear,
    ObjectClass,
    PageId,
    layout_of,
)
from tidemill.kvstore.memory.arena import SPARE_EXTENTS_MAX, Arena, Pool
from tidemill.kvstore.memory.entry import Entry

Action = Literal["pin", "unpin", "own", "disown"]
ACTIONS: tuple[Action, ...] = get_args(Action)

choices = st.integers(0, 999)
classes = st.sampled_from([PAGES, STATES, "blobs"])


class FakeBacking:
    """A backing without memory that records the offsets of mapped extents."""

    memory = torch.empty(0, dtype=torch.uint8)

    def __init__(self, extent_bytes: int) -> None:
        self.mapped: set[int] = set()
        self.ahead: set[int] = set()
        self.calls = 0
        self.refusals = 0  # the number of next calls that fail
        self._extent_bytes = extent_bytes

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        assert num_bytes == self._extent_bytes
        assert offset_bytes not in self.mapped
        if self.refusals:
            self.refusals -= 1
            raise OutOfMemory("refused")
        self.mapped.add(offset_bytes)
        self.ahead.discard(offset_bytes)
        self.calls += 1

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None:
        assert num_bytes == self._extent_bytes
        assert offset_bytes not in self.mapped | self.ahead
        self.ahead.add(offset_bytes)

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        assert num_bytes == self._extent_bytes
        if offset_bytes in self.ahead:
            self.ahead.remove(offset_bytes)
            return
        self.mapped.remove(offset_bytes)
        self.calls += 1

    def close(self) -> None: ...


def a_layout(states_per_extent: int) -> Layout:
    """An extent has `states_per_extent` states or blobs of 24 bytes, or 3 times as many pages of 8."""
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    layout = layout_of((linear, attention), 1, extent_bytes_min=24 * states_per_extent, granule_bytes=1)
    assert (layout.pages_per_extent, layout.states_per_extent) == (3 * states_per_extent, states_per_extent)
    return replace(layout, others=(ObjectClass("blobs", 24, states_per_extent, shared=True),))


def an_entry(number: int) -> Entry:
    return Entry(PageKey(bytes([number])), None, 1, PageId(number))


@dataclass
class Held:
    """The pins and the owners of an object."""

    pins: int = 1
    owners: list[Entry] = field(default_factory=list[Entry])


class PoolModel:
    """The model of a pool. The extent of an id follows from the id."""

    def __init__(self, pool: Pool[Any]) -> None:
        self.pool = pool
        self.objects: dict[int, Held] = {}

    @property
    def by_extent(self) -> Counter[int]:
        return Counter(taken // self.pool.objects_per_extent for taken in self.objects)

    def take(self, *, may_open: bool) -> None:
        """Take an id, and assert that it is from the fullest extent, or else from an empty one."""
        taken = self.by_extent
        fullest = max(
            (count for count in taken.values() if count < self.pool.objects_per_extent), default=None
        )
        try:
            fresh = self.pool.take()
        except OutOfMemory:
            assert fullest is None
            assert not may_open
            return
        assert fresh not in self.objects
        assert taken.get(self.pool.extent_of(fresh)) == fullest
        assert fullest is not None or may_open
        self.objects[fresh] = Held()

    def change(self, choice: int, action: Action) -> None:
        """Add or remove a pin or an owner, where the class allows it."""
        taken, held = list(self.objects.items())[choice % len(self.objects)]
        if action == "pin":
            self.pool.pin(taken)
            held.pins += 1
        elif action == "unpin" and held.pins:
            self.pool.unpin(taken)
            held.pins -= 1
        elif action == "own" and held.pins and (self.pool.shared or not held.owners):
            held.owners.append(an_entry(choice % 256))
            self.pool.own(taken, held.owners[-1])
        elif action == "disown" and held.owners:
            self.pool.disown(taken, held.owners.pop(choice % len(held.owners)))
        if not (held.pins or held.owners):
            del self.objects[taken]

    def check(self) -> list[int]:
        pinned = {taken for taken, held in self.objects.items() if held.pins}
        taken, pins = self.by_extent, Counter(number // self.pool.objects_per_extent for number in pinned)
        assert self.pool.num_extents == len(taken), "an extent belongs to its class while it has objects"
        assert set(self.pool.reclaimable) == set(taken) - set(pins)
        assert (self.pool.num_pinned, self.pool.num_cached) == (len(pinned), len(self.objects) - len(pinned))
        assert self.pool.num_free == len(taken) * self.pool.objects_per_extent - taken.total()
        assert all(len(self.pool.taken_in(extent)) == count for extent, count in taken.items())
        assert all(self.pool.owners_of(number) == tuple(held.owners) for number, held in self.objects.items())
        read = Counter({number: held.pins for number, held in self.objects.items() if held.pins})
        owners = {number: dict.fromkeys(held.owners) for number, held in self.objects.items() if held.owners}
        return self.pool.check(Counter(), read, owners)


class ArenaAgainstDicts(RuleBasedStateMachine):
    @initialize(
        num_extents=st.integers(1, 14),
        budget=choices,
        states_per_extent=st.integers(1, 3),
        ahead=st.integers(0, 4),
        kept=st.integers(0, 10),
    )
    def build(self, num_extents: int, budget: int, states_per_extent: int, ahead: int, kept: int) -> None:
        self.layout = a_layout(states_per_extent)
        self.backing = FakeBacking(self.layout.extent_bytes)
        budget = budget % num_extents + 1
        self.kept = min(kept, budget)
        self.arena = Arena(self.layout, num_extents, self.backing, budget, ahead, self.kept)
        self.ahead = ahead
        self.pools = {name: PoolModel(pool) for name, pool in self.arena.pools.items()}

    @rule(name=classes, count=st.integers(1, 12))
    def take(self, name: str, count: int) -> None:
        for _ in range(count):
            self.pools[name].take(may_open=self._may_open())

    @rule(name=classes, action=st.sampled_from(ACTIONS), picks=st.lists(choices, max_size=20))
    def change(self, name: str, action: Action, picks: list[int]) -> None:
        for choice in picks:
            if self.pools[name].objects:
                self.pools[name].change(choice, action)

    @rule(names=st.lists(classes, min_size=1))
    def free_all(self, names: list[str]) -> None:
        for name in names:
            while self.pools[name].objects:
                self.pools[name].change(0, "unpin")
                if self.pools[name].objects:
                    self.pools[name].change(0, "disown")

    @rule(budget=choices)
    def resize(self, budget: int) -> None:
        budget_extents = max(self.kept, budget % self.arena.num_extents + 1)
        self.arena.resize(budget_extents)
        assert self.arena.budget_extents == budget_extents

    @rule(refusals=st.integers(0, 2))
    def refuse_next_maps(self, refusals: int) -> None:
        self.backing.refusals = refusals

    @invariant()
    def pools_match_the_model(self) -> None:
        self.arena.check(chain.from_iterable(pool.check() for pool in self.pools.values()))

    @invariant()
    def each_extent_has_one_class_and_is_mapped_while_used(self) -> None:
        used = {extent * self.layout.extent_bytes for extent in self._extents()}
        assert len(used) == len(self._extents())
        assert used <= self.backing.mapped
        assert len(self.backing.mapped - used) <= max(SPARE_EXTENTS_MAX, self.kept)
        assert len(self.backing.mapped) >= self.kept
        assert 0 in self.backing.mapped or not self.kept, "kernels get addresses in extent 0"
        budget_extents = self.arena.budget_extents
        room = max(0, self.arena.budget_extents - len(self.backing.mapped))
        assert len(self.backing.ahead) <= min(self.ahead, room), "memory beyond the budget"
        assert self.arena.excess == max(0, len(self.backing.mapped) - budget_extents)
        if self.arena.excess:
            always = {0} if self.kept else set[int]()
            assert self.backing.mapped - used <= always, "an empty extent was not unmapped"
        empty = len(self.backing.mapped - used)
        assert self.arena.num_empty == empty + max(0, budget_extents - len(self.backing.mapped))

    @invariant()
    def usage_counts_extents_and_objects(self) -> None:
        usage, mapped = self.arena.usage(), len(self.backing.mapped)
        assert usage.extents == {name: len(pool.by_extent) for name, pool in self.pools.items()}
        assert sum(usage.extents.values()) + usage.empty_extents == mapped
        assert usage.unmapped_extents == max(0, self.arena.budget_extents - mapped)
        for name, pool in self.pools.items():
            pinned = sum(held.pins > 0 for held in pool.objects.values())
            assert (usage.pinned[name], usage.cached[name]) == (pinned, len(pool.objects) - pinned)

    def _extents(self) -> list[int]:
        return list(chain.from_iterable(pool.by_extent for pool in self.pools.values()))

    def _may_open(self) -> bool:
        """Return whether an extent is empty, or the system grants one."""
        used, mapped = len(self._extents()), len(self.backing.mapped)
        return mapped > used or (mapped < self.arena.budget_extents and not self.backing.refusals)


TestArenaAgainstDicts = ArenaAgainstDicts.TestCase
TestArenaAgainstDicts.settings = settings(
    deadline=None, derandomize=True, max_examples=150, stateful_step_count=40
)


def an_arena(num_extents: int, states_per_extent: int = 1, *rest: int) -> tuple[Arena, FakeBacking]:
    """`rest` is the budget, the extents ahead and those that are kept."""
    layout = a_layout(states_per_extent)
    backing = FakeBacking(layout.extent_bytes)
    return Arena(layout, num_extents, backing, *rest), backing


def test_arena_maps_the_next_extents_ahead_of_need() -> None:
    arena, backing = an_arena(8, 1, 2, 2)
    extent_bytes = a_layout(1).extent_bytes
    assert not backing.ahead, "the ranks may not be ready"
    arena.resize(4)
    for extent in range(4):
        ahead = {number * extent_bytes for number in range(extent, min(extent + 2, 4))}
        assert backing.ahead == ahead
        arena.pools[STATES].take()
        assert extent * extent_bytes in backing.mapped
    assert not backing.ahead
    arena.resize(6)
    assert len(backing.ahead) == 2
    arena.resize(5)
    assert len(backing.ahead) == 1


def test_arena_maps_ahead_again_when_half_is_left() -> None:
    arena, backing = an_arena(16, 1, 16, 4)
    arena.pools[STATES].take()
    left: list[int] = []
    for _ in range(8):
        left.append(len(backing.ahead))
        arena.pools[STATES].take()
    assert left == [4, 3, 4, 3, 4, 3, 4, 3]
    arena.resize(11)  # two of those that were ahead are beyond it
    assert len(backing.ahead) == 2


def test_arena_does_not_remap_under_a_fluctuating_load() -> None:
    arena, backing = an_arena(SPARE_EXTENTS_MAX)
    for _ in range(5):
        for page in [arena.pools[PAGES].take() for _ in range(3 * SPARE_EXTENTS_MAX)]:
            arena.pools[PAGES].unpin(page)
    assert backing.calls == SPARE_EXTENTS_MAX


class Buckets(list[dict[int, None]]):
    """Counts the accesses to buckets."""

    looks = 0

    def __getitem__(self, index: int) -> dict[int, None]:  # pyrefly: ignore[bad-override]  never sliced
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("num_extents", [10, 1000])
def test_pool_take_and_free_are_amortised_constant(num_extents: int) -> None:
    """Count accesses to buckets, instead of time, while the fullest extent empties and fills."""
    arena, _ = an_arena(num_extents, 8)
    buckets = arena.pools[PAGES]._buckets = Buckets(arena.pools[PAGES]._buckets)
    pages = [arena.pools[PAGES].take() for _ in range(arena.pools[PAGES].objects_per_extent * num_extents)]
    for page in [*pages[::2], *pages[1::4]]:
        arena.pools[PAGES].unpin(page)
    again = [arena.pools[PAGES].take() for _ in range(len(pages) // 2)]
    operations = len(pages) + len(pages) // 2 + len(pages[1::4]) + len(again)
    assert buckets.looks <= 6 * operations


def test_pool_asserts_that_each_pin_and_owner_is_removed_once() -> None:
    arena, _ = an_arena(1)
    pages, owner = arena.pools[PAGES], an_entry(1)
    freed, cached = pages.take(), pages.take()
    pages.unpin(freed)
    pages.own(cached, owner)
    pages.unpin(cached)
    for wrong in (
        lambda: pages.unpin(freed),
        lambda: pages.pin(freed),
        lambda: pages.own(freed, owner),
        lambda: pages.unpin(cached),
        lambda: pages.disown(cached, an_entry(2)),
    ):
        with pytest.raises(AssertionError):
            wrong()
    pages.pin(cached)
    with pytest.raises(AssertionError, match="has an owner"):
        pages.own(cached, an_entry(2))


@pytest.mark.parametrize("name", [PAGES, "blobs"])
def test_pool_check_finds_leaks_and_double_owners(name: str) -> None:
    arena, _ = an_arena(2)
    pool, owner = arena.pools[name], an_entry(1)
    leased, cached = pool.take(), pool.take()
    pool.own(cached, owner)
    pool.unpin(cached)
    owners = {cached: {owner: None}}
    pool.check(Counter([leased]), Counter(), owners)
    for wrong in (
        (Counter[int](), Counter[int](), owners),
        (Counter([leased, leased]), Counter[int](), owners),
        (Counter([leased]), Counter([cached]), owners),
        (Counter([leased]), Counter[int](), dict[int, dict[Entry, None]]()),
        (Counter([leased]), Counter[int](), {cached: {an_entry(2): None}}),
        (Counter([leased]), Counter[int](), {cached: {owner: None, an_entry(2): None}}),
    ):
        with pytest.raises(AssertionError):
            pool.check(*wrong)


def test_only_objects_of_a_shared_class_have_several_leases_and_owners() -> None:
    arena, _ = an_arena(2)
    owners = {an_entry(1): None, an_entry(2): None}
    blobs, states = arena.pools["blobs"], arena.pools[STATES]
    blob, state = blobs.take(), states.take()
    for pool, taken in ((blobs, blob), (states, state)):
        pool.pin(taken)
        pool.own(taken, next(iter(owners)))
    blobs.own(blob, list(owners)[1])
    blobs.check(Counter([blob, blob]), Counter(), {blob: owners})
    with pytest.raises(AssertionError, match="own an object"):
        states.check(Counter([state, state]), Counter(), {state: {next(iter(owners)): None}})
    first, second = owners
    blobs.disown(blob, first)
    assert blobs.owners_of(blob) == (second,)
