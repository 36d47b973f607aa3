"""Extents hold pages, or states, or nothing, and follow the demand; compared with a model of sets."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.kvstore.arena import SPARE_EXTENTS_MAX, Arena
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.layout import Attention, Layout, Linear, PageId, StateId, layout_of

Place = TypeVar("Place", PageId, StateId)


class Maps:
    """A backing without memory that knows which extents are mapped, by their first byte."""

    memory = torch.empty(0, dtype=torch.uint8)

    def __init__(self, extent_bytes: int) -> None:
        self.mapped: set[int] = set()
        self.calls = 0
        self._extent_bytes = extent_bytes

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        assert num_bytes == self._extent_bytes
        assert offset_bytes not in self.mapped
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


class ArenaAgainstSets(RuleBasedStateMachine):
    """The ids that are taken, per class; which extent they are in follows from the ids."""

    @initialize(num_extents=st.integers(1, 14), states_per_extent=st.integers(1, 3), hybrid=st.booleans())
    def build(self, num_extents: int, states_per_extent: int, hybrid: bool) -> None:  # noqa: FBT001  drawn
        self.layout = a_layout(states_per_extent, hybrid=hybrid)
        self.maps = Maps(self.layout.extent_bytes)
        self.arena = Arena(self.layout, num_extents, self.maps)
        self.num_extents = num_extents
        self.pages: list[PageId] = []
        self.states: list[StateId] = []

    @rule(count=st.integers(1, 12))
    def take_pages(self, count: int) -> None:
        for _ in range(count):
            page = self._take(self.arena.take_page, self._pages_by_extent(), self.layout.pages_per_extent)
            self.pages += [] if page is None else [page]

    @precondition(lambda self: self.layout.hybrid)
    @rule(count=st.integers(1, 4))
    def take_states(self, count: int) -> None:
        for _ in range(count):
            state = self._take(self.arena.take_state, self._states_by_extent(), self.layout.states_per_extent)
            self.states += [] if state is None else [state]

    @rule(places=st.lists(st.integers(0, 999), max_size=30))
    def give_pages(self, places: list[int]) -> None:
        for place in places[: len(self.pages)]:
            self.arena.give_page(self.pages.pop(place % len(self.pages)))

    @rule(places=st.lists(st.integers(0, 999), max_size=10))
    def give_states(self, places: list[int]) -> None:
        for place in places[: len(self.states)]:
            self.arena.give_state(self.states.pop(place % len(self.states)))

    @invariant()
    def usage_says_what_is_taken(self) -> None:
        self.arena.check(self.pages, self.states)
        usage = self.arena.usage()
        assert (usage.pages_taken, usage.states_taken) == (len(self.pages), len(self.states))
        assert usage.page_extents == len(self._pages_by_extent())
        assert usage.state_extents == len(self._states_by_extent())
        assert usage.page_extents + usage.state_extents + usage.empty_extents == self.num_extents

    @invariant()
    def an_extent_has_one_class_and_is_mapped_while_it_is_used(self) -> None:
        pages, states = self._pages_by_extent(), self._states_by_extent()
        assert pages.keys().isdisjoint(states)
        used = {extent * self.layout.extent_bytes for extent in (*pages, *states)}
        assert used <= self.maps.mapped
        assert len(self.maps.mapped - used) <= SPARE_EXTENTS_MAX

    def _take(self, take: Callable[[], Place], taken: Counter[int], places: int) -> Place | None:
        """Take one; the fullest extent of the class must serve it, or an empty one, or nothing can."""
        fullest = max((count for count in taken.values() if count < places), default=None)
        used = len(self._pages_by_extent()) + len(self._states_by_extent())
        try:
            place = take()
        except OutOfMemory:
            assert fullest is None
            assert used == self.num_extents
            return None
        assert taken.get(place // places) == fullest
        return place

    def _pages_by_extent(self) -> Counter[int]:
        return Counter(page // self.layout.pages_per_extent for page in self.pages)

    def _states_by_extent(self) -> Counter[int]:
        return Counter(state // self.layout.states_per_extent for state in self.states)


TestArenaAgainstSets = ArenaAgainstSets.TestCase
TestArenaAgainstSets.settings = settings(
    deadline=None, derandomize=True, max_examples=60, stateful_step_count=25
)


def test_an_empty_extent_changes_class() -> None:
    layout = a_layout(2)
    arena = Arena(layout, 1, Maps(layout.extent_bytes))
    pages = [arena.take_page() for _ in range(6)]
    with pytest.raises(OutOfMemory):
        arena.take_state()
    for page in pages[1:]:
        arena.give_page(page)
    with pytest.raises(OutOfMemory):
        arena.take_state()
    arena.give_page(pages[0])
    states = [arena.take_state(), arena.take_state()]
    with pytest.raises(OutOfMemory):
        arena.take_page()
    arena.check([], states)


def test_a_workload_that_breathes_does_not_map_at_every_breath() -> None:
    layout = a_layout(1)
    maps = Maps(layout.extent_bytes)
    arena = Arena(layout, SPARE_EXTENTS_MAX, maps)
    for _ in range(5):
        for page in [arena.take_page() for _ in range(3 * SPARE_EXTENTS_MAX)]:
            arena.give_page(page)
    assert maps.calls == SPARE_EXTENTS_MAX


def test_idle_extents_go_back_to_the_system() -> None:
    layout = a_layout(1)
    maps = Maps(layout.extent_bytes)
    arena = Arena(layout, 20, maps)
    for page in [arena.take_page() for _ in range(60)]:
        arena.give_page(page)
    assert len(maps.mapped) == SPARE_EXTENTS_MAX


def test_giving_back_twice_is_a_bug() -> None:
    layout = a_layout(1)
    arena = Arena(layout, 1, Maps(layout.extent_bytes))
    page = arena.take_page()
    arena.give_page(page)
    with pytest.raises(AssertionError, match="twice"):
        arena.give_page(page)


@pytest.mark.parametrize(
    ("pages", "states", "problem"),
    [
        (2, 1, "page has two owners"),
        (1, 2, "state has two owners"),
        (0, 1, "page leaked"),
        (1, 0, "state leaked"),
    ],
)
def test_check_finds_what_is_wrong(pages: int, states: int, problem: str) -> None:
    layout = a_layout(1)
    arena = Arena(layout, 2, Maps(layout.extent_bytes))
    page, state = arena.take_page(), arena.take_state()
    arena.check([page], [state])
    with pytest.raises(AssertionError, match=problem):
        arena.check([page] * pages, [state] * states)
