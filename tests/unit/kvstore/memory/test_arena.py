"""Extents hold pages, or states, or nothing, and follow the demand; compared with a model of dictionaries."""

# The looks into buckets are no part of any interface.
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


class Maps:
    """A backing without memory that knows which extents are mapped, by their first byte."""

    memory = torch.empty(0, dtype=torch.uint8)

    def __init__(self, extent_bytes: int) -> None:
        self.mapped: set[int] = set()
        self.calls = 0
        self.refusals = 0  # how many more times it says no
        self._extent_bytes = extent_bytes

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        assert num_bytes == self._extent_bytes
        assert offset_bytes not in self.mapped
        if self.refusals:
            self.refusals -= 1
            raise OutOfMemory("refused")
        self.mapped.add(offset_bytes)
        self.calls += 1

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        assert num_bytes == self._extent_bytes
        self.mapped.remove(offset_bytes)
        self.calls += 1

    def close(self) -> None: ...


def a_layout(states_per_extent: int, *, hybrid: bool = True) -> Layout:
    """8 bytes per page, 24 per state: three pages or one state, `states_per_extent` times."""
    linear = Linear(key_heads=1, value_heads=1, key_dim=1, value_dim=2, conv_width=2)
    attention = Attention(kv_heads=1, head_dim=1)
    layers = (linear, attention) if hybrid else (attention,)
    layout = layout_of(layers, 1, extent_bytes_min=24 * states_per_extent, granule_bytes=1)
    assert layout.pages_per_extent == 3 * states_per_extent
    assert layout.states_per_extent == (states_per_extent if hybrid else 0)
    return layout


class Owners(Generic[Id]):
    """What the model knows of a class: who has which id. The extent of an id follows from the id."""

    def __init__(self, pool: Pool[Id]) -> None:
        self.pool = pool
        self.held: dict[Id, None] = {}
        self.kept: dict[Id, None] = {}

    @property
    def by_extent(self) -> Counter[int]:
        return Counter(taken // self.pool.objects_per_extent for taken in (*self.held, *self.kept))

    def take(self, *, may_open: bool) -> Id | None:
        """The fullest extent of the class must serve it, or one that was empty, or nothing can."""
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
        assert fresh not in self.held
        assert fresh not in self.kept
        assert taken.get(self.pool.extent_of(fresh)) == fullest
        assert fullest is not None or may_open
        self.held[fresh] = None
        return fresh

    def give(self, choice: int, *, kept: bool) -> None:
        owners = self.kept if kept else self.held
        if owners:
            given = list(owners)[choice % len(owners)]
            del owners[given]
            self.pool.free(given)

    def loosen(self, choice: int) -> None:
        if self.held:
            chosen = list(self.held)[choice % len(self.held)]
            del self.held[chosen]
            self.kept[chosen] = None
            self.pool.unpin(chosen)

    def hold(self, choice: int) -> None:
        if self.kept:
            chosen = list(self.kept)[choice % len(self.kept)]
            del self.kept[chosen]
            self.held[chosen] = None
            self.pool.pin(chosen)

    def check(self) -> None:
        taken, holders = self.by_extent, Counter(held // self.pool.objects_per_extent for held in self.held)
        assert self.pool.num_extents == len(taken), "an extent is of this class while something is in it"
        assert set(self.pool.reclaimable) == set(taken) - set(holders)
        assert (self.pool.num_pinned, self.pool.num_cached) == (len(self.held), len(self.kept))
        assert self.pool.num_free == len(taken) * self.pool.objects_per_extent - taken.total()
        for extent, count in taken.items():
            assert len(self.pool.taken_in(extent)) == count


class ArenaAgainstDicts(RuleBasedStateMachine):
    @initialize(
        num_extents=st.integers(1, 14),
        budget=choices,
        states_per_extent=st.integers(1, 3),
        hybrid=st.booleans(),
    )
    def build(self, num_extents: int, budget: int, states_per_extent: int, hybrid: bool) -> None:  # noqa: FBT001  drawn
        self.layout = a_layout(states_per_extent, hybrid=hybrid)
        self.maps = Maps(self.layout.extent_bytes)
        self.arena = Arena(self.layout, num_extents, self.maps, budget % num_extents + 1)
        self.pages: Owners[PageId] = Owners(self.arena.pages)
        self.states: Owners[StateId] = Owners(self.arena.states)

    @rule(count=st.integers(1, 12))
    def take_pages(self, count: int) -> None:
        for _ in range(count):
            self.pages.take(may_open=self._may_open())

    @precondition(lambda self: self.layout.hybrid)
    @rule(count=st.integers(1, 4))
    def take_states(self, count: int) -> None:
        for _ in range(count):
            self.states.take(may_open=self._may_open())

    @rule(pages=st.booleans(), kept=st.booleans(), which=st.lists(choices, max_size=20))
    def give(self, pages: bool, kept: bool, which: list[int]) -> None:  # noqa: FBT001  drawn
        for choice in which:
            (self.pages if pages else self.states).give(choice, kept=kept)

    @rule(pages=st.booleans())
    def give_all(self, pages: bool) -> None:  # noqa: FBT001  drawn
        owners = self.pages if pages else self.states
        while owners.held or owners.kept:
            owners.give(0, kept=not owners.held)

    @rule(pages=st.booleans(), which=st.lists(choices, max_size=8))
    def loosen(self, pages: bool, which: list[int]) -> None:  # noqa: FBT001  drawn
        for choice in which:
            (self.pages if pages else self.states).loosen(choice)

    @rule(pages=st.booleans(), which=st.lists(choices, max_size=4))
    def hold(self, pages: bool, which: list[int]) -> None:  # noqa: FBT001  drawn
        for choice in which:
            (self.pages if pages else self.states).hold(choice)

    @rule(budget=choices)
    def resize(self, budget: int) -> None:
        budget_extents = budget % self.arena.num_extents + 1
        self.arena.resize(budget_extents)
        assert self.arena.budget_extents == budget_extents

    @rule(refusals=st.integers(0, 2))
    def the_system_has_no_memory_for_a_moment(self, refusals: int) -> None:
        self.maps.refusals = refusals

    @invariant()
    def exactly_what_was_taken_is_taken(self) -> None:
        self.pages.check()
        self.states.check()
        self.arena.check(
            (list(self.pages.held), list(self.pages.kept)), (list(self.states.held), list(self.states.kept))
        )

    @invariant()
    def an_extent_has_one_class_and_is_mapped_while_it_is_used(self) -> None:
        pages, states = self.pages.by_extent, self.states.by_extent
        assert pages.keys().isdisjoint(states)
        used = {extent * self.layout.extent_bytes for extent in (*pages, *states)}
        assert used <= self.maps.mapped
        assert len(self.maps.mapped - used) <= SPARE_EXTENTS_MAX
        budget_extents = self.arena.budget_extents
        assert self.arena.excess == max(0, len(self.maps.mapped) - budget_extents)
        assert not self.arena.excess or used == self.maps.mapped, "above the budget only what is not empty"
        assert self.arena.num_empty == max(0, budget_extents - len(used))

    @invariant()
    def usage_says_it(self) -> None:
        usage, mapped = self.arena.usage(), len(self.maps.mapped)
        assert (usage.page_extents, usage.state_extents) == (
            len(self.pages.by_extent),
            len(self.states.by_extent),
        )
        assert usage.page_extents + usage.state_extents + usage.empty_extents == mapped
        assert usage.unmapped_extents == max(0, self.arena.budget_extents - mapped)
        assert (usage.pages_pinned, usage.pages_cached) == (len(self.pages.held), len(self.pages.kept))
        assert (usage.states_pinned, usage.states_cached) == (len(self.states.held), len(self.states.kept))

    def _may_open(self) -> bool:
        """An empty extent is there, or the system grants one."""
        used = len(self.pages.by_extent) + len(self.states.by_extent)
        spare = len(self.maps.mapped) - used
        return spare > 0 or (len(self.maps.mapped) < self.arena.budget_extents and not self.maps.refusals)


TestArenaAgainstDicts = ArenaAgainstDicts.TestCase
TestArenaAgainstDicts.settings = settings(
    deadline=None, derandomize=True, max_examples=150, stateful_step_count=40
)


def an_arena(num_extents: int, states_per_extent: int = 1) -> tuple[Arena, Maps]:
    layout = a_layout(states_per_extent)
    maps = Maps(layout.extent_bytes)
    return Arena(layout, num_extents, maps), maps


def test_an_extent_changes_class_the_moment_it_is_empty() -> None:
    arena, maps = an_arena(1, 2)
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
    assert maps.calls == 1, "without a trip to the system"


def test_holes_may_be_anywhere() -> None:
    arena, _ = an_arena(9)
    pages = [arena.pages.take() for _ in range(27)]
    for extent in (1, 4, 7):
        for page in pages[3 * extent : 3 * extent + 3]:
            arena.pages.free(page)
    states = [arena.states.take() for _ in range(3)]
    assert {arena.states.extent_of(state) for state in states} == {1, 4, 7}
    with pytest.raises(OutOfMemory):
        arena.states.take()


def test_the_budget_shrinks_whatever_lies_where() -> None:
    arena, maps = an_arena(6)
    pages = [arena.pages.take() for _ in range(18)]
    arena.resize(2)
    assert arena.excess == 4
    for gone, extent in enumerate((3, 0, 5, 2), 1):
        for page in pages[3 * extent : 3 * extent + 3]:
            arena.pages.free(page)
        assert (arena.excess, len(maps.mapped)) == (4 - gone, 6 - gone)
    with pytest.raises(OutOfMemory):
        arena.states.take()
    arena.resize(3)
    arena.states.take()
    assert len(maps.mapped) == 3


def test_a_smaller_budget_gives_empty_extents_back_at_once() -> None:
    arena, maps = an_arena(6)
    pages = [arena.pages.take() for _ in range(15)]
    for page in pages[:9]:
        arena.pages.free(page)
    assert (len(maps.mapped), arena.num_empty) == (5, 4)
    arena.resize(3)
    assert (len(maps.mapped), arena.num_empty) == (3, 1)
    arena.resize(1)
    assert (len(maps.mapped), arena.excess) == (2, 1)
    arena.check((pages[9:], []), ([], []))


def test_an_extent_that_the_system_refuses_is_not_lost() -> None:
    arena, maps = an_arena(3)
    for _ in range(3):
        maps.refusals = 1
        with pytest.raises(OutOfMemory, match="refused"):
            arena.states.take()
        arena.states.take()
    assert len(maps.mapped) == 3


def test_a_workload_that_breathes_does_not_map_at_every_breath() -> None:
    arena, maps = an_arena(SPARE_EXTENTS_MAX)
    for _ in range(5):
        for page in [arena.pages.take() for _ in range(3 * SPARE_EXTENTS_MAX)]:
            arena.pages.free(page)
    assert maps.calls == SPARE_EXTENTS_MAX


def test_idle_extents_go_back_to_the_system() -> None:
    arena, maps = an_arena(20)
    for page in [arena.pages.take() for _ in range(60)]:
        arena.pages.free(page)
    assert len(maps.mapped) == SPARE_EXTENTS_MAX


class Buckets(list[dict[int, None]]):
    """Counts how often somebody looks into one."""

    looks = 0

    def __getitem__(self, index: int) -> dict[int, None]:  # type: ignore[override]  never sliced
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("num_extents", [10, 1000])
def test_taking_and_giving_are_amortised_constant(num_extents: int) -> None:
    """Counted, not timed: the looks into buckets, while the fullest extent empties and fills."""
    arena, _ = an_arena(num_extents, 8)
    buckets = arena.pages._buckets = Buckets(arena.pages._buckets)
    pages = [arena.pages.take() for _ in range(arena.pages.objects_per_extent * num_extents)]
    for page in [*pages[::2], *pages[1::4]]:
        arena.pages.free(page)
    again = [arena.pages.take() for _ in range(len(pages) // 2)]
    operations = len(pages) + len(pages) // 2 + len(pages[1::4]) + len(again)
    assert buckets.looks <= 6 * operations


def test_giving_back_twice_is_a_bug() -> None:
    arena, _ = an_arena(1)
    page, _ = arena.pages.take(), arena.pages.take()
    arena.pages.free(page)
    with pytest.raises(AssertionError, match="twice"):
        arena.pages.free(page)


def test_what_is_kept_is_not_kept_twice() -> None:
    arena, _ = an_arena(1)
    page = arena.pages.take()
    arena.pages.unpin(page)
    with pytest.raises(AssertionError):
        arena.pages.unpin(page)


@pytest.mark.parametrize(
    ("held", "kept", "problem"),
    [(2, 1, "leaked or has two"), (0, 1, "leaked or has two"), (1, 2, "two"), (1, 0, "without an owner")],
)
def test_check_finds_what_is_wrong(held: int, kept: int, problem: str) -> None:
    arena, _ = an_arena(2)
    page, other, state = arena.pages.take(), arena.pages.take(), arena.states.take()
    arena.pages.unpin(other)
    arena.check(([page], [other]), ([state], []))
    with pytest.raises(AssertionError, match=problem):
        arena.check(([page] * held, [other] * kept), ([state], []))
