"""`causal_conv`, `gated_delta` and `mamba2` against their definitions; the same bits in any cut and batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.cases import same_bits, step
from tests.support.kernels.recurrences import CASES, OPERATORS, SLOTS, Case, Layer, Operator, check
from tidemill.kernels.dispatch import Operators

WIDE = {name: replace(case, packed=True) for name, case in CASES.items() if case.dtype == torch.float32}
LENGTHS = ([1], [65], [1, 127, 2, 64, 1], [3, 1, 1, 63])


def shape(groups: int, heads: int, key_dim: int, value_dim: int, width: int, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the sizes of a layer, with a convolution of the channels of its recurrence."""
    dims = {"groups": groups, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "width": width}
    return {**dims, "channels": 2 * key_dim + heads * value_dim, "packed": True, **more}


SHAPES = (
    shape(1, 1, 1, 1, width=1),
    shape(2, 1, 16, 16, width=4),
    shape(3, 2, 24, 33, width=3, biased=True),
    shape(2, 2, 24, 80, width=3, state_dtype=torch.bfloat16),
    shape(2, 2, 24, 80, width=3, round_tokens=5),
    shape(1, 2, 40, 128, width=4, biased=True),
    shape(1, 4, 63, 65, width=2),
    shape(1, 1, 256, 127, width=5, biased=True),
    shape(2, 1, 32, 129, width=2, state_dtype=torch.bfloat16),
    shape(1, 1, 17, 65, width=2, round_tokens=1),
)
some_shapes, some_operators = st.sampled_from(SHAPES[1:6]), st.sampled_from(OPERATORS)


@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_matches_the_definition(cpu: Operators, case: Case) -> None:
    check(case, cpu)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_match_the_definition(cpu: Operators, operator: Operator, shape: dict[str, Any]) -> None:
    """Rows start empty, or go on and keep the states of their last tokens: one state of some rows and none of
    others, and one goes where the row started."""
    for lengths in LENGTHS:
        states = range(len(lengths))
        three = [[9 + b, -1 if b % 3 == 1 else 8 - b, -1 if b % 3 else 14 + b] for b in states]
        tried = [[-1] * (3 - n) + writes[max(0, 3 - n) :] for n, writes in zip(lengths, three, strict=True)]
        moved: dict[str, Any] = {"read": [8 - b for b in states], "writes": tried}
        for rows in ({}, moved):
            check(Case(operator=operator, new=lengths, **rows, **shape), cpu)


@pytest.mark.parametrize("operator", OPERATORS[1:])
def test_states_are_rounded_at_multiples_alone(cpu: Operators, operator: Operator) -> None:
    inside = {"new": [23], "before": [9], "read": [-1], "writes": [[3, 4, 5, 6, 7, 8, 9]]}
    check(Case(operator=operator, **inside, **SHAPES[4]), cpu)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=some_shapes, operator=some_operators)
def test_same_bits_however_a_sequence_is_cut(
    cpu: Operators, data: st.DataObject, shape: dict[str, Any], operator: Operator
) -> None:
    whole, cut = (Layer(Case(operator=operator, new=[70], writes=[[4]], **shape)) for _ in range(2))
    wanted = whole.run(cpu)
    ends = [*sorted(data.draw(st.sets(st.integers(1, 69), max_size=8))), 70]
    found: list[torch.Tensor] = []
    start, slot = 0, -1
    for end in ends:
        write = data.draw(st.sampled_from(sorted({slot, 4, 5} - {-1})))
        rows = step([end - start], [start], read=[slot], writes=[[write]])
        found.append(cut.run(cpu, rows, slice(start, end)))
        start, slot = end, write
    assert same_bits(torch.cat(found), wanted)
    assert same_bits(cut.state[slot], whole.state[4])


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("shape", SHAPES[2:4], ids=str)
def test_same_bits_in_any_batch_and_with_any_threads(
    cpu: Operators, shape: dict[str, Any], operator: Operator
) -> None:
    lengths = [40, 1, 33, 2]
    layer = Layer(Case(operator=operator, new=lengths, **shape))
    torch.set_num_threads(2)
    together, state = layer.run(cpu), layer.state.clone()
    torch.set_num_threads(1)
    for b, (end, n) in enumerate(zip((40, 41, 74, 76), lengths, strict=True)):
        picked = slice(end - n, end)
        assert same_bits(layer.run(cpu, step([n], writes=[[b]]), picked), together[picked])
        assert same_bits(layer.state[b], state[b])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=some_shapes, operator=some_operators)
def test_kept_state_is_that_of_a_row_that_ends_there(
    cpu: Operators, data: st.DataObject, shape: dict[str, Any], operator: Operator
) -> None:
    """Any lengths, columns and holes; what is not kept changes no bit, and no slot that is not named."""
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    kept = data.draw(st.integers(1, 45))
    read = [data.draw(st.sampled_from([-1, b])) for b in range(len(lengths))]
    writes: list[list[int]] = []
    for b, n in enumerate(lengths):
        own = iter(data.draw(st.permutations([b, *range(4 + 4 * b, 8 + 4 * b)])))
        taken = data.draw(st.sets(st.integers(max(0, kept - n), kept - 1), max_size=5))
        writes.append([next(own) if column in taken else -1 for column in range(kept)])
    case = Case(operator=operator, new=lengths, read=read, writes=writes, **shape)
    many, single = Layer(case), Layer(case)
    begun = many.arena.clone()
    found = many.run(cpu)
    named: set[int] = set()
    start = 0
    for b, n in enumerate(lengths):
        for column, slot in enumerate(writes[b]):
            if slot < 0:
                continue
            named.add(1 + slot)
            end = start + n - (kept - 1 - column)
            single.arena.copy_(begun)
            alone = step([end - start], read=[read[b]], writes=[[SLOTS - 1]])
            assert same_bits(found[start:end], single.run(cpu, alone, slice(start, end)))
            assert same_bits(many.state[slot], single.state[SLOTS - 1])
        start += n
    others = sorted(set(range(1 + SLOTS)) - named)
    assert same_bits(many.arena[others], begun[others])
