# pyright: basic
"""The causal convolution and the recurrences in Triton: their definitions over odd sizes, and the same bits
however a row is cut."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
import torch

from tests.support.kernels.cases import (
    LIMITS,
    Step,
    int32,
    random,
    relative_error,
    same_bits,
    slots_inside,
    step,
)
from tidemill.kernels.causal_conv import cuda as causal_conv_cuda
from tidemill.kernels.causal_conv import reference as causal_conv_reference
from tidemill.kernels.gated_delta import cuda as gated_delta_cuda
from tidemill.kernels.gated_delta import reference as gated_delta_reference
from tidemill.kernels.mamba2 import cuda as mamba2_cuda
from tidemill.kernels.mamba2 import reference as mamba2_reference
from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.shared.recurrence import CHUNK

SLOTS = 12
Operator = Literal["causal_conv", "gated_delta", "mamba2"]
VARIANTS: dict[Operator, tuple[ModuleType, ModuleType]] = {
    "causal_conv": (causal_conv_cuda, causal_conv_reference),
    "gated_delta": (gated_delta_cuda, gated_delta_reference),
    "mamba2": (mamba2_cuda, mamba2_reference),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step in which row b starts from state `read[b]`."""

    operator: Operator = "mamba2"
    new: Sequence[int]
    before: Sequence[int] | None = None
    read: Sequence[int] = ()
    writes: Sequence[Sequence[int]] = ()
    groups: int = 1
    heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    round_tokens: int = 0
    spread: float = 1.0  # of gates and time steps
    same_keys: bool = False
    bounds: tuple[float, float] = (0.0, float("inf"))  # of time steps

    channels: int = 33  # of the convolution, like the two below
    width: int = 4
    biased: bool = False

    @property
    def state_shape(self) -> tuple[int, ...]:
        if self.operator == "causal_conv":
            return self.width - 1, self.channels
        return self.heads, self.key_dim, self.value_dim

    @property
    def rows(self) -> Step:
        return step(self.new, self.before, read=self.read, writes=self.writes)


class Layer:
    """The second of two layers in an arena of states, NaN but for those that are read, and tokens to run."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(sum(case.new))
        self.case, self.inputs = case, self._inputs(case, draw)
        size = prod(case.state_shape)
        self.arena = torch.full((1 + SLOTS, 2, case.groups, 5 + size), torch.nan, dtype=case.state_dtype)
        read = sorted({slot for slot in case.read if slot >= 0})
        states = random(draw, len(read), *self.arena.shape[1:])
        if case.operator == "causal_conv":  # its states are copies of inputs
            states = states.to(case.dtype)
        self.arena[1:][read] = states.to(case.state_dtype)
        self.arena = self.arena.to(device)
        self.state = self.arena[1:, 1, :, 5:].view(SLOTS, case.groups, *case.state_shape)

    def _inputs(self, case: Case, draw: torch.Generator) -> list[torch.Tensor]:
        """Return views of wider rows, as a model cuts them from its projections."""
        tokens, groups, heads, dtype = sum(case.new), case.groups, case.heads, case.dtype
        if case.operator == "causal_conv":
            self.weight_WGC = random(draw, case.width, groups, case.channels).to(dtype)
            self.bias_GC = random(draw, groups, case.channels).to(dtype) if case.biased else None
            return [random(draw, tokens, groups, case.channels + 8)[..., : case.channels].to(dtype)]
        channels = 2 * case.key_dim + heads * case.value_dim
        mixed = random(draw, tokens, groups, channels + 8)[..., :channels]
        if case.operator == "gated_delta":
            mixed[::2] *= 1e-3  # so that the epsilon of the lengths counts
        if case.same_keys:
            mixed[..., case.key_dim : 2 * case.key_dim] = mixed[:1, :, : case.key_dim] * 1e3
        gates = random(draw, tokens, 8 + (2 if case.operator == "gated_delta" else 1) * groups * heads)[:, 8:]
        gates[::3] *= case.spread
        self.per_head = random(draw, 3, groups * heads).unbind()
        if case.operator == "gated_delta":
            return [mixed.to(dtype), gates.to(dtype)]
        z = random(draw, tokens, 8 + groups * heads * case.value_dim).to(dtype)[:, 8:]
        return [mixed.to(dtype), z.view(tokens, groups, heads, case.value_dim), gates.to(dtype)]

    def call(
        self,
        module: ModuleType,
        inputs: list[torch.Tensor],
        state: torch.Tensor,
        rows: Step,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Run a variant of the operator. `dtype` is that of its parameters."""
        if self.case.operator == "causal_conv":
            weight_WGC = self.weight_WGC.to(state.device, dtype)
            bias_GC = None if self.bias_GC is None else self.bias_GC.to(state.device, dtype)
            return module.causal_conv(*inputs, weight_WGC, bias_GC, state, rows)
        a_log_H, dt_bias_H, skip_H = (part.to(state.device, dtype) for part in self.per_head)
        if self.case.operator == "gated_delta":
            return module.gated_delta(*inputs, a_log_H, dt_bias_H, state, rows, self.case.round_tokens)
        heads = Heads(a_log_H, dt_bias_H, skip_H, *self.case.bounds)
        return module.mamba2(*inputs, heads, state, rows, self.case.round_tokens)

    def run(self, rows: Step | None = None, picked: slice = slice(None)) -> torch.Tensor:
        device = self.state.device
        inputs = [part[picked].to(device) for part in self.inputs]
        rows = (rows or self.case.rows).to(device)
        dtype = torch.float32 if self.case.operator == "mamba2" else self.case.dtype
        return self.call(VARIANTS[self.case.operator][0], inputs, self.state, rows, dtype).cpu()


def check(case: Case, device: str = "cpu") -> None:
    layer, rows = Layer(case, device), case.rows
    rounds = torch.bfloat16 if case.round_tokens else case.state_dtype
    limit = max(LIMITS[case.dtype], LIMITS[rounds])
    before, wanted_state = layer.arena.cpu().clone(), layer.state.cpu().double()
    exact = [part.double() for part in layer.inputs]
    if case.operator == "gated_delta":  # its parameters of heads have the dtype of the case
        layer.per_head = tuple(part.to(case.dtype) for part in layer.per_head)
    wanted = layer.call(VARIANTS[case.operator][1], exact, wanted_state, rows, torch.float64)
    assert relative_error(layer.run(), wanted) < limit
    written = rows.writes_BK[rows.writes_BK >= 0].long()
    state, arena = layer.state.cpu(), layer.arena.cpu()
    if len(written):
        exact_states = case.operator == "causal_conv"
        error = relative_error(state[written], wanted_state[written]) if state.numel() else 0.0
        assert error == 0 if exact_states else error < limit
    if case.round_tokens and case.operator != "causal_conv":
        assert [same_bits(last, last.bfloat16().float()) for last in state[rows.writes_BK[:, -1].long()]] == [
            length % case.round_tokens == 0 for length in rows.lens_B.tolist()
        ]
    # All but those states of this layer is as it was.
    arena[1:, 1, :, 5:].view(state.shape)[written] = before[1:, 1, :, 5:].view(state.shape)[written]
    assert same_bits(arena, before)


ODD = {
    "new": [1, 2, 63, 64, 65, 127],
    "read": [0, -1, 2, 3, -1, 5],
    "writes": [[n] for n in (6, 1, 7, 3, 4, 8)],
}
LONG = {"new": [500], "read": [0], "writes": [[1]], "key_dim": 64, "value_dim": 32}
THREE = {"new": [1, 66, 17], "read": [1, 3, -1], "writes": [[1], [4], [5]]}
SHARED = {
    "decode": Case(new=[1] * 3, read=[2, -1, 5], writes=[[3], [0], [5]], groups=2, heads=2),
    "decode bfloat16": Case(
        new=[1] * 3, read=[2, -1, 5], writes=[[3], [0], [-1]], value_dim=40, dtype=torch.bfloat16
    ),
    "drafts on states in bfloat16": Case(
        new=[4, 1, 3],
        read=[0, 1, -1],
        writes=[[3, 0, 4], [-1, -1, 5], [8, -1, 7]],
        value_dim=33,
        state_dtype=torch.bfloat16,
    ),
    "chunks on states in bfloat16": Case(**ODD, state_dtype=torch.bfloat16),
    "rounded where a page ends": Case(**ODD, before=[63, 62, 64, 0, 128, 1], round_tokens=64),
    "rounded where pages end amid chunks": Case(**ODD, before=[3, 1, 1, 0, 2, 9], round_tokens=4),
    "drafts": Case(
        new=[4, 1, 3], read=[0, 1, -1], writes=[[3, 0, 4], [-1, -1, 5], [8, -1, 7]], key_dim=24, value_dim=33
    ),
    "mixed": Case(**ODD),
    "odd sizes": Case(**THREE, heads=2, key_dim=24, value_dim=33),
    "dim 1": Case(new=[20, 1], read=[-1, 2], writes=[[1], [2]], key_dim=1, value_dim=1),
    "large dims": Case(new=[81], read=[3], writes=[[2]], key_dim=256, value_dim=130, dtype=torch.bfloat16),
    "states kept within chunks": Case(
        new=[130, 70, 18], read=[0, -1, 2], writes=[[-1, 4, 0], [5, -1, -1], [1, 6, 2]]
    ),
    "states kept far inside": Case(
        new=[200, 3, 130],
        read=[0, -1, 2],
        writes=slots_inside(
            [200, 3, 130], {1: 1, 64: 3, 65: 4, 72: 5, 200: 0}, {3: 6}, {96: 7, 128: 2, 129: 8}
        ),
        heads=2,
    ),
    "nothing kept": Case(new=[65, 3, 17], read=[0, -1, 3], writes=[[-1, -1]] * 3, groups=2),
    "strong and weak gates": Case(new=[60], read=[0], writes=[[1]], spread=100.0),
    "500 tokens": Case(**LONG),
    "500 tokens bfloat16": Case(**LONG, dtype=torch.bfloat16),
}
CONVOLUTIONS = {
    "decode": Case(new=[1] * 3, read=[0, -1, 2], writes=[[1], [3], [2]], groups=2),
    "decode bfloat16": Case(
        new=[1] * 3, read=[0, -1, 2], writes=[[1], [-1], [2]], channels=300, dtype=torch.bfloat16
    ),
    "drafts": Case(new=[5, 2, 1], read=[0, 1, 2], writes=[[3, 0, 4], [-1, 1, 5], [-1, -1, 2]], width=5),
    "mixed": Case(**ODD),
    "mixed bfloat16": Case(**ODD, dtype=torch.bfloat16, channels=130, biased=True),
    "kept and read": Case(
        new=[40, 3], read=[0, 1], writes=[[3, 0, 4], [1, -1, 5]], groups=2, width=3, biased=True
    ),
    "kept far inside": Case(
        new=[300, 2],
        read=[0, 1],
        writes=slots_inside([300, 2], {1: 3, 2: 4, 33: 5, 200: 6, 299: 7, 300: 0}, {1: 8, 2: 1}),
    ),
    "nothing kept": Case(new=[33, 1], read=[0, -1], writes=[[-1, -1]] * 2),
    "width 1": Case(new=[2, 1], read=[0, -1], writes=[[3], [4]], width=1),
    "width 2": Case(new=[2, 1], read=[0, -1], writes=[[0], [4]], width=2, channels=1),
}
CASES = {
    f"{operator} {name}": replace(case, operator=operator)
    for operator in ("gated_delta", "mamba2")
    for name, case in SHARED.items()
} | {
    **{f"causal_conv {name}": replace(case, operator="causal_conv") for name, case in CONVOLUTIONS.items()},
    "gated_delta the same key again and again": Case(
        operator="gated_delta", new=[60], read=[0], writes=[[1]], same_keys=True
    ),
    "mamba2 bounded steps": Case(**THREE, groups=2, bounds=(0.4, 0.9), spread=5.0),
}


@pytest.fixture(params=VARIANTS)
def case_of(request: pytest.FixtureRequest) -> Callable[..., Case]:
    return lambda **fields: Case(operator=request.param, **fields)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("first", "dtype"), [(64, torch.float32), (128, torch.bfloat16)], ids=str)
def test_same_bits_in_any_batch_and_cut_at_chunks(
    case_of: Callable[..., Case], first: int, dtype: torch.dtype
) -> None:
    """A row of which two tokens are left over, whole beside others, and cut beside none."""
    case = case_of(new=[1, 130, 20], read=[0, 1, 2], writes=[[3], [4], [5]], key_dim=32, dtype=dtype)
    assert first % CHUNK.value == 0
    whole, cut = Layer(case), Layer(case)
    together = whole.run()
    found = [cut.run(step([1], read=[0], writes=[[3]]), slice(1))]
    if case.operator == "causal_conv":  # which may be cut anywhere
        first -= 27
    found.append(cut.run(step([first], read=[1], writes=[[1]]), slice(1, 1 + first)))
    found.append(cut.run(step([130 - first], read=[1], writes=[[4]]), slice(1 + first, 131)))
    found.append(cut.run(step([20], read=[2], writes=[[5]]), slice(131, 151)))
    assert same_bits(torch.cat(found), together)
    assert same_bits(cut.state[3:6], whole.state[3:6])


def test_states_kept_inside_a_row_change_no_bit(case_of: Callable[..., Case]) -> None:
    inside = {40: 6, 64: 7, 100: 8, 150: 1}
    cases = [
        case_of(new=[150, 20], read=[0, -1], writes=slots_inside([150, 20], slots, {20: 2}))
        for slots in ({150: 1}, inside)
    ]
    plain, many = map(Layer, cases)
    assert same_bits(plain.run(), many.run())
    assert same_bits(plain.state[1:3], many.state[1:3])


@pytest.mark.parametrize("new", [[0, 2], [20, 0, 3]], ids=str)
def test_rows_of_no_tokens_are_left_out(case_of: Callable[..., Case], new: list[int]) -> None:
    """Two tokens of two rows may be one row."""
    case = case_of(new=[n for n in new if n], read=[0, 1][: len(new) - 1], writes=[[4], [5]][: len(new) - 1])
    layer, other = Layer(case), Layer(case)
    wanted = layer.run()
    empty = new.index(0)
    rows = case.rows
    read, writes = rows.read_B.tolist(), rows.writes_BK.tolist()
    read.insert(empty, 2)
    writes.insert(empty, [-1])
    assert same_bits(other.run(step(new, read=read, writes=writes)), wanted)
    assert same_bits(other.arena, layer.arena)


def test_no_tokens(case_of: Callable[..., Case]) -> None:
    layer = Layer(case_of(new=[1], read=[0], writes=[[0]]))
    rows = step([], read=[], writes=[])
    rows = Step(rows.cu_B1, rows.lens_B, rows.pages_BN, rows.read_B, int32([[0]])[:0])
    assert layer.run(rows, slice(0)).shape == layer.run()[:0].shape


@pytest.mark.parametrize("new", [[1], [65]], ids=str)
def test_states_far_into_the_arena(case_of: Callable[..., Case], tmp_path: Path, new: list[int]) -> None:
    """2^32 elements away, in a file that has blocks only where it is written."""
    layer = Layer(case_of(new=new, read=[0], writes=[[1]]))
    near = layer.state.clone()
    wanted = layer.run()
    wanted_state = layer.state[1]
    size = near[0].numel()
    skipped = (1 << 32) // size
    far = torch.from_file(str(tmp_path / "arena"), shared=True, size=(skipped + 2) * size)
    layer.state = far.view(-1, *near.shape[1:])
    layer.state[skipped] = near[0]
    assert same_bits(layer.run(step(new, read=[skipped], writes=[[skipped + 1]])), wanted)
    assert same_bits(layer.state[skipped + 1], wanted_state)


@pytest.mark.parametrize("operator", ["gated_delta", "mamba2"])
def test_tokens_one_after_the_other_round_states_as_steps_of_their_own(operator: Operator) -> None:
    case = Case(operator=operator, new=[5], read=[0], writes=[[1]], key_dim=32, state_dtype=torch.bfloat16)
    whole, cut = Layer(case), Layer(case)
    together = whole.run()
    found = [cut.run(step([1], read=[min(t, 1)], writes=[[1]]), slice(t, t + 1)) for t in range(5)]
    assert same_bits(torch.cat(found), together)
    assert same_bits(cut.state[1], whole.state[1])
