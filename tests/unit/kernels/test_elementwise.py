"""Norms, activations and rotary angles against their definitions; every lane runs the same arithmetic."""

from collections.abc import Callable

import pytest
import torch

from tests.support.kernels.cases import random, relative_error, same_bits
from tests.unit.kernels.test_stored import CODE_KINDS, stored
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.linear.stored import Kind, plain

SIZES = (1, 2, 63, 64, 65, 127, 300)
EPSILON = 1e-6
ROWS = 5
SMALL = 1e-3  # so that epsilon counts

Tensors = list[torch.Tensor]
Draw = Callable[..., torch.Tensor]  # of a shape
Change = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[[int, Draw], tuple[torch.Tensor | float, ...]]
"""Returns the arguments of the operator of its name, of a width."""


def add_norm(width: int, draw: Draw) -> tuple[torch.Tensor | float, ...]:
    return SMALL * draw(ROWS, width), SMALL * draw(ROWS, width), draw(width), EPSILON


def rms_norm(width: int, draw: Draw) -> tuple[torch.Tensor | float, ...]:
    return SMALL * draw(ROWS, 8 + width)[:, 8:], draw(width), EPSILON


def rms_norm_gated(width: int, draw: Draw) -> tuple[torch.Tensor | float, ...]:
    gate = 5 * draw(ROWS, 3, 8 + 2 * width)[..., 8:].view(ROWS, 3, 2, width)
    return SMALL * draw(ROWS, 3, 2, width), gate, draw(width), EPSILON


def silu_mul(width: int, draw: Draw) -> tuple[torch.Tensor]:
    return (20 * draw(ROWS, 2 * width),)


def sigmoid_mul(width: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(ROWS, 3, width), 20 * draw(ROWS, 3, 2 * width)[..., width:]


def sigmoid_mul_of_one_gate(width: int, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    x, gate = sigmoid_mul(width, draw)
    return x, gate[..., :1].expand(x.shape)


OF_ROWS: tuple[Make, ...] = (rms_norm, rms_norm_gated, silu_mul, sigmoid_mul, sigmoid_mul_of_one_gate)


def drawn(seed: int, to: Change = lambda x: x) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: to(random(generator, *shape))


def run(ops: Operators, make: Make, width: int, draw: Draw, change: Change = lambda x: x) -> Tensors:
    """Run the operator with its arguments changed; return its results."""
    given = (change(x) if isinstance(x, torch.Tensor) else x for x in make(width, draw))
    found = getattr(ops, make.__name__.removesuffix("_of_one_gate"))(*given)
    return [*found] if isinstance(found, tuple) else [found]


def picked(rows: slice) -> Change:
    """Return the choice of these rows of an argument that has rows."""
    return lambda x: x[rows] if len(x) == ROWS and x.dim() > 1 else x


@pytest.mark.parametrize("width", SIZES)
@pytest.mark.parametrize("make", [add_norm, *OF_ROWS])
def test_matches_the_definition_and_a_row_alone(
    cpu: Operators, reference: Operators, make: Make, width: int
) -> None:
    found = run(cpu, make, width, drawn(width))
    wanted = run(reference, make, width, drawn(width), torch.Tensor.double)
    assert all(relative_error(tensor, exact) < 1e-5 for tensor, exact in zip(found, wanted, strict=True))
    alone = run(cpu, make, width, drawn(width), picked(slice(4, 5)))
    assert all(same_bits(tensor[4:5], row) for tensor, row in zip(found, alone, strict=True))


@pytest.mark.parametrize("width", SIZES)
def test_first_branch_is_the_sum(cpu: Operators, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    branch, weight = random(draw, ROWS, width), random(draw, width)
    found = cpu.add_norm(None, branch.clone(), weight, EPSILON)
    assert same_bits(found[0], branch)
    # A sum with -0.0 keeps every bit of the branch.
    assert same_bits(found[1], cpu.add_norm(torch.full_like(branch, -0.0), branch, weight, EPSILON)[1])
    assert same_bits(found[1], cpu.rms_norm(branch, weight, EPSILON))


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
    found = cpu.embed(torch.tensor([3, 0, 6, 3]), plain(weight))
    assert same_bits(found, weight.float()[[3, 0, 6, 3]])


@pytest.mark.parametrize("kind", CODE_KINDS)
def test_embed_of_codes_is_that_of_their_values(cpu: Operators, kind: Kind) -> None:
    weight, tokens = stored(kind, 7, 8, 4, shifted=True), torch.tensor([3, 0, 6, 3])
    assert same_bits(cpu.embed(tokens, weight), weight.values[tokens])
