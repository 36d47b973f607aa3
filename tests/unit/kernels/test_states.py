"""`causal_conv`, `gated_delta` and `mamba2` against their definitions; the same bits in any cut and batch."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.cases import Step, random, relative_error, same_bits, step
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.shared.rows import Rows

SLOTS = 19
LENGTHS = ([1], [65], [1, 127, 2, 64, 1], [3, 1, 1, 63])


@dataclass(frozen=True)
class Shape:
    groups: int
    heads: int
    key_dim: int
    value_dim: int
    width: int
    biased: bool = False
    halves: bool = False  # recurrent states in bfloat16
    round_tokens: int = 0  # ... or rounded to it there

    @property
    def channels(self) -> int:
        return 2 * self.key_dim + self.heads * self.value_dim


SHAPES = (
    Shape(groups=1, heads=1, key_dim=1, value_dim=1, width=1),
    Shape(groups=2, heads=1, key_dim=16, value_dim=16, width=4),
    Shape(groups=3, heads=2, key_dim=24, value_dim=33, width=3, biased=True),
    Shape(groups=2, heads=2, key_dim=24, value_dim=80, width=3, halves=True),
    Shape(groups=2, heads=2, key_dim=24, value_dim=80, width=3, round_tokens=5),
    Shape(groups=1, heads=2, key_dim=40, value_dim=128, width=4, biased=True),
    Shape(groups=1, heads=4, key_dim=63, value_dim=65, width=2),
    Shape(groups=1, heads=1, key_dim=256, value_dim=127, width=5, biased=True),
    Shape(groups=2, heads=1, key_dim=32, value_dim=129, width=2, halves=True),
    Shape(groups=1, heads=1, key_dim=17, value_dim=65, width=2, round_tokens=1),
)


Result = tuple[torch.Tensor, torch.Tensor]  # output, states
ALL = slice(None)


class Layer:
    """The weights of a convolution and a recurrence, a pool of NaN states, and tokens to run."""

    def __init__(self, shape: Shape, tokens: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.shape = shape
        s = shape
        self.x_TGC = random(draw, tokens, s.groups, s.channels + 7)[..., : s.channels]
        self.weight_WGC = random(draw, s.width, s.groups, s.channels)
        self.bias_GC = random(draw, s.groups, s.channels) if s.biased else None
        self.mixed_TGC = random(draw, tokens, s.groups, s.channels)
        self.mixed_TGC[::2] *= 1e-3  # so that the epsilon of the norms counts
        self.gates_TI = random(draw, tokens, 3 + 2 * s.groups * s.heads)[:, 3:]
        self.a_log_H, self.dt_bias_H = random(draw, s.groups * s.heads), random(draw, s.groups * s.heads)
        wide = random(draw, tokens, s.groups, 3 + s.heads * s.value_dim)[..., 3:]
        self.z_TGRV = wide.view(tokens, s.groups, s.heads, s.value_dim)
        self.skip_H = random(draw, s.groups * s.heads)
        # Both states lie side by side in one slot, as in the arena.
        conv, temporal = (s.width - 1) * s.channels, s.heads * s.key_dim * s.value_dim
        # One more slot in front: who takes -1 for an index writes there, or into the last one.
        self.arena = torch.full((1 + SLOTS, s.groups, conv + temporal), torch.nan)
        self.pool = pool = self.arena[1:]
        self.conv = pool[..., :conv].view(SLOTS, s.groups, s.width - 1, s.channels)
        states = pool[..., conv:].view(torch.bfloat16)[..., :temporal] if s.halves else pool[..., conv:]
        self.temporal = states.view(SLOTS, s.groups, s.heads, s.key_dim, s.value_dim)

    def convolve(self, ops: Operators, rows: Rows, span: slice, dtype: torch.dtype) -> Result:
        state = self.conv.to(dtype)
        weight, bias = self.weight_WGC.to(dtype), self.bias_GC
        bias = bias if bias is None else bias.to(dtype)
        return ops.causal_conv(self.x_TGC[span].to(dtype), weight, bias, state, rows), state

    def states(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the recurrent states, those in bfloat16 as they are."""
        return self.temporal if self.shape.halves else self.temporal.to(dtype)

    def recur(self, ops: Operators, rows: Rows, span: slice, dtype: torch.dtype) -> Result:
        state = self.states(dtype)
        inputs = [
            x.to(dtype) for x in (self.mixed_TGC[span], self.gates_TI[span], self.a_log_H, self.dt_bias_H)
        ]
        mixed, gates, a_log, dt_bias = inputs
        rounded = self.shape.round_tokens
        return ops.gated_delta(mixed, gates, a_log, dt_bias, state, rows, rounded), state

    def scan(self, ops: Operators, rows: Rows, span: slice, dtype: torch.dtype) -> Result:
        state, dt_TH = self.states(dtype), self.gates_TI[span, : len(self.skip_H)].to(dtype)
        a_log, dt_bias, skip = (x.to(dtype) for x in (self.a_log_H, self.dt_bias_H, self.skip_H))
        heads = Heads(a_log, dt_bias, skip, dt_min=0.4, dt_max=1.3)
        mixed, z = self.mixed_TGC[span].to(dtype), self.z_TGRV[span].to(dtype)
        return ops.mamba2(mixed, z, dt_TH, heads, state, rows, self.shape.round_tokens), state


Run = Callable[[Layer, Operators, Rows, slice, torch.dtype], Result]
RUNS: tuple[Run, ...] = (Layer.convolve, Layer.recur, Layer.scan)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_matches_the_definition(
    cpu: Operators, reference: Operators, run: Run, shape: Shape, lengths: list[int]
) -> None:
    """Rows start empty, run again from what they wrote, then again and keep the states of their last tokens.

    Of the last step, one state is kept of some rows and none of others, and one goes where the row started.
    """
    layer, count = Layer(shape, sum(lengths)), len(lengths)
    states = range(count)
    empty = step(lengths)
    again = step(lengths, read=states, writes=[[8 - b] for b in states])
    three = [[9 + b, -1 if b % 3 == 1 else 8 - b, -1 if b % 3 else 14 + b] for b in states]
    tried = [[-1] * (3 - n) + writes[max(0, 3 - n) :] for n, writes in zip(lengths, three, strict=True)]
    for rows in (empty, again, step(lengths, read=[8 - b for b in states], writes=tried)):
        before = layer.arena.clone()
        # States in bfloat16 part where a sum is half way between two of them.
        rounds = shape.halves or shape.round_tokens
        wide, most = (torch.float32, 5e-3) if rounds else (torch.float64, 1e-5)
        wanted, wanted_state = run(layer, reference, rows, ALL, wide)
        wanted_state = wanted_state.clone()
        layer.arena.copy_(before)
        found, state = run(layer, cpu, rows, ALL, torch.float32)
        assert relative_error(found, wanted) < most
        written = rows.writes_BK[rows.writes_BK >= 0].long()
        if state.numel():
            assert relative_error(state[written], wanted_state[written]) < most
        untouched = torch.ones(1 + SLOTS, dtype=torch.bool).index_fill(0, 1 + written, value=False)
        assert same_bits(layer.arena[untouched], before[untouched])
        assert torch.equal(state.isnan(), wanted_state.isnan())


@settings(max_examples=25, deadline=None)
@given(data=st.data(), shape=st.sampled_from(SHAPES[1:6]), run=st.sampled_from(RUNS))
def test_same_bits_however_a_sequence_is_cut(
    cpu: Operators, data: st.DataObject, shape: Shape, run: Run
) -> None:
    whole, cut = Layer(shape, 70), Layer(shape, 70)
    wanted, _ = run(whole, cpu, step([70], writes=[[4]]), ALL, torch.float32)
    ends = [*sorted(data.draw(st.sets(st.integers(1, 69), max_size=8))), 70]
    found: list[torch.Tensor] = []
    start, slot = 0, -1
    for end in ends:
        write = data.draw(st.sampled_from(sorted({slot, 4, 5} - {-1})))
        rows = step([end - start], [start], read=[slot], writes=[[write]])
        out, _ = run(cut, cpu, rows, slice(start, end), torch.float32)
        found.append(out)
        start, slot = end, write
    assert same_bits(torch.cat(found), wanted)
    assert same_bits(cut.conv[slot], whole.conv[4])
    assert same_bits(cut.temporal[slot], whole.temporal[4])


@pytest.mark.parametrize("run", RUNS[1:])
def test_states_are_rounded_at_multiples_alone(cpu: Operators, reference: Operators, run: Run) -> None:
    shape = SHAPES[4]
    for ops in (cpu, reference):
        layer = Layer(shape, 23)
        inside = [[3, 4, 5, 6, 7, 8, 9]]
        _, state = run(layer, ops, step([23], [9], read=[-1], writes=inside), ALL, torch.float32)
        assert [same_bits(state[slot], state[slot].bfloat16().float()) for slot in inside[0]] == [
            depth % shape.round_tokens == 0 for depth in range(26, 33)
        ]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES[2:4], ids=str)
def test_same_bits_in_any_batch_and_with_any_threads(cpu: Operators, shape: Shape, run: Run) -> None:
    lengths = [40, 1, 33, 2]
    starts = [0, 40, 41, 74]
    layer = Layer(shape, 76)
    torch.set_num_threads(2)
    together, state = run(layer, cpu, step(lengths), ALL, torch.float32)
    state = state.clone()
    torch.set_num_threads(1)
    for b, (start, n) in enumerate(zip(starts, lengths, strict=True)):
        alone: Step = step([n], writes=[[b]])
        found, after = run(layer, cpu, alone, slice(start, start + n), torch.float32)
        assert same_bits(found, together[start : start + n])
        assert same_bits(after[b], state[b])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shape=st.sampled_from(SHAPES[1:6]), run=st.sampled_from(RUNS))
def test_kept_state_is_that_of_a_row_that_ends_there(
    cpu: Operators, data: st.DataObject, shape: Shape, run: Run
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
    many, single = Layer(shape, sum(lengths)), Layer(shape, sum(lengths))
    for layer in (many, single):
        layer.pool[:3] = random(torch.Generator().manual_seed(1), *layer.pool[:3].shape)
    begun = many.arena.clone()
    found, _ = run(many, cpu, step(lengths, read=read, writes=writes), ALL, torch.float32)
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
            out, state = run(single, cpu, alone, slice(start, end), torch.float32)
            assert same_bits(found[start:end], out)
            kept_state = many.conv if run is Layer.convolve else many.temporal
            assert same_bits(kept_state[slot], state[SLOTS - 1])
        start += n
    others = sorted(set(range(1 + SLOTS)) - named)
    assert same_bits(many.arena[others], begun[others])


def test_step_has_no_bounds_by_default(cpu: Operators, reference: Operators) -> None:
    """Test a softplus of up to 30, and one close to 0."""
    layer, rows = Layer(SHAPES[1], 4), step([4])
    dt_TH = torch.tensor([[30.0, -30.0], [-30.0, 30.0], [0.0, 1.0], [21.0, 19.0]])
    heads = Heads(layer.a_log_H - 4, layer.dt_bias_H, layer.skip_H, dt_min=0.0, dt_max=float("inf"))
    state, wanted_state = layer.temporal, layer.temporal.clone()
    found = cpu.mamba2(layer.mixed_TGC, layer.z_TGRV, dt_TH, heads, state, rows)
    wanted = reference.mamba2(layer.mixed_TGC, layer.z_TGRV, dt_TH, heads, wanted_state, rows)
    assert relative_error(found, wanted) < 1e-5
    assert relative_error(state[0], wanted_state[0]) < 1e-5
