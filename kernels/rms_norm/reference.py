"""The definition of `rms_norm` and `rms_norm_gated`."""

import torch
from torch.nn import functional


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + epsilon) * weight_H


def rms_norm_gated(
    x_TGRV: torch.Tensor, gate_TGRV: torch.Tensor, weight_V: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension, as `[T, G * R * V]`."""
    return (rms_norm(x_TGRV, weight_V, epsilon) * functional.silu(gate_TGRV)).flatten(1)
