"""`linear` and `logits` on CUDA: torch's, cuBLAS; the order of a sum may change with the number of rows."""

import torch
from torch.nn import functional

from tidemill.kernels.linear.packed import Packed


def pack(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Packed:
    """The weights as they are, in a type that all operators take."""
    data = (weight_NK if weight_NK.dtype == torch.bfloat16 else weight_NK.float()).contiguous()
    bias = None if bias_N is None else bias_N.to(data.dtype)
    return Packed(data, bias, data.shape[-2], data.shape[-1])


def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """In the type of the weights: what multiplies bfloat16 has no use for more of x."""
    return functional.linear(x_MK.to(weight.data.dtype), weight.data, weight.bias_N)


def logits(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """float32, as the product adds it up."""
    assert weight.bias_N is None
    x_MK = x_MK.to(weight.data.dtype)
    if weight.data.dtype == torch.float32 or not weight.data.is_cuda:
        return functional.linear(x_MK.float(), weight.data.float())
    return torch.mm(x_MK, weight.data.T, out_dtype=torch.float32)
