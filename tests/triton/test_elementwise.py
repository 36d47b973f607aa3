"""Norms and activations in Triton against their definitions; a row's bits depend on nothing else."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import LIMITS, random, relative_error, same_bits
from tests.unit.kernels.test_elementwise import EPSILON, OF_ROWS, SMALL, Make, drawn, picked, run
from tidemill.kernels.activation import cuda as activation_cuda
from tidemill.kernels.dispatch import REFERENCE, operators
from tidemill.kernels.rms_norm import cuda as rms_norm_cuda
from tidemill.kernels.rms_norm import reference as rms_norm_reference

OURS = operators("triton", Path())
WIDTHS = (1, 2, 63, 64, 65, 127, 300, 1500)


@dataclass(frozen=True)
class Case:
    make: Make
    width: int
    dtype: torch.dtype


CASES = {
    f"{make.__name__} {width} {dtype}": Case(make, width, dtype)
    for make in OF_ROWS
    for width in WIDTHS
    for dtype in LIMITS
}


def check(case: Case, device: str = "cpu") -> None:
    [found] = run(OURS, case.make, case.width, drawn(case.width, lambda x: x.to(device, case.dtype)))
    rounded = drawn(case.width, lambda x: x.to(case.dtype))
    [wanted] = run(REFERENCE, case.make, case.width, rounded, torch.Tensor.double)
    assert found.dtype == case.dtype
    assert relative_error(found.cpu(), wanted) < LIMITS[case.dtype]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_matches_the_definition(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("make", OF_ROWS, ids=lambda make: make.__name__)
def test_same_bits_in_any_batch_also_of_no_tokens(make: Make) -> None:
    [found] = run(OURS, make, 65, drawn(65))
    for rows in (slice(3, 4), slice(0)):
        [few] = run(OURS, make, 65, drawn(65), picked(rows))
        assert same_bits(few, found[rows])


@pytest.mark.parametrize("value", [-1e30, -200.0, -90.0, -1e-30, 0.0, 1e-30, 90.0, 200.0, 1e30])
def test_extreme_gates_stay_finite(value: float) -> None:
    gate = torch.full((1, 1, 5), value)
    one = torch.ones(1, 1, 5)
    assert torch.allclose(activation_cuda.sigmoid_mul(one, gate), torch.sigmoid(gate[0]), atol=1e-30)
    wanted = torch.nn.functional.silu(gate[0])
    both = torch.cat([gate, one], 2)[0]
    assert torch.allclose(activation_cuda.silu_mul(both), wanted, atol=1e-30)
    normed = rms_norm_cuda.rms_norm_gated(one[None], gate[None], one[0, 0], EPSILON)
    assert torch.allclose(normed, wanted, atol=1e-30)


@dataclass(frozen=True)
class Sum:
    width: int
    dtype: torch.dtype
    first: bool = False  # no residual yet

    def inputs(self, device: str) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(self.width)
        residual_TH, branch_TH = SMALL * random(draw, 5, self.width), SMALL * random(draw, 5, self.width)
        weight_H = random(draw, self.width).to(device)
        return None if self.first else residual_TH.to(device), branch_TH.to(device, self.dtype), weight_H


SUMS = {
    f"add_norm {width} {dtype}{' first' * first}": Sum(width, dtype, first)
    for width in (*WIDTHS, 8192)
    for dtype in LIMITS
    for first in (False, True)
}


def check_sum(case: Sum, device: str = "cpu") -> None:
    """The sum is exact, its norm is of the sum as it is, and of the branch's type."""
    residual_TH, branch_TH, weight_H = case.inputs(device)
    wide_TH = branch_TH.float() if residual_TH is None else residual_TH + branch_TH
    wanted_TH = rms_norm_reference.rms_norm(wide_TH.cpu().double(), weight_H.cpu().double(), EPSILON)
    sum_TH, h_TH = rms_norm_cuda.add_norm(residual_TH, branch_TH, weight_H, EPSILON)
    assert sum_TH.dtype == torch.float32
    assert same_bits(sum_TH, wide_TH)
    assert h_TH.dtype == case.dtype
    assert relative_error(h_TH.cpu(), wanted_TH) < LIMITS[case.dtype]


@pytest.mark.parametrize("case", SUMS.values(), ids=SUMS)
def test_norm_of_a_sum(case: Sum) -> None:
    check_sum(case)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_sum_has_the_same_bits_in_any_batch(count: int) -> None:
    residual_TH, branch_TH, weight_H = Sum(65, torch.bfloat16).inputs("cpu")
    assert residual_TH is not None
    few = rms_norm_cuda.add_norm(residual_TH[:count].clone(), branch_TH[:count], weight_H, EPSILON)
    every = rms_norm_cuda.add_norm(residual_TH, branch_TH, weight_H, EPSILON)
    for some, found in zip(few, every, strict=True):
        assert same_bits(some, found[:count])
