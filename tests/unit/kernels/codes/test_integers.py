"""Products of INT8 with INT8: the definition in whole numbers, and its bits in compiled kernels."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.kernels.cases import COMPUTE_DTYPES, random, relative_error, same_bits
from tests.unit.kernels.test_stored import stored
from tidemill.kernels.activation.reference import silu_mul
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.linear.reference import COLUMNS_MAX, TINY, quantised
from tidemill.kernels.linear.stored import Stored, plain, stack
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice
from tidemill.kernels.shared.compute_dtype import ComputeDtype

SHAPES = (1, 1), (17, 70), (33, 64), (130, 97), (300, 600), (9, 1031)
"""Outputs and inputs."""
ROWS = *((rows, 1) for rows in (1, 2, 3, 4, 5, 11, 12, 13, 25, 200)), (200, 2)
"""Rows and threads."""


def integers(rows: int, columns: int, seed: int = 0) -> Stored:
    found = stored("w8a8", rows, columns, columns, shifted=False, seed=seed)
    assert found.scales is not None
    return replace(found, scales=found.scales / 256)


def test_definition_is_exact_sums_of_rounded_quotients(reference: Operators) -> None:
    draw = torch.Generator().manual_seed(0)
    given, x = integers(5, 33), 3 * random(draw, 4, 33)
    assert given.scales is not None
    found = reference.linear(x, reference.pack([given], None))
    for row, numbers in enumerate(x.numpy()):
        largest = np.abs(numbers).max()
        inverse = np.float32(127) / largest
        codes = [round(Fraction(float(number * inverse))) for number in numbers]  # ties to even
        assert max(map(abs, codes)) == 127
        for out in range(5):
            total = sum(code * int(weight) for code, weight in zip(codes, given.codes[out], strict=True))
            wanted = np.float32(total) * (largest / np.float32(127)) * given.scales[out].numpy()[0]
            assert found[row, out] == float(wanted)


def test_ties_are_even_and_rows_without_scale_are_zeros_or_nan() -> None:
    x = torch.tensor(
        [
            [127.0, 0.5, -1.5, 2.5, -0.0],
            [3e38, -3e38, 1e38, 0, 0],
            [0, 0, 0, 0, 0],
            [TINY / 2, -1e-45, 0, 0, 0],
            [1, torch.nan, 0, 0, 0],
            [1, -torch.inf, torch.nan, 0, 0],
        ]
    )
    codes, scales = quantised(x)
    assert codes.tolist() == [[127, 0, -2, 2, 0], [127, -127, 42, 0, 0], *4 * [[0] * 5]]
    assert scales[:4, 0].tolist() == [1.0, float(np.float32(3e38) / np.float32(127)), 0.0, 0.0]
    assert scales[4:].isnan().all()


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_products_have_the_bits_of_the_definition(
    kernel_cache: Path, reference: Operators, compute_dtype: ComputeDtype
) -> None:
    cpu, draw = operators("cpu", kernel_cache, compute_dtype), torch.Generator().manual_seed(0)
    for n, k in SHAPES:
        given = integers(n, k)
        for bias in (None, random(draw, n)):
            packed, truth = cpu.pack([given], bias), reference.pack([given], bias)
            assert (packed.kind, packed.rounds) == ("w8a8", False)
            for rows, threads in ROWS:
                x = random(draw, rows, k + 3)[:, :k]
                x[::2] = x[::2].bfloat16().float()  # which makes ties
                x[rows // 2] *= 1e-20
                x[rows // 3] = 0
                torch.set_num_threads(threads)
                assert same_bits(cpu.linear(x, packed), reference.linear(x, truth)), (n, k, rows)


def test_numbers_that_are_none_reach_the_products_of_their_row_alone(
    cpu: Operators, reference: Operators
) -> None:
    x = random(torch.Generator().manual_seed(0), 7, 70)
    x[1, 3], x[3, 69], x[5] = torch.nan, -torch.inf, TINY / 3
    given = integers(40, 70)
    found = cpu.linear(x, cpu.pack([given], None))
    assert found.isnan().all(-1).tolist() == [False, True, False, True, False, False, False]
    torch.testing.assert_close(
        found, reference.linear(x, reference.pack([given], None)), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("weight", [-128, 127])
@pytest.mark.parametrize("sign", [-1, 1])
def test_no_sum_saturates(cpu: Operators, weight: int, sign: int) -> None:
    """The largest products, in as many columns as there may be."""
    codes = torch.full((33, COLUMNS_MAX), weight, dtype=torch.int8)
    given = Stored(codes, "w8a8", torch.ones(33, 1))
    packed = cpu.pack([given], None)
    for rows in (1, 4, 13):
        found = cpu.linear(torch.full((rows, COLUMNS_MAX), 127.0 * sign), packed)
        assert (found == float(np.float32(127 * sign * weight * COLUMNS_MAX))).all()


def test_parts_of_other_kinds_lie_beside_it(half_cpu: Operators, reference: Operators) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [
        integers(20, 64),
        integers(13, 64, seed=1),
        stored("int8", 9, 64, 64, shifted=False),
        plain(random(draw, 5, 64)),
        plain(random(draw, 4, 64).bfloat16()),
    ]
    bias, x = random(draw, 51), random(draw, 6, 64)
    packed = half_cpu.pack(parts, bias)
    assert [(part.kind, part.out_features) for part in packed.segments] == [
        ("w8a8", 33), ("int8", 9), ("float32", 5), ("bfloat16", 4)
    ]  # fmt: skip
    biases = torch.split(bias, [len(part.codes) for part in parts])
    each = [half_cpu.linear(x, half_cpu.pack([part], own)) for part, own in zip(parts, biases, strict=True)]
    assert same_bits(half_cpu.linear(x, packed), torch.cat(each, -1))
    wanted = reference.linear(x, reference.pack(parts, bias))
    assert relative_error(half_cpu.linear(x, packed), wanted) < 1e-2


@pytest.mark.parametrize("inner", [30, 160])
def test_gates_and_experts_are_products_of_their_rows(
    half_cpu: Operators, reference: Operators, inner: int
) -> None:
    draw = torch.Generator().manual_seed(inner)
    gate_up, down = half_cpu.pack([integers(2 * inner, 96)], None), half_cpu.pack([integers(50, inner)], None)
    parts = [
        stack([integers(out, depth, seed) for seed in range(4)])
        for out, depth in ((2 * inner, 96), (96, inner))
    ]
    ours, truth = (
        Experts(ops.pack(parts[:1], None), ops.pack(parts[1:], None)) for ops in (half_cpu, reference)
    )
    for rows in (1, 17, 65):
        x = random(draw, rows, 96)
        gated = half_cpu.linear_silu(x, gate_up, down)
        assert same_bits(gated, half_cpu.silu_mul(half_cpu.linear(x, gate_up)))
        assert relative_error(gated, silu_mul(half_cpu.linear(x, gate_up))) < 1e-5
        chosen = torch.rand(rows, 4, generator=draw).argsort(-1)[:, :2].sort(-1).values.int()
        chosen[1::3, 0] = -1
        choice = Choice(chosen, random(draw, rows, 2))
        found, wanted = (
            ops.moe_outer(ops.moe_inner(x, choice, experts), choice, experts, None, None)
            for ops, experts in ((half_cpu, ours), (reference, truth))
        )
        assert relative_error(found, wanted) < 1e-2
        alone = Choice(choice.experts_TK[:1], choice.weights_TK[:1])
        hidden = half_cpu.moe_inner(x[:1].contiguous(), alone, ours)
        assert same_bits(half_cpu.moe_outer(hidden, alone, ours, None, None), found[:1])
