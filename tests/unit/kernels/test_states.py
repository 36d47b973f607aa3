"""`causal_conv` and `gated_delta` against their definitions; the same bits in any cut and any batch."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.kernels.cases import Step, random, relative_error, same_bits, step
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.rows import Rows

SLOTS = 9
LENGTHS = ([1], [65], [1, 127, 2, 64, 1], [3, 1, 1, 63])


@dataclass(frozen=True)
class Shape:
    groups: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def channels(self) -> int:
        return 2 * self.key_dim + self.heads * self.value_dim


SHAPES = (
    Shape(groups=1, heads=1, key_dim=1, value_dim=1, width=1),
    Shape(groups=2, heads=1, key_dim=16, value_dim=16, width=4),
    Shape(groups=3, heads=2, key_dim=24, value_dim=33, width=3),
    Shape(groups=1, heads=4, key_dim=63, value_dim=65, width=2),
    Shape(groups=1, heads=1, key_dim=256, value_dim=127, width=5),
)


Result = tuple[torch.Tensor, torch.Tensor]  # output, states
ALL = slice(None)


class Layer:
    """The weights of a convolution and a delta rule, a pool of NaN states, and tokens to run."""

    def __init__(self, shape: Shape, tokens: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.shape = shape
        s = shape
        self.x_TGC = random(draw, tokens, s.groups, s.channels + 7)[..., : s.channels]
        self.weight_WGC = random(draw, s.width, s.groups, s.channels)
        self.mixed_TGC = random(draw, tokens, s.groups, s.channels)
        self.mixed_TGC[::2] *= 1e-3  # so that the epsilon of the norms counts
        self.gates_TI = random(draw, tokens, 3 + 2 * s.groups * s.heads)[:, 3:]
        self.a_log_H, self.dt_bias_H = random(draw, s.groups * s.heads), random(draw, s.groups * s.heads)
        # Both states lie side by side in one slot, as in the arena.
        conv, temporal = (s.width - 1) * s.channels, s.heads * s.key_dim * s.value_dim
        pool = torch.full((SLOTS, s.groups, conv + temporal), torch.nan)
        self.conv = pool[..., :conv].view(SLOTS, s.groups, s.width - 1, s.channels)
        self.temporal = pool[..., conv:].view(SLOTS, s.groups, s.heads, s.key_dim, s.value_dim)
        self.pool = pool

    def convolve(self, ops: Operators, rows: Rows, span: slice, dtype: torch.dtype) -> Result:
        state = self.conv.to(dtype)
        return ops.causal_conv(self.x_TGC[span].to(dtype), self.weight_WGC.to(dtype), state, rows), state

    def recur(self, ops: Operators, rows: Rows, span: slice, dtype: torch.dtype) -> Result:
        state = self.temporal.to(dtype)
        inputs = [
            x.to(dtype) for x in (self.mixed_TGC[span], self.gates_TI[span], self.a_log_H, self.dt_bias_H)
        ]
        mixed, gates, a_log, dt_bias = inputs
        return ops.gated_delta(mixed, gates, a_log, dt_bias, state, rows), state


Run = Callable[[Layer, Operators, Rows, slice, torch.dtype], Result]
RUNS: tuple[Run, ...] = (Layer.convolve, Layer.recur)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_the_definition(
    cpu: Operators, reference: Operators, run: Run, shape: Shape, lengths: list[int]
) -> None:
    """Rows start empty, then run again from what they wrote, one of five into the same slot."""
    layer = Layer(shape, sum(lengths))
    empty = step(lengths)
    again = step(lengths, read=range(len(lengths)), write=[SLOTS - 1 - b for b in range(len(lengths))])
    for rows in (empty, again):
        before = layer.pool.clone()
        wanted, wanted_state = run(layer, reference, rows, ALL, torch.float64)
        found, state = run(layer, cpu, rows, ALL, torch.float32)
        assert relative_error(found, wanted) < 1e-5
        written = rows.write_B.long()
        if state.numel():
            assert relative_error(state[written], wanted_state[written]) < 1e-5
        untouched = torch.ones(SLOTS, dtype=torch.bool).index_fill(0, written, value=False)
        assert same_bits(layer.pool[untouched], before[untouched])


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=st.sampled_from(SHAPES[1:3]), run=st.sampled_from(RUNS))
def test_the_same_bits_however_a_sequence_is_cut(
    cpu: Operators, data: st.DataObject, shape: Shape, run: Run
) -> None:
    whole, cut = Layer(shape, 70), Layer(shape, 70)
    wanted, _ = run(whole, cpu, step([70], write=[4]), ALL, torch.float32)
    ends = [*sorted(data.draw(st.sets(st.integers(1, 69), max_size=8))), 70]
    found: list[torch.Tensor] = []
    start, slot = 0, -1
    for end in ends:
        write = data.draw(st.sampled_from(sorted({slot, 4, 5} - {-1})))
        out, _ = run(
            cut, cpu, step([end - start], read=[slot], write=[write]), slice(start, end), torch.float32
        )
        found.append(out)
        start, slot = end, write
    assert same_bits(torch.cat(found), wanted)
    assert same_bits(cut.conv[slot], whole.conv[4])
    assert same_bits(cut.temporal[slot], whole.temporal[4])


@pytest.mark.parametrize("run", RUNS)
def test_the_same_bits_in_any_batch_and_with_any_threads(cpu: Operators, run: Run) -> None:
    lengths = [40, 1, 33, 2]
    starts = [0, 40, 41, 74]
    layer = Layer(SHAPES[2], 76)
    torch.set_num_threads(2)
    together, state = run(layer, cpu, step(lengths), ALL, torch.float32)
    state = state.clone()
    torch.set_num_threads(1)
    for b, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        alone: Step = step([n], write=[b])
        found, after = run(layer, cpu, alone, slice(start, start + n), torch.float32)
        assert same_bits(found, together[start : start + n])
        assert same_bits(after[b], state[b])
