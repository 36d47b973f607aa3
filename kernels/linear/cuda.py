"""`linear` and its kin on CUDA: cuBLAS; the order of a sum may change with the rows' number."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from tidemill.kernels.activation.cuda import silu_mul
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored


def pack(parts: Sequence[Stored], bias_N: torch.Tensor | None = None) -> Packed:
    """The weights as they are, in a type that all operators take."""
    weight_NK = torch.cat([part.factors("bfloat16") for part in parts], -2)
    data = (weight_NK if weight_NK.dtype == torch.bfloat16 else weight_NK.float()).contiguous()
    bias = None if bias_N is None else bias_N.to(data.dtype)
    return Packed(data, bias, data.shape[-2], data.shape[-1])


def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Multiply in the dtype of the weights: a product of bfloat16 needs no more of x."""
    return functional.linear(x_MK.to(weight.data.dtype), weight.data, weight.bias_N)


def linear_silu(x_MK: torch.Tensor, gate_up: Packed, into: Packed) -> torch.Tensor:  # noqa: ARG001 - of any type
    return silu_mul(linear(x_MK, gate_up))


def logits(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """float32, as the product adds it up."""
    x_MK, bias_N = x_MK.to(weight.data.dtype), None if weight.bias_N is None else weight.bias_N.float()
    if weight.data.dtype == torch.float32 or weight.data.device.type == "cpu":
        return functional.linear(x_MK.float(), weight.data.float(), bias_N)
    y_MN = torch.mm(x_MK, weight.data.T, out_dtype=torch.float32)
    return y_MN if bias_N is None else y_MN + bias_N


def linear_heads(x_THI: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Multiply in the dtype of the weights; each head is one product of a batch."""
    assert weight.bias_N is None
    x_HTI = x_THI.to(weight.data.dtype).transpose(0, 1)
    return torch.bmm(x_HTI, weight.data.transpose(1, 2)).transpose(0, 1).contiguous()
