"""The definition of `linear`, y = x W^T (+ bias), and of `logits`."""

import torch
from torch.nn import functional

from tidemill.kernels.linear.packed import Packed


def pack(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Packed:
    """Weights `[.., N, K]` for `linear` (no leading dimension) or `moe_inner` and `moe_outer` (experts)."""
    return Packed(weight_NK, bias_N, weight_NK.shape[-2], weight_NK.shape[-1])


def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Float tensors; returns `[M, N]` in the type of x, to which weights are widened."""
    bias_N = None if weight.bias_N is None else weight.bias_N.to(x_MK.dtype)
    return functional.linear(x_MK, weight.data.to(x_MK.dtype), bias_N)


def logits(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """As `linear`, without bias and at least float32: scores that are compared, among which rounding would
    make ties."""
    assert weight.bias_N is None
    return linear(x_MK.to(torch.promote_types(x_MK.dtype, torch.float32)), weight)
