# pyright: basic
"""The causal convolution in Triton: its definition over odd sizes, windows read and written in one step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import LIMITS, Step, random, relative_error, same_bits, slots_inside, step
from tidemill.kernels.causal_conv import cuda, reference

SLOTS = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """Row b starts from state `read[b]`."""

    new: Sequence[int]
    read: Sequence[int]
    writes: Sequence[Sequence[int]]
    groups: int = 1
    channels: int = 33
    width: int = 4
    biased: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> Step:
        return step(self.new, read=self.read, writes=self.writes)


class Layer:
    """The second of two layers in an arena of windows, NaN but for those that are read, and tokens to run."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(sum(case.new))
        groups, channels, past = case.groups, case.channels, case.width - 1
        self.x_TGC = random(draw, sum(case.new), groups, channels + 8)[..., :channels].to(case.dtype)
        self.weight_WGC = random(draw, case.width, groups, channels).to(case.dtype)
        self.bias_GC = random(draw, groups, channels).to(case.dtype) if case.biased else None
        self.arena = torch.full((1 + SLOTS, 2, groups, past * channels + 5), torch.nan)
        read = sorted({slot for slot in case.read if slot >= 0})
        windows = random(draw, len(read), *self.arena.shape[1:]).to(case.dtype)
        self.arena[1:][read] = windows.float()
        self.arena = self.arena.to(device)
        self.state = self.state_of(self.arena, case)
        self.case = case

    @staticmethod
    def state_of(arena: torch.Tensor, case: Case) -> torch.Tensor:
        past = case.width - 1
        return arena[1:, 1, :, : past * case.channels].view(SLOTS, case.groups, past, case.channels)

    def run(self, rows: Step | None = None, picked: slice = slice(None)) -> torch.Tensor:
        device = self.state.device
        rows = (rows or self.case.rows).to(device)
        x_TGC, bias_GC = self.x_TGC.to(device)[picked], self.bias_GC
        bias_GC = bias_GC if bias_GC is None else bias_GC.to(device)
        return cuda.causal_conv(x_TGC, self.weight_WGC.to(device), bias_GC, self.state, rows).cpu()


def check(case: Case, device: str = "cpu") -> None:
    """Windows are copies of inputs: equal."""
    layer = Layer(case, device)
    arena = layer.arena.cpu().clone()
    state = layer.state_of(arena, case)
    wanted_state = state.double()
    x_TGC, weight_WGC = layer.x_TGC.double(), layer.weight_WGC.double()
    bias_GC = None if layer.bias_GC is None else layer.bias_GC.double()
    wanted = reference.causal_conv(x_TGC, weight_WGC, bias_GC, wanted_state, case.rows)
    state.copy_(wanted_state)
    assert relative_error(layer.run(), wanted) < LIMITS[case.dtype]
    assert same_bits(layer.arena.cpu(), arena)


MIXED = {
    "new": [1, 2, 63, 64, 65, 127],
    "read": [0, -1, 2, 3, -1, 5],
    "writes": [[n] for n in (6, 1, 7, 3, 4, 8)],
}
CASES = {
    "decode": Case(new=[1] * 3, read=[0, -1, 2], writes=[[1], [3], [2]], groups=2),
    "decode bfloat16": Case(
        new=[1] * 3, read=[0, -1, 2], writes=[[1], [-1], [2]], channels=300, dtype=torch.bfloat16
    ),
    "drafts": Case(new=[5, 2, 1], read=[0, 1, 2], writes=[[3, 0, 4], [-1, 1, 5], [-1, -1, 2]], width=5),
    "mixed": Case(**MIXED),
    "mixed bfloat16": Case(**MIXED, dtype=torch.bfloat16, channels=130, biased=True),
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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case)


def test_same_bits_in_any_batch_and_any_cut() -> None:
    case = Case(new=[1, 70, 3], read=[0, 1, 2], writes=[[3], [4], [5]])
    whole, cut = Layer(case), Layer(case)
    together = whole.run()
    found = [cut.run(step([1], read=[0], writes=[[3]]), slice(1))]
    for start, end in ((1, 2), (2, 36), (36, 71)):
        rows = step([end - start], read=[1], writes=[[4 if end == 71 else 1]])
        found.append(cut.run(rows, slice(start, end)))
    found.append(cut.run(step([3], read=[2], writes=[[5]]), slice(71, 74)))
    assert same_bits(torch.cat(found), together)
    assert same_bits(cut.state[3:6], whole.state[3:6])


@pytest.mark.parametrize("new", [[0, 2], [40, 0, 3]], ids=str)
def test_rows_of_no_tokens_are_left_out(new: list[int]) -> None:
    """Two tokens of two rows may be one row."""
    count = len(new) - 1
    layer, other = (
        Layer(Case(new=[n for n in new if n], read=[0, 1][:count], writes=[[4], [5]][:count]))
        for _ in range(2)
    )
    wanted = layer.run()
    read, writes = [0, 1][:count], [[4], [5]][:count]
    read.insert(new.index(0), 2)
    writes.insert(new.index(0), [-1])
    assert same_bits(other.run(step(new, read=read, writes=writes)), wanted)
    assert same_bits(other.arena, layer.arena)


@pytest.mark.parametrize("new", [1, 40])
def test_states_far_into_the_arena(tmp_path: Path, new: int) -> None:
    """2^32 elements away, in a file that has blocks only where it is written."""
    layer = Layer(Case(new=[new], read=[0], writes=[[1]], channels=32))
    near = layer.state.clone()
    wanted = layer.run()
    wanted_state = layer.state[1]
    size = near[0].numel()
    skipped = (1 << 32) // size
    far = torch.from_file(str(tmp_path / "arena"), shared=True, size=(skipped + 2) * size)
    layer.state = far.view(-1, *near.shape[1:])
    layer.state[skipped] = near[0]
    assert same_bits(layer.run(step([new], read=[skipped], writes=[[skipped + 1]])), wanted)
    assert same_bits(layer.state[skipped + 1], wanted_state)
