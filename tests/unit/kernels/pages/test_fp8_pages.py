"""Pages of FP8: `rope_store` writes the codes of the definition, and `attention` over them has the bits of
pages in bfloat16 with their numbers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch

from tests.support.kernels.cases import (
    COMPUTE_DTYPES,
    Step,
    random,
    relative_error,
    same_bits,
    shuffled_pages,
    step,
)
from tidemill.kernels.dispatch import Operators, operators
from tidemill.kernels.shared.fp8 import BIAS, CODE_MAX, Fp8, decode, encode, fixed_scales, scale_of

P = 16
UNWRITTEN = 0xA5
NEW, BEFORE = [40, 1, 3, 1, 130], [0, 300, 257, 0, 20]
LENS = [new + before for new, before in zip(NEW, BEFORE, strict=True)]

Scaling = Literal["fixed", "per token and head"]


@pytest.fixture(scope="module")
def cpu(kernel_cache: Path) -> Operators:
    return operators("cpu", kernel_cache)


def pages_of(count: int, heads: int, parts: int, dim: int, scaling: Scaling, fill: int = UNWRITTEN) -> Fp8:
    """Return the middle one of three layers of an arena: codes, then the scales of their tokens."""
    plane = P * (dim + 1)
    arena = torch.full((count, heads, 3, parts, plane), fill, dtype=torch.uint8)[:, :, 1]
    codes = arena[..., : P * dim].view(count, heads, parts, P, dim)
    return fixed_scales(codes, 125, 129) if scaling == "fixed" else Fp8(codes, arena[..., P * dim :])


def test_each_code_is_a_number_that_bfloat16_has() -> None:
    codes = torch.arange(256, dtype=torch.uint8).expand(3, -1)
    numbers = decode(codes, torch.tensor([16, BIAS, 246], dtype=torch.uint8))
    assert torch.equal(numbers.isnan(), codes % 128 == 127)
    assert same_bits(numbers.bfloat16().float().nan_to_num(), numbers.nan_to_num())
    assert numbers.nan_to_num().abs().max() < torch.inf


@pytest.mark.parametrize("scale", [0, 1e-38, 1e-30, 0.3, 1.0, 448.0, 449.0, 1e5, 1e37, 3e38])
def test_scale_is_the_least_that_has_no_code_beyond_the_largest(scale: float) -> None:
    highest = torch.tensor([scale], dtype=torch.float32)
    byte = scale_of(highest)
    largest = decode(torch.tensor([[0x7E]], dtype=torch.uint8), byte)
    below = CODE_MAX * 2.0 ** (int(byte) - 1 - BIAS)
    assert largest >= highest or int(byte) == 246
    assert below < scale or int(byte) == 16


@pytest.mark.parametrize("scaling", ["fixed", "per token and head"])
@pytest.mark.parametrize(
    ("heads", "dim", "latent"), [(2, 64, False), (1, 63, False), (3, 5, False), (1, 72, True)]
)
def test_rope_store_writes_the_codes_of_the_definition(
    cpu: Operators, *, heads: int, dim: int, latent: bool, scaling: Scaling
) -> None:
    draw = torch.Generator().manual_seed(dim)
    tokens = sum(NEW)
    magnitudes = 2.0 ** torch.randint(-40, 40, (tokens, 2, heads, 1), generator=draw)
    kv_T2KD = random(draw, tokens, 2, heads, dim) * magnitudes
    for at, value in enumerate([torch.nan, torch.inf, 0.0, -0.0, 1e-42, 448.0, -465.0, 2.0**-9, 2.0**-10]):
        kv_T2KD[at, :, 0, at % dim] = value
    kv_T2KD[10], kv_T2KD[11] = 0.0, -1e-40
    rows = step(NEW, BEFORE, shuffled_pages(LENS, P, draw))
    count = 1 + int(rows.pages_BN.max())
    found, wanted = (pages_of(count, heads, 1 if latent else 2, dim, scaling) for _ in range(2))
    q_THD, angles = random(draw, tokens, heads, dim), torch.zeros(tokens, 2, 0)
    k_TKD, v_TKD = kv_T2KD.unbind(1)
    for pages, ops in ((found, cpu), (wanted, operators("reference", Path()))):
        ops.rope_store(q_THD, k_TKD, None if latent else v_TKD, None, None, 1e-6, angles, pages, rows)
    assert torch.equal(found.scales, wanted.scales)
    nans = found.codes % 128 == 127
    assert torch.equal(nans, wanted.codes % 128 == 127)
    assert bool(nans.any())
    assert torch.equal(found.codes[~nans], wanted.codes[~nans])


@pytest.mark.parametrize("compute_dtype", COMPUTE_DTYPES)
@pytest.mark.parametrize("scaling", ["fixed", "per token and head"])
@pytest.mark.parametrize(
    ("shape", "window", "sinks"),
    [
        ((4, 1, 64), None, False),
        ((7, 1, 96), 33, True),
        ((6, 2, 63), 40, False),
        ((4, 2, 128), None, True),
        ((5, 1, 72), None, False),
    ],
    ids=str,
)
def test_attention_has_the_bits_of_the_numbers_in_bfloat16(
    kernel_cache: Path,
    *,
    shape: Sequence[int],
    window: int | None,
    sinks: bool,
    scaling: Scaling,
    compute_dtype: Literal["float32", "bfloat16"],
) -> None:
    """Decode, replay, prompts and the end of one; bytes that no token sees are NaN codes."""
    q_heads, heads, dim = shape
    parts = 1 if dim == 72 else 2
    draw = torch.Generator().manual_seed(sum(shape))
    rows = step(NEW, BEFORE, shuffled_pages(LENS, P, draw))
    coded = pages_of(1 + int(rows.pages_BN.max()), heads, parts, dim, scaling, fill=0x7F)
    _fill(coded, rows, draw)
    numbers = decode(coded.codes, coded.scales).bfloat16()
    q_THD = random(draw, sum(NEW), q_heads, dim)
    sinks_H = random(draw, q_heads) if sinks else None
    ops = operators("cpu", kernel_cache, compute_dtype)
    found = ops.attention(q_THD, coded, rows, window, sinks_H)
    assert same_bits(found, ops.attention(q_THD, numbers, rows, window, sinks_H))
    reference = operators("reference", kernel_cache, compute_dtype)
    wanted = reference.attention(q_THD.double(), coded, rows, window, sinks_H)
    assert relative_error(found, wanted) < (1e-5 if compute_dtype == "float32" else 1e-2)
    alone = ops.attention(q_THD[40:41], coded, step([1], [300], rows.pages_BN[1:2]), window, sinks_H)
    assert same_bits(alone, found[40:41])


def _fill(pages: Fp8, rows: Step, draw: torch.Generator) -> None:
    """Write all tokens of the rows."""
    _, heads, parts, _, dim = pages.shape
    for length, pages_N in zip(LENS, rows.pages_BN, strict=True):
        x_LKHD = random(draw, length, heads, parts, dim)
        position = torch.arange(length)
        at = (pages_N[position // P].long(), slice(None), slice(None), position % P)
        if not pages.is_fixed:
            pages.scales[at] = scale_of(x_LKHD.abs().amax(-1))
        pages.codes[at] = encode(x_LKHD, pages.scales[at])
