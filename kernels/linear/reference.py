"""The definition of `linear`, y = x W^T (+ bias), of `linear_silu`, `logits` and `linear_heads`."""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional

from tidemill.kernels.activation.reference import silu_mul
from tidemill.kernels.linear.packed import Packed, in_segments
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.shared.compute_dtype import ComputeDtype


def pack(
    parts: Sequence[Stored], bias_N: torch.Tensor | None = None, compute_dtype: ComputeDtype = "float32"
) -> Packed:
    """Join parts of weights `[.., N, K]` by rows, with a bias `[.., N]`: for `linear` without a leading
    dimension, of heads for `linear_heads`, of experts for `moe_inner` and `moe_outer`."""
    if any(part.kind == "w8a8" for part in parts):
        return in_segments(parts, bias_N, partial(_pack, compute_dtype=compute_dtype))
    weight_NK = torch.cat([part.factors(compute_dtype) for part in parts], -2)
    rounds = weight_NK.dtype == torch.bfloat16 and compute_dtype == "bfloat16"
    return Packed(weight_NK, bias_N, weight_NK.shape[-2], weight_NK.shape[-1], rounds)


def _pack(part: Stored, bias_N: torch.Tensor | None, compute_dtype: ComputeDtype) -> Packed:
    if part.kind != "w8a8":
        return pack([part], bias_N, compute_dtype)
    assert part.group == part.columns <= COLUMNS_MAX
    assert part.offsets is None
    return Packed(part.codes, bias_N, part.codes.shape[-2], part.columns, kind=part.kind, scales=part.scales)


def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Float tensors; returns `[M, N]` in the type of x, to which weights are widened."""
    return torch.cat([_product(x_MK, part) for part in weight.segments], -1)


def _product(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    bias_N = None if weight.bias_N is None else weight.bias_N.to(x_MK.dtype)
    if weight.scales is None:
        return functional.linear(weight.rounded(x_MK), weight.data.to(x_MK.dtype), bias_N)
    y_MN = integer_product(x_MK, weight.data, weight.scales).to(x_MK.dtype)
    return y_MN if bias_N is None else y_MN + bias_N


COLUMNS_MAX = 1 << 17
"""The most columns of `w8a8`: sums of more may not fit 32 bits."""

TINY = 2.0**-100
"""A row of x whose numbers are all smaller is zeros."""


def integer_product(x_MK: torch.Tensor, codes_NK: torch.Tensor, scales_N1: torch.Tensor) -> torch.Tensor:
    """Return the product with `w8a8`, float32 `[M, N]`: the sum of products of codes, which is exact, rounded
    to float32, times the scale of x, times that of the weights, each rounded."""
    codes_MK, scales_M1 = quantised(x_MK)
    sums_MN = functional.linear(codes_MK.double(), codes_NK.double())  # in which all of them are exact
    return sums_MN.float() * scales_M1 * scales_N1.T


def quantised(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes of the rows of x, and their scales, float32 `[M, 1]`.

    With a the largest size in a row, a scale is a / 127, and a code is the integer nearest to x * (127 / a),
    the even one of two. Each operation is rounded to float32. The scale of a `TINY` row is 0, as are its
    codes. That of a row with NaN or infinity is NaN, and so are all its products.
    """
    x_MK = x_MK.float()
    largest_M1 = x_MK.abs().amax(-1, keepdim=True)
    most_M1 = torch.full_like(largest_M1, 127)  # torch divides numbers by products with a reciprocal
    is_number_M1, is_tiny_M1 = largest_M1.isfinite(), largest_M1 < TINY
    inverse_M1 = (most_M1 / largest_M1).where(is_number_M1 & ~is_tiny_M1, 0.0)
    scales_M1 = (largest_M1 / most_M1).where(is_number_M1, torch.nan).where(~is_tiny_M1, 0.0)
    return (x_MK * inverse_M1).where(is_number_M1, 0.0).round().to(torch.int8), scales_M1


def linear_silu(x_MK: torch.Tensor, gate_up: Packed, into: Packed) -> torch.Tensor:
    """Return `silu_mul` of `linear`, for the product with `into` alone: it may be rounded as that takes it,
    and have that type."""
    return into.rounded(silu_mul(linear(x_MK, gate_up)))


def logits(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Return `linear`, in at least float32: rounding would make ties among scores that are compared."""
    return linear(x_MK.to(torch.promote_types(x_MK.dtype, torch.float32)), weight)


def linear_heads(x_THI: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Multiply each head by its own weights, `[H, O, I]` without bias, to `[T, H, O]`. x may be strided
    except in I."""
    assert weight.bias_N is weight.scales is None
    return torch.einsum("thi,hoi->tho", weight.rounded(x_THI), weight.data.to(x_THI.dtype))
