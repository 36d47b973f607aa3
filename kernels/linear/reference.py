"""The definition of `linear`, y = x W^T (+ bias), of `linear_silu`, `logits` and `linear_heads`."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from tidemill.kernels.activation.reference import silu_mul
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.shared.compute_dtype import ComputeDtype


def pack(
    parts: Sequence[Stored], bias_N: torch.Tensor | None = None, compute_dtype: ComputeDtype = "float32"
) -> Packed:
    """Join parts of weights `[.., N, K]` by rows, with a bias `[.., N]`: for `linear` without a leading
    dimension, of heads for `linear_heads`, of experts for `moe_inner` and `moe_outer`."""
    weight_NK = torch.cat([part.factors(compute_dtype) for part in parts], -2)
    rounds = weight_NK.dtype == torch.bfloat16 and compute_dtype == "bfloat16"
    return Packed(weight_NK, bias_N, weight_NK.shape[-2], weight_NK.shape[-1], rounds)


def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Float tensors; returns `[M, N]` in the type of x, to which weights are widened."""
    bias_N = None if weight.bias_N is None else weight.bias_N.to(x_MK.dtype)
    return functional.linear(weight.rounded(x_MK), weight.data.to(x_MK.dtype), bias_N)


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
    assert weight.bias_N is None
    return torch.einsum("thi,hoi->tho", weight.rounded(x_THI), weight.data.to(x_THI.dtype))
