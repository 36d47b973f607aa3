"""The definition of `add_norm`, `rms_norm` and `rms_norm_gated`."""

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
    return sum_TH, _normed(sum_TH, weight_H, epsilon).to(branch_TH.dtype)


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight of each row, in the type of x; rows may be slices of wider ones."""
    return _normed(x_TH.to(torch.promote_types(x_TH.dtype, torch.float32)), weight_H, epsilon).to(x_TH.dtype)


def rms_norm_gated(
    x_TGRV: torch.Tensor, gate_TGRV: torch.Tensor, weight_V: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension, as `[T, G * R * V]`."""
    return (_normed(x_TGRV, weight_V, epsilon) * functional.silu(gate_TGRV)).flatten(1)


def _normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight
