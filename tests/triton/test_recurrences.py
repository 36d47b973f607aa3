"""The causal convolution and the recurrences in Triton: their definitions over odd sizes, and the same bits
however a row is cut."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import Step, int32, same_bits, slots_inside, step
from tests.support.kernels.recurrences import CASES, OPERATORS, Case, Layer, Operator, check
from tidemill.kernels.dispatch import operators
from tidemill.kernels.shared.recurrence import CHUNK

OURS = operators("triton", Path())


@pytest.fixture(params=OPERATORS)
def case_of(request: pytest.FixtureRequest) -> Callable[..., Case]:
    return lambda **fields: Case(operator=request.param, **fields)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case, OURS)


@pytest.mark.parametrize(("first", "dtype"), [(64, torch.float32), (128, torch.bfloat16)], ids=str)
def test_same_bits_in_any_batch_and_cut_at_chunks(
    case_of: Callable[..., Case], first: int, dtype: torch.dtype
) -> None:
    """A row of which two tokens are left over, whole beside others, and cut beside none."""
    case = case_of(new=[1, 130, 20], read=[0, 1, 2], writes=[[3], [4], [5]], key_dim=32, dtype=dtype)
    assert first % CHUNK.value == 0
    whole, cut = Layer(case), Layer(case)
    together = whole.run(OURS)
    found = [cut.run(OURS, step([1], read=[0], writes=[[3]]), slice(1))]
    if case.operator == "causal_conv":  # which may be cut anywhere
        first -= 27
    found.append(cut.run(OURS, step([first], read=[1], writes=[[1]]), slice(1, 1 + first)))
    found.append(cut.run(OURS, step([130 - first], read=[1], writes=[[4]]), slice(1 + first, 131)))
    found.append(cut.run(OURS, step([20], read=[2], writes=[[5]]), slice(131, 151)))
    assert same_bits(torch.cat(found), together)
    assert same_bits(cut.state[3:6], whole.state[3:6])


def test_states_kept_inside_a_row_change_no_bit(case_of: Callable[..., Case]) -> None:
    inside = {40: 6, 64: 7, 100: 8, 150: 1}
    cases = [
        case_of(new=[150, 20], read=[0, -1], writes=slots_inside([150, 20], slots, {20: 2}))
        for slots in ({150: 1}, inside)
    ]
    plain, many = map(Layer, cases)
    assert same_bits(plain.run(OURS), many.run(OURS))
    assert same_bits(plain.state[1:3], many.state[1:3])


@pytest.mark.parametrize("new", [[0, 2], [20, 0, 3]], ids=str)
def test_rows_of_no_tokens_are_left_out(case_of: Callable[..., Case], new: list[int]) -> None:
    """Two tokens of two rows may be one row."""
    case = case_of(new=[n for n in new if n], read=[0, 1][: len(new) - 1], writes=[[4], [5]][: len(new) - 1])
    layer, other = Layer(case), Layer(case)
    wanted = layer.run(OURS)
    empty = new.index(0)
    rows = case.rows
    read, writes = rows.read_B.tolist(), rows.writes_BK.tolist()
    read.insert(empty, 2)
    writes.insert(empty, [-1])
    assert same_bits(other.run(OURS, step(new, read=read, writes=writes)), wanted)
    assert same_bits(other.arena, layer.arena)


def test_no_tokens(case_of: Callable[..., Case]) -> None:
    layer = Layer(case_of(new=[1], read=[0], writes=[[0]]))
    rows = step([], read=[], writes=[])
    rows = Step(rows.cu_B1, rows.lens_B, rows.pages_BN, rows.read_B, int32([[0]])[:0])
    assert layer.run(OURS, rows, slice(0)).shape == layer.run(OURS)[:0].shape


@pytest.mark.parametrize("new", [[1], [65]], ids=str)
def test_states_far_into_the_arena(case_of: Callable[..., Case], tmp_path: Path, new: list[int]) -> None:
    """2^32 elements away, in a file that has blocks only where it is written."""
    layer = Layer(case_of(new=new, read=[0], writes=[[1]]))
    near = layer.state.clone()
    wanted = layer.run(OURS)
    wanted_state = layer.state[1]
    size = near[0].numel()
    skipped = (1 << 32) // size
    far = torch.from_file(str(tmp_path / "arena"), shared=True, size=(skipped + 2) * size)
    layer.state = far.view(-1, *near.shape[1:])
    layer.state[skipped] = near[0]
    assert same_bits(layer.run(OURS, step(new, read=[skipped], writes=[[skipped + 1]])), wanted)
    assert same_bits(layer.state[skipped + 1], wanted_state)


@pytest.mark.parametrize("operator", ["gated_delta", "mamba2"])
def test_tokens_one_after_the_other_round_states_as_steps_of_their_own(operator: Operator) -> None:
    case = Case(operator=operator, new=[5], read=[0], writes=[[1]], key_dim=32, state_dtype=torch.bfloat16)
    whole, cut = Layer(case), Layer(case)
    together = whole.run(OURS)
    found = [cut.run(OURS, step([1], read=[min(t, 1)], writes=[[1]]), slice(t, t + 1)) for t in range(5)]
    assert same_bits(torch.cat(found), together)
    assert same_bits(cut.state[1], whole.state[1])
