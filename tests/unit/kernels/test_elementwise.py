"""Norms, activations and rotary angles against their definitions; every lane runs the same arithmetic."""

import pytest
import torch

from tests.support.kernels.cases import random, relative_error, same_bits
from tidemill.kernels.dispatch import Operators

SIZES = (1, 2, 63, 64, 65, 127, 300)
EPSILON = 1e-6
SMALL = 1e-3  # so that epsilon counts


@pytest.mark.parametrize("width", SIZES)
def test_add_norm(cpu: Operators, reference: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    residual, branch, weight = (
        SMALL * random(draw, 65, width),
        SMALL * random(draw, 65, width),
        random(draw, width),
    )
    wanted = reference.add_norm(residual.double(), branch.double(), weight.double(), EPSILON)
    alone = cpu.add_norm(residual[40:41].clone(), branch[40:41], weight, EPSILON)
    plain = residual + branch
    found = cpu.add_norm(residual, branch, weight, EPSILON)
    assert same_bits(found[0], plain)
    assert relative_error(found[1], wanted[1]) < 1e-5
    for tensor, every in zip(alone, found, strict=True):
        assert same_bits(tensor, every[40:41])


@pytest.mark.parametrize("width", SIZES)
def test_first_branch_is_the_sum(cpu: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    branch, weight = random(draw, 65, width), random(draw, width)
    found = cpu.add_norm(None, branch.clone(), weight, EPSILON)
    assert same_bits(found[0], branch)
    # A sum with -0.0 keeps every bit of the branch.
    assert same_bits(found[1], cpu.add_norm(torch.full_like(branch, -0.0), branch, weight, EPSILON)[1])


@pytest.mark.parametrize("width", SIZES)
def test_rms_norm(cpu: Operators, reference: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x, weight = SMALL * random(draw, 65, 11 + width)[:, 11:], random(draw, width)
    found = cpu.rms_norm(x, weight, EPSILON)
    assert relative_error(found, reference.rms_norm(x.double(), weight.double(), EPSILON)) < 1e-5
    assert same_bits(found[40:41], cpu.rms_norm(x[40:41], weight, EPSILON))
    assert same_bits(found, cpu.add_norm(None, x.clone(), weight, EPSILON)[1])


@pytest.mark.parametrize("width", SIZES)
def test_rms_norm_gated(cpu: Operators, reference: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x, weight = SMALL * random(draw, 7, 3, 2, width), random(draw, width)
    gate = 5 * random(draw, 7, 3, 11 + 2 * width)[..., 11:].view(x.shape)
    found = cpu.rms_norm_gated(x, gate, weight, EPSILON)
    wanted = reference.rms_norm_gated(x.double(), gate.double(), weight.double(), EPSILON)
    assert relative_error(found, wanted) < 1e-5
    assert same_bits(found[4:5], cpu.rms_norm_gated(x[4:5], gate[4:5], weight, EPSILON))


@pytest.mark.parametrize("width", SIZES)
def test_silu_mul(cpu: Operators, reference: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x = 20 * random(draw, 33, 2 * width)
    assert relative_error(cpu.silu_mul(x), reference.silu_mul(x.double())) < 1e-5


@pytest.mark.parametrize("width", SIZES)
def test_sigmoid_mul(cpu: Operators, reference: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x, gate = random(draw, 9, 3, width), 20 * random(draw, 9, 3, 2 * width)[..., width:]
    assert relative_error(cpu.sigmoid_mul(x, gate), reference.sigmoid_mul(x.double(), gate.double())) < 1e-5
    one = gate[..., :1].expand(x.shape)
    assert relative_error(cpu.sigmoid_mul(x, one), reference.sigmoid_mul(x.double(), one.double())) < 1e-5
    assert same_bits(cpu.sigmoid_mul(x, one), cpu.sigmoid_mul(x, one.contiguous()))


@pytest.mark.parametrize("value", [-60.7, -17.3, -3.1, -0.2, 1e-3, 0.9, 2.3, 13.7, 88.8])
def test_every_lane_runs_the_same_arithmetic(cpu: Operators, value: float) -> None:
    """Equal inputs at every place of rows of every width: one result, vector body or tail."""
    one = cpu.silu_mul(torch.full((1, 2), value))
    for width in (1, 7, 8, 15, 33, 64):
        assert same_bits(cpu.silu_mul(torch.full((3, 2 * width), value)), one.expand(3, width))


@pytest.mark.parametrize("value", [-1e30, -200.0, -90.0, -1e-30, 0.0, 1e-30, 90.0, 200.0, 1e30])
def test_extreme_gates_stay_finite(cpu: Operators, value: float) -> None:
    gate = torch.full((1, 1, 5), value)
    found = cpu.sigmoid_mul(torch.ones(1, 1, 5), gate)
    assert torch.allclose(found, torch.sigmoid(gate[0]), rtol=1e-5, atol=1e-30)


def test_rope_angles(cpu: Operators, reference: Operators) -> None:
    positions = torch.tensor([0, 1, 63, 64, 4095, 262_143])
    frequencies = 1 / 10_000 ** (torch.arange(11) / 11)
    found = cpu.rope_angles(positions, frequencies)
    assert torch.allclose(found, reference.rope_angles(positions, frequencies), rtol=0, atol=1e-6)
    assert same_bits(found[3:4], cpu.rope_angles(positions[3:4], frequencies))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(cpu: Operators, dtype: torch.dtype) -> None:
    weight = random(torch.Generator().manual_seed(0), 7, 5).to(dtype)
    found = cpu.embed(torch.tensor([3, 0, 6, 3]), weight)
    assert same_bits(found, weight.float()[[3, 0, 6, 3]])
