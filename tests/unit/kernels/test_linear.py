"""`linear` and its kin against their definitions at odd sizes, and the same bits for a row in any batch."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.support.kernels.cases import COMPUTE_DTYPES, random, same_bits
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.linear.stored import plain
from tidemill.kernels.shared.compute_dtype import ComputeDtype

ROWS = (1, 2, 7, 65, 300)
OUT = (1, 16, 17, 63, 127, 300)
IN = (1, 2, 63, 64, 127, 600)


def weights_of(compute_dtype: ComputeDtype) -> torch.dtype:
    """Return the type of weights whose products are of this type."""
    return torch.bfloat16 if compute_dtype == "bfloat16" else torch.float32


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_matches_the_definition(
    kernel_cache: Path, compute_dtype: ComputeDtype, rows: int, *, bias: bool
) -> None:
    cpu, reference = (operators(variant, kernel_cache, compute_dtype) for variant in ("cpu", "reference"))
    draw = torch.Generator().manual_seed(rows)
    for n, k in itertools.product(OUT, IN):
        x, weight = random(draw, rows, k), random(draw, n, k).to(weights_of(compute_dtype))
        bias_N = random(draw, n) if bias else None
        wanted = reference.linear(x.double(), reference.pack([plain(weight)], bias_N))
        terms = x.double().abs() @ weight.double().abs().T + 1
        packed = cpu.pack([plain(weight)], bias_N)
        assert packed.rounds == (compute_dtype == "bfloat16")
        assert float(((cpu.linear(x, packed) - wanted).abs() / terms).max()) < 1e-5, (n, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_linear(cpu: Operators, reference: Operators, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = random(draw, 9, 60), random(draw, 33, 60).to(dtype), random(draw, 33)
    for ops in (cpu, reference):
        for packed in (ops.pack([plain(weight)], None), ops.pack([plain(weight)], bias)):
            assert same_bits(ops.logits(x, packed), ops.linear(x, packed))
    assert reference.logits(x.bfloat16(), reference.pack([plain(weight)], None)).dtype == torch.float32


@pytest.mark.parametrize(("n", "k"), [(17, 63), (300, 600), (64, 256), (130, 1000), (130, 1001)])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_row_has_the_same_bits_in_any_batch_and_with_any_threads(
    kernel_cache: Path, compute_dtype: ComputeDtype, n: int, k: int
) -> None:
    cpu, draw = operators("cpu", kernel_cache, compute_dtype), torch.Generator().manual_seed(n)
    x, weight_NK = random(draw, 400, k), random(draw, n, k).to(weights_of(compute_dtype))
    weight = cpu.pack([plain(weight_NK)], random(draw, n))
    whole = cpu.linear(x, weight)
    torch.set_num_threads(2)
    assert same_bits(cpu.linear(x, weight), whole)
    torch.set_num_threads(1)
    for rows in (1, 2, 3, 5, 6, 7, 11, 12, 13, 16, 17, 64, 191, 193):
        picked = torch.randperm(400, generator=draw)[:rows]
        assert same_bits(cpu.linear(x[picked], weight), whole[picked]), rows


def test_products_in_bfloat16_of_wide_weights_are_in_float32(cpu: Operators, half_cpu: Operators) -> None:
    """Weights of a router stay wide on purpose."""
    draw = torch.Generator().manual_seed(0)
    x, weight = random(draw, 9, 60), random(draw, 33, 60)
    assert same_bits(
        half_cpu.linear(x, half_cpu.pack([plain(weight)], None)),
        cpu.linear(x, cpu.pack([plain(weight)], None)),
    )


def test_products_in_bfloat16_round_to_the_nearest_even_and_flush_denormals(half_cpu: Operators) -> None:
    ulp = 2.0**-7
    given = [1 + ulp / 2, 1 + 1.5 * ulp, -1 - ulp / 2, 1 + 0.51 * ulp, 3.4e38, torch.inf, 1e-39, -1e-39]
    wanted = [1, 1 + 2 * ulp, -1, 1 + ulp, torch.inf, torch.inf, 0, 0]
    one = half_cpu.pack([plain(torch.ones(1, 1).bfloat16())], None)
    found = half_cpu.linear(torch.tensor(given)[:, None], one)[:, 0]
    assert torch.equal(found, torch.tensor(wanted))
    assert bool(half_cpu.linear(torch.tensor([[torch.nan]]), one).isnan().all())
    small = half_cpu.pack([plain(torch.tensor([[1e-30]]).bfloat16())], None)
    found = half_cpu.linear(torch.tensor([[1e-10], [1e-5]]), small)[:, 0]
    assert torch.equal(found > 0, torch.tensor([False, True]))


@pytest.mark.parametrize("rows", [1, 3, 15, 16, 33])
def test_products_in_bfloat16_sum_even_and_odd_elements_of_32_apart(half_cpu: Operators, rows: int) -> None:
    """A step is as good as exact in float64, and then rounded like a fused multiply-add."""
    draw = torch.Generator().manual_seed(rows)
    x, weight, bias_N = random(draw, rows, 70).bfloat16(), random(draw, 33, 70).bfloat16(), random(draw, 33)
    terms_MNK = torch.zeros(rows, 33, 96, dtype=torch.float64)
    terms_MNK[..., :70] = x.double()[:, None] * weight.double()
    wanted = bias_N.double().expand(rows, 33)
    for start in range(0, 96, 32):
        chains = torch.zeros(rows, 33, 2, dtype=torch.float64)
        for k in range(start, start + 32, 2):
            chains = (chains + terms_MNK[..., k : k + 2]).float().double()
        wanted = (wanted + chains.sum(-1).float()).float().double()
    assert same_bits(half_cpu.linear(x.float(), half_cpu.pack([plain(weight)], bias_N)), wanted.float())


@pytest.mark.parametrize("half", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("inner", [5, 32, 160, 1024])
def test_linear_with_silu_is_one_after_the_other(
    kernel_cache: Path, inner: int, half: tuple[bool, bool], compute_dtype: ComputeDtype
) -> None:
    """Types of the weights decide whether what is between them is in bfloat16."""
    ops, draw = operators("cpu", kernel_cache, compute_dtype), torch.Generator().manual_seed(inner)
    dtypes = [torch.bfloat16 if is_half else torch.float32 for is_half in half]
    down = ops.pack([plain(random(draw, 40, inner).to(dtypes[1]))], None)
    for bias in (None, random(draw, 2 * inner)):
        gate_up = ops.pack([plain(random(draw, 2 * inner, 70).to(dtypes[0]))], bias)
        for rows in (1, 17, 300):
            x = random(draw, rows, 80)[:, :70]
            wanted = down.rounded(ops.silu_mul(ops.linear(x, gate_up)))
            found = ops.linear_silu(x, gate_up, down)
            assert same_bits(down.rounded(found.float()), wanted)
            assert same_bits(ops.linear(found, down), ops.linear(wanted, down))
            torch.set_num_threads(2)
            assert same_bits(ops.linear_silu(x, gate_up, down), found)
            torch.set_num_threads(1)


@pytest.mark.parametrize("depth", [1, 63, 64, 70, 1024, 1056])
def test_rows_in_bfloat16_are_those_that_a_product_rounds(half_cpu: Operators, depth: int) -> None:
    """Rows may have odd strides, and lack the zeros of their last block."""
    draw = torch.Generator().manual_seed(depth)
    weight, wide = (
        half_cpu.pack([plain(random(draw, 40, depth).bfloat16())], None),
        random(draw, 33, depth + 3),
    )
    for x in (wide[:, :depth], wide[:, :depth].contiguous(), wide[:, 3:]):
        assert same_bits(half_cpu.linear(x.bfloat16(), weight), half_cpu.linear(x, weight))
    found = half_cpu.linear(wide.bfloat16()[:, 3:], weight)
    assert same_bits(found, half_cpu.linear(wide[:, 3:], weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", ROWS)
def test_half_precision_weights_give_the_bits_of_wide_ones(
    cpu: Operators, rows: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(0)
    for n, k in itertools.product(OUT, IN):
        x, weight = random(draw, rows, k), random(draw, n, k).to(dtype)
        packed = cpu.pack([plain(weight)], None)
        assert packed.data.dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
        assert same_bits(cpu.linear(x, packed), cpu.linear(x, cpu.pack([plain(weight.float())], None))), (
            n,
            k,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "n", "k"), [(1, 1, 1, 1), (3, 5, 33, 20), (70, 4, 64, 48)])
@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
def test_each_head_is_a_linear_of_its_own(
    kernel_cache: Path,
    *,
    tokens: int,
    heads: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    compute_dtype: ComputeDtype,
) -> None:
    """The heads are columns of a wider tensor, computed with one thread and two."""
    cpu, reference = (operators(variant, kernel_cache, compute_dtype) for variant in ("cpu", "reference"))
    draw = torch.Generator().manual_seed(n)
    x, weight = random(draw, tokens, heads, k + 7)[..., 4 : 4 + k], random(draw, heads, n, k).to(dtype)
    found = cpu.linear_heads(x, cpu.pack([plain(weight)], None))
    wanted = [cpu.linear(x[:, h].contiguous(), cpu.pack([plain(weight[h])], None)) for h in range(heads)]
    assert same_bits(found, torch.stack(wanted, dim=1))
    truth = reference.linear_heads(x.double(), reference.pack([plain(weight)], None))
    assert torch.allclose(found.double(), truth, atol=1e-4)
    torch.set_num_threads(2)
    assert same_bits(cpu.linear_heads(x, cpu.pack([plain(weight)], None)), found)
    picked = torch.arange(tokens - 1, -1, -2)
    assert same_bits(cpu.linear_heads(x[picked], cpu.pack([plain(weight)], None)), found[picked])
