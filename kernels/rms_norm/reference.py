"""The definition of `add_norm` and `rms_norm_gated`."""

import torch
from torch.nn import functional


def add_norm(
    residual_TH: torch.Tensor | None, branch_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + branch, and `rms_norm` of it in the type of branch.

    residual_TH  at least float32, as is the sum; None before the first branch. The sum may take the memory of
                 residual, or of branch where there is none: neither is to be read again
    """
    sum_TH = branch_TH.to(torch.promote_types(branch_TH.dtype, torch.float32))
    if residual_TH is not None:
        sum_TH = residual_TH + sum_TH
    return sum_TH, rms_norm(sum_TH, weight_H, epsilon).to(branch_TH.dtype)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + epsilon) * weight_H


def rms_norm_gated(
    x_TGRV: torch.Tensor, gate_TGRV: torch.Tensor, weight_V: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension, as `[T, G * R * V]`."""
    return (rms_norm(x_TGRV, weight_V, epsilon) * functional.silu(gate_TGRV)).flatten(1)
