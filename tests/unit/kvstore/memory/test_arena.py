"""The arena against a model of dictionaries: its extents follow the demand of the classes."""

# The test counts accesses to private buckets.
# pyright: reportPrivateUsage=false

from collections import Counter
from typing import Generic

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Attention, Layout, Linear, PageId, StateId, layout_of
from tidemill.kvstore.memory.arena import SPARE_EXTENTS_MAX, Arena, Id, Pool

choices = st.integers(0, 999)


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


def a_layout(states_per_extent: int, *, hybrid: bool = True) -> Layout:
    """An extent has `states_per_extent` states of 24 bytes, or 3 times as many pages of 8."""
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    layers = (linear, attention) if hybrid else (attention,)
    layout = layout_of(layers, 1, extent_bytes_min=24 * states_per_extent, granule_bytes=1)
    assert layout.pages_per_extent == 3 * states_per_extent
    assert layout.states_per_extent == (states_per_extent if hybrid else 0)
    return layout


class PoolModel(Generic[Id]):
    """The model of a pool: its pinned and cached ids. The extent of an id follows from the id."""

    def __init__(self, pool: Pool[Id]) -> None:
        self.pool = pool
        self.pinned: dict[Id, None] = {}
        self.cached: dict[Id, None] = {}

    @property
    def by_extent(self) -> Counter[int]:
        return Counter(taken // self.pool.objects_per_extent for taken in (*self.pinned, *self.cached))

    def take(self, *, may_open: bool) -> Id | None:
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
            return None
        assert fresh not in self.pinned
        assert fresh not in self.cached
        assert taken.get(self.pool.extent_of(fresh)) == fullest
        assert fullest is not None or may_open
        self.pinned[fresh] = None
        return fresh

    def free(self, choice: int, *, cached: bool) -> None:
        ids = self.cached if cached else self.pinned
        if ids:
            freed = list(ids)[choice % len(ids)]
            del ids[freed]
            self.pool.free(freed)

    def unpin(self, choice: int) -> None:
        if self.pinned:
            chosen = list(self.pinned)[choice % len(self.pinned)]
            del self.pinned[chosen]
            self.cached[chosen] = None
            self.pool.unpin(chosen)

    def pin(self, choice: int) -> None:
        if self.cached:
            chosen = list(self.cached)[choice % len(self.cached)]
            del self.cached[chosen]
            self.pinned[chosen] = None
            self.pool.pin(chosen)

    def check(self) -> None:
        taken = self.by_extent
        num_pinned = Counter(number // self.pool.objects_per_extent for number in self.pinned)
        assert self.pool.num_extents == len(taken), "an extent belongs to its class while it has objects"
        assert set(self.pool.reclaimable) == set(taken) - set(num_pinned)
        assert (self.pool.num_pinned, self.pool.num_cached) == (len(self.pinned), len(self.cached))
        assert self.pool.num_free == len(taken) * self.pool.objects_per_extent - taken.total()
        for extent, count in taken.items():
            assert len(self.pool.taken_in(extent)) == count


class ArenaAgainstDicts(RuleBasedStateMachine):
    @initialize(
        num_extents=st.integers(1, 14),
        budget=choices,
        states_per_extent=st.integers(1, 3),
        hybrid=st.booleans(),
        ahead=st.integers(0, 4),
        kept=st.integers(0, 10),
    )
    def build(
        self,
        num_extents: int,
        budget: int,
        states_per_extent: int,
        hybrid: bool,  # noqa: FBT001  drawn
        ahead: int,
        kept: int,
    ) -> None:
        self.layout = a_layout(states_per_extent, hybrid=hybrid)
        self.backing = FakeBacking(self.layout.extent_bytes)
        budget = budget % num_extents + 1
        self.kept = min(kept, budget)
        self.arena = Arena(self.layout, num_extents, self.backing, budget, ahead, self.kept)
        self.ahead = ahead
        self.pages: PoolModel[PageId] = PoolModel(self.arena.pages)
        self.states: PoolModel[StateId] = PoolModel(self.arena.states)

    @rule(count=st.integers(1, 12))
    def take_pages(self, count: int) -> None:
        for _ in range(count):
            self.pages.take(may_open=self._may_open())

    @precondition(lambda self: self.layout.hybrid)
    @rule(count=st.integers(1, 4))
    def take_states(self, count: int) -> None:
        for _ in range(count):
            self.states.take(may_open=self._may_open())

    @rule(pages=st.booleans(), cached=st.booleans(), picks=st.lists(choices, max_size=20))
    def free(self, pages: bool, cached: bool, picks: list[int]) -> None:  # noqa: FBT001  drawn
        for choice in picks:
            (self.pages if pages else self.states).free(choice, cached=cached)

    @rule(pages=st.booleans())
    def free_all(self, pages: bool) -> None:  # noqa: FBT001  drawn
        pool = self.pages if pages else self.states
        while pool.pinned or pool.cached:
            pool.free(0, cached=not pool.pinned)

    @rule(pages=st.booleans(), picks=st.lists(choices, max_size=8))
    def unpin(self, pages: bool, picks: list[int]) -> None:  # noqa: FBT001  drawn
        for choice in picks:
            (self.pages if pages else self.states).unpin(choice)

    @rule(pages=st.booleans(), picks=st.lists(choices, max_size=4))
    def pin(self, pages: bool, picks: list[int]) -> None:  # noqa: FBT001  drawn
        for choice in picks:
            (self.pages if pages else self.states).pin(choice)

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
        self.pages.check()
        self.states.check()
        pages = (list(self.pages.pinned), list(self.pages.cached))
        self.arena.check(pages, (list(self.states.pinned), list(self.states.cached)))

    @invariant()
    def each_extent_has_one_class_and_is_mapped_while_used(self) -> None:
        pages, states = self.pages.by_extent, self.states.by_extent
        assert pages.keys().isdisjoint(states)
        used = {extent * self.layout.extent_bytes for extent in (*pages, *states)}
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
        assert (usage.page_extents, usage.state_extents) == (
            len(self.pages.by_extent),
            len(self.states.by_extent),
        )
        assert usage.page_extents + usage.state_extents + usage.empty_extents == mapped
        assert usage.unmapped_extents == max(0, self.arena.budget_extents - mapped)
        assert (usage.pages_pinned, usage.pages_cached) == (len(self.pages.pinned), len(self.pages.cached))
        states = (len(self.states.pinned), len(self.states.cached))
        assert (usage.states_pinned, usage.states_cached) == states

    def _may_open(self) -> bool:
        """Return whether an extent is empty, or the system grants one."""
        used, mapped = len(self.pages.by_extent) + len(self.states.by_extent), len(self.backing.mapped)
        return mapped > used or (mapped < self.arena.budget_extents and not self.backing.refusals)


TestArenaAgainstDicts = ArenaAgainstDicts.TestCase
TestArenaAgainstDicts.settings = settings(
    deadline=None, derandomize=True, max_examples=150, stateful_step_count=40
)


def an_arena(num_extents: int, states_per_extent: int = 1) -> tuple[Arena, FakeBacking]:
    layout = a_layout(states_per_extent)
    backing = FakeBacking(layout.extent_bytes)
    return Arena(layout, num_extents, backing), backing


def test_arena_maps_the_next_extents_ahead_of_need() -> None:
    layout = a_layout(1)
    backing = FakeBacking(layout.extent_bytes)
    arena = Arena(layout, 8, backing, 2, ahead_extents=2)
    assert not backing.ahead, "the ranks may not be ready"
    arena.resize(4)
    for extent in range(4):
        ahead = {number * layout.extent_bytes for number in range(extent, min(extent + 2, 4))}
        assert backing.ahead == ahead
        arena.states.take()
        assert extent * layout.extent_bytes in backing.mapped
    assert not backing.ahead
    arena.resize(6)
    assert len(backing.ahead) == 2
    arena.resize(5)
    assert len(backing.ahead) == 1


def test_arena_maps_ahead_again_when_half_is_left() -> None:
    layout = a_layout(1)
    backing = FakeBacking(layout.extent_bytes)
    arena = Arena(layout, 16, backing, 16, ahead_extents=4)
    arena.states.take()
    left: list[int] = []
    for _ in range(8):
        left.append(len(backing.ahead))
        arena.states.take()
    assert left == [4, 3, 4, 3, 4, 3, 4, 3]
    arena.resize(11)  # two of those that were ahead are beyond it
    assert len(backing.ahead) == 2


def test_arena_of_a_device_keeps_its_floor() -> None:
    """More empty extents stay mapped than elsewhere, and the first is the first to be used."""
    layout = a_layout(1)
    backing = FakeBacking(layout.extent_bytes)
    arena = Arena(layout, 14, backing, 14, kept_extents=11)
    assert len(backing.mapped) == 11
    states = [arena.states.take() for _ in range(13)]
    assert arena.states.extent_of(states[0]) == 0
    for state in states:
        arena.states.free(state)
    assert len(backing.mapped) == 11
    arena.resize(11)
    arena.check(([], []), ([], []))
    assert 0 in backing.mapped


def test_pool_takes_from_the_fullest_extent() -> None:
    arena, _ = an_arena(2, 2)
    pages = [arena.pages.take() for _ in range(9)]  # 6 in the first extent
    arena.pages.free(pages[0])
    assert arena.pages.take() == pages[0]
    arena.pages.free(pages[0])
    arena.pages.free(pages[1])
    assert [arena.pages.extent_of(arena.pages.take()) for _ in range(3)] == [0, 0, 1]


def test_arena_reuses_an_extent_for_another_class_when_it_is_empty() -> None:
    arena, backing = an_arena(1, 2)
    pages = [arena.pages.take() for _ in range(6)]
    for page in pages[1:]:
        arena.pages.free(page)
        with pytest.raises(OutOfMemory):
            arena.states.take()
    arena.pages.free(pages[0])
    states = [arena.states.take(), arena.states.take()]
    with pytest.raises(OutOfMemory):
        arena.pages.take()
    arena.check(([], []), (states, []))
    assert backing.calls == 1, "the extent was remapped"


def test_arena_keeps_working_with_unmapped_extents_anywhere() -> None:
    arena, _ = an_arena(9)
    pages = [arena.pages.take() for _ in range(27)]
    for extent in (1, 4, 7):
        for page in pages[3 * extent : 3 * extent + 3]:
            arena.pages.free(page)
    states = [arena.states.take() for _ in range(3)]
    assert {arena.states.extent_of(state) for state in states} == {1, 4, 7}
    with pytest.raises(OutOfMemory):
        arena.states.take()


def test_arena_shrinks_to_the_budget_with_any_contents() -> None:
    arena, backing = an_arena(6)
    pages = [arena.pages.take() for _ in range(18)]
    arena.resize(2)
    assert arena.excess == 4
    for num_freed, extent in enumerate((3, 0, 5, 2), 1):
        for page in pages[3 * extent : 3 * extent + 3]:
            arena.pages.free(page)
        assert (arena.excess, len(backing.mapped)) == (4 - num_freed, 6 - num_freed)
    with pytest.raises(OutOfMemory):
        arena.states.take()
    arena.resize(3)
    arena.states.take()
    assert len(backing.mapped) == 3


def test_arena_unmaps_empty_extents_when_the_budget_shrinks() -> None:
    arena, backing = an_arena(6)
    pages = [arena.pages.take() for _ in range(15)]
    for page in pages[:9]:
        arena.pages.free(page)
    assert (len(backing.mapped), arena.num_empty) == (5, 4)
    arena.resize(3)
    assert (len(backing.mapped), arena.num_empty) == (3, 1)
    arena.resize(1)
    assert (len(backing.mapped), arena.excess) == (2, 1)
    arena.check((pages[9:], []), ([], []))


def test_arena_keeps_an_extent_when_the_system_refuses_to_map_it() -> None:
    arena, backing = an_arena(3)
    for _ in range(3):
        backing.refusals = 1
        with pytest.raises(OutOfMemory, match="refused"):
            arena.states.take()
        arena.states.take()
    assert len(backing.mapped) == 3


def test_arena_does_not_remap_under_a_fluctuating_load() -> None:
    arena, backing = an_arena(SPARE_EXTENTS_MAX)
    for _ in range(5):
        for page in [arena.pages.take() for _ in range(3 * SPARE_EXTENTS_MAX)]:
            arena.pages.free(page)
    assert backing.calls == SPARE_EXTENTS_MAX


def test_arena_unmaps_idle_extents() -> None:
    arena, backing = an_arena(20)
    for page in [arena.pages.take() for _ in range(60)]:
        arena.pages.free(page)
    assert len(backing.mapped) == SPARE_EXTENTS_MAX


class Buckets(list[dict[int, None]]):
    """Counts the accesses to buckets."""

    looks = 0

    def __getitem__(self, index: int) -> dict[int, None]:  # type: ignore[override]  never sliced
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("num_extents", [10, 1000])
def test_pool_take_and_free_are_amortised_constant(num_extents: int) -> None:
    """Count accesses to buckets, instead of time, while the fullest extent empties and fills."""
    arena, _ = an_arena(num_extents, 8)
    buckets = arena.pages._buckets = Buckets(arena.pages._buckets)
    pages = [arena.pages.take() for _ in range(arena.pages.objects_per_extent * num_extents)]
    for page in [*pages[::2], *pages[1::4]]:
        arena.pages.free(page)
    again = [arena.pages.take() for _ in range(len(pages) // 2)]
    operations = len(pages) + len(pages) // 2 + len(pages[1::4]) + len(again)
    assert buckets.looks <= 6 * operations


def test_pool_free_asserts_when_an_id_is_freed_twice() -> None:
    arena, _ = an_arena(1)
    page, _ = arena.pages.take(), arena.pages.take()
    arena.pages.free(page)
    with pytest.raises(AssertionError, match="twice"):
        arena.pages.free(page)


def test_pool_unpin_asserts_when_an_id_is_cached() -> None:
    arena, _ = an_arena(1)
    page = arena.pages.take()
    arena.pages.unpin(page)
    with pytest.raises(AssertionError):
        arena.pages.unpin(page)


@pytest.mark.parametrize(
    ("pinned", "cached", "problem"),
    [(2, 1, "leaked or has two"), (0, 1, "leaked or has two"), (1, 2, "two"), (1, 0, "without an owner")],
)
def test_pool_check_finds_leaks_and_double_owners(pinned: int, cached: int, problem: str) -> None:
    arena, _ = an_arena(2)
    page, other, state = arena.pages.take(), arena.pages.take(), arena.states.take()
    arena.pages.unpin(other)
    arena.check(([page], [other]), ([state], []))
    with pytest.raises(AssertionError, match=problem):
        arena.check(([page] * pinned, [other] * cached), ([state], []))
