"""The definition of `silu_mul` and `sigmoid_mul`."""

import torch
from torch.nn import functional


def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the two halves of each row, `[T, I]`."""
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return functional.silu(gate_TI) * up_TI


def sigmoid_mul(x_THD: torch.Tensor, gate_THD: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(gate) as `[T, H * D]`; the gate may be expanded over D."""
    return (x_THD * torch.sigmoid(gate_THD)).flatten(1)
