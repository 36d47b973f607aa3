"""The causal convolution and the recurrences: a layer of states for each case, against the definitions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

import torch

from tests.support.kernels.cases import LIMITS, Step, random, relative_error, same_bits, slots_inside, step
from tidemill.kernels.dispatch import REFERENCE, Operators
from tidemill.kernels.mamba2.heads import Heads

SLOTS = 20
Operator = Literal["causal_conv", "gated_delta", "mamba2"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)


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
    packed: bool = False  # inputs lie side by side
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
    def rounds(self) -> bool:
        return self.operator != "causal_conv" and (
            self.round_tokens > 0 or self.state_dtype == torch.bfloat16
        )

    @property
    def rows(self) -> Step:
        return step(self.new, self.before, read=self.read, writes=self.writes)


class Layer:
    """The second of two layers in an arena of states, NaN but for those that are read, and tokens to run."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(sum(case.new))
        self.case, self.inputs = case, self._inputs(case, draw)
        size, dtype = prod(case.state_shape), case.state_dtype
        if case.operator == "causal_conv":  # its states are copies of inputs
            dtype = torch.float32
        self.arena = torch.full((1 + SLOTS, 2, case.groups, 5 + size), torch.nan, dtype=dtype)
        read = sorted({slot for slot in case.read if slot >= 0})
        states = random(draw, len(read), *self.arena.shape[1:])
        self.arena[1:][read] = states.to(case.dtype if case.operator == "causal_conv" else dtype).to(dtype)
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
        mixed = mixed.contiguous() if case.packed else mixed
        if case.operator == "gated_delta":
            mixed[::2] *= 1e-3  # so that the epsilon of the lengths counts
        if case.same_keys:
            mixed[..., case.key_dim : 2 * case.key_dim] = mixed[:1, :, : case.key_dim] * 1e3
        gates = random(draw, tokens, 8 + (2 if case.operator == "gated_delta" else 1) * groups * heads)[:, 8:]
        gates[::3] *= case.spread
        self.per_head = random(draw, 3, groups * heads).unbind()
        if case.operator == "gated_delta":
            self.per_head = tuple(part.to(dtype) for part in self.per_head)
            return [mixed.to(dtype), gates.to(dtype)]
        z = random(draw, tokens, 8 + groups * heads * case.value_dim).to(dtype)[:, 8:]
        return [mixed.to(dtype), z.view(tokens, groups, heads, case.value_dim), gates.to(dtype)]

    def run(self, ops: Operators, rows: Step | None = None, picked: slice = slice(None)) -> torch.Tensor:
        device = self.state.device
        inputs = [part[picked].to(device) for part in self.inputs]
        dtype = torch.float32 if self.case.operator == "mamba2" else self.case.dtype
        return self._call(ops, inputs, self.state, (rows or self.case.rows).to(device), dtype).cpu()

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the states of the definition: wide ones, unless states are rounded."""
        wide = torch.float32 if self.case.rounds else torch.float64
        state = self.state.cpu().to(self.case.state_dtype if self.case.rounds else wide, copy=True)
        return self._call(
            REFERENCE, [part.to(wide) for part in self.inputs], state, self.case.rows, wide
        ), state

    def _call(
        self, ops: Operators, inputs: list[torch.Tensor], state: torch.Tensor, rows: Step, dtype: torch.dtype
    ) -> torch.Tensor:
        """Run the operator. `dtype` is that of its parameters."""
        if self.case.operator == "causal_conv":
            weight_WGC = self.weight_WGC.to(state.device, dtype)
            bias_GC = None if self.bias_GC is None else self.bias_GC.to(state.device, dtype)
            return ops.causal_conv(inputs[0], weight_WGC, bias_GC, state, rows)
        a_log_H, dt_bias_H, skip_H = (part.to(state.device, dtype) for part in self.per_head)
        if self.case.operator == "gated_delta":
            return ops.gated_delta(*inputs, a_log_H, dt_bias_H, state, rows, self.case.round_tokens)
        heads = Heads(a_log_H, dt_bias_H, skip_H, *self.case.bounds)
        return ops.mamba2(*inputs, heads, state, rows, self.case.round_tokens)


def check(case: Case, ops: Operators, device: str = "cpu") -> None:
    """Against the definition; other memory, and the other layer, keep their bits."""
    layer, rows = Layer(case, device), case.rows
    limit = max(LIMITS[case.dtype], 5e-3 if case.rounds else 0.0)
    before = layer.arena.cpu().clone()
    wanted, wanted_state = layer.wanted()
    assert relative_error(layer.run(ops), wanted) < limit
    written = rows.writes_BK[rows.writes_BK >= 0].long()
    state, arena = layer.state.cpu(), layer.arena.cpu()
    if len(written) and state.numel():
        error = relative_error(state[written], wanted_state[written])
        assert error == 0 if case.operator == "causal_conv" else error < limit
    if case.round_tokens and case.operator != "causal_conv":
        depths_BK = rows.lens_B[:, None] + 1 + torch.arange(-rows.writes_BK.shape[1], 0)
        for found in (state, wanted_state):
            assert [same_bits(last, last.bfloat16().float()) for last in found[written]] == [
                int(depth) % case.round_tokens == 0 for depth in depths_BK[rows.writes_BK >= 0]
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
    "states rounded where they are kept": Case(
        new=[200, 18],
        before=[60, 2],
        read=[0, -1],
        writes=slots_inside([200, 18], {1: 1, 64: 3, 65: 4, 72: 5, 200: 0}, {2: 6, 18: 7}),
        round_tokens=4,
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
