"""Both prefix tables answer like sets of keys; test_compiled.py compares one with the other."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.router.compiled import CompiledPrefixes, load
from tidemill.cluster.router.fleet_view import PrefixTable
from tidemill.cluster.router.prefix_table import LOG_SLACK, Chain, Prefixes, cut_keys

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
SLOTS = 5
MANY = 1 << 20

TableMaker = Callable[[], PrefixTable]


@pytest.fixture(scope="module", params=["definition", "compiled"])
def new_table(request: pytest.FixtureRequest, kernel_cache: Path) -> TableMaker:
    if request.param == "definition":
        return Prefixes
    compiled = load(kernel_cache)
    return lambda: CompiledPrefixes(compiled)


def names(numbers: list[int]) -> list[bytes]:
    return [number.to_bytes(8, "big") for number in numbers]


def cut(numbers: list[int]) -> set[int]:
    return set(cut_keys(names(numbers)).tolist())


def held(table: PrefixTable, slot: int) -> set[int]:
    return set(table.held(slot).tolist())


operations = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add_chain", "remove", "clear"]),
        st.integers(0, SLOTS - 1),
        st.lists(st.integers(0, 30), max_size=20),
    ),
    max_size=30,
)


@PROPERTY
@given(operations, st.lists(st.integers(0, 30), max_size=12))
def test_prefix_table_is_a_set_of_keys_per_slot(
    new_table: TableMaker, steps: list[tuple[str, int, list[int]]], chain: list[int]
) -> None:
    table, model = new_table(), [set[int]() for _ in range(SLOTS)]
    for operation, slot, numbers in steps:
        keys = cut_keys(names(numbers))
        match operation:
            case "add":
                table.add(slot, keys, MANY)
                model[slot] |= set(numbers)
            case "add_chain":
                table.add_chain(slot, Chain(keys), MANY)
                model[slot] |= set(numbers)
            case "remove":
                table.remove(slot, keys)
                model[slot] -= set(numbers)
            case _:
                table.clear(slot)
                model[slot].clear()
        assert [table.num_held(slot) for slot in range(SLOTS)] == [len(numbers) for numbers in model]
    assert [held(table, slot) for slot in range(SLOTS)] == [cut(sorted(numbers)) for numbers in model]
    depths = table.depths(Chain(cut_keys(names(chain))), SLOTS + 1)
    for slot, numbers in enumerate([*model, set[int]()]):
        deepest = [depth for depth, number in enumerate(chain, start=1) if number in numbers]
        assert depths[slot] == max(deepest, default=0)


def test_prefix_table_forgets_the_oldest_keys_first_within_its_bound(new_table: TableMaker) -> None:
    table, most = new_table(), 2000
    for batch in range(60):
        table.add(0, cut_keys(names([7_000])), most)  # added again, so that it stays
        table.add(0, cut_keys(names(list(range(100 * batch, 100 * batch + 100)))), most)
        table.add(1, cut_keys(names([7])), most)
        assert table.num_held(0) <= most + most // 4 + LOG_SLACK
    assert cut([*range(4001, 6000), 7_000]) <= held(table, 0)
    assert cut(list(range(2000))).isdisjoint(held(table, 0))
    assert held(table, 1) == cut([7]), "the keys of another slot"


def test_compiled_prefix_table_bounds_its_memory(kernel_cache: Path) -> None:
    table, rng = CompiledPrefixes(load(kernel_cache)), np.random.default_rng(1)
    for _ in range(200):
        keys = rng.integers(1, 1 << 63, 1000, dtype=np.uint64)
        table.add(0, keys, 10_000)
        table.remove(0, keys[:900])
    assert table.num_bytes < 20_000 * 40


def test_prefix_table_takes_zero_and_short_keys(new_table: TableMaker) -> None:
    table = new_table()
    keys = cut_keys([b"\0" * 8, b"a", b"b"])
    table.add(2, keys[:2], MANY)
    assert table.depths(Chain(keys), 3).tolist() == [0, 0, 2]
    table.remove(2, keys[1:2])
    assert table.depths(Chain(keys), 3).tolist() == [0, 0, 1]
    assert table.depths(Chain(keys[:0]), 3).tolist() == [0, 0, 0]
    table.remove(0, keys)
    table.clear(0)
    table.add(0, keys[:0], MANY)
    assert not table.num_held(0)
    assert not len(table.held(0))
