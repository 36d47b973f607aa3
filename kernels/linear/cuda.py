"""`linear` on CUDA: torch's, which is cuBLAS; the order of a sum may change with the number of rows."""

import torch
from torch.nn import functional

from tidemill.kernels.linear.packed import Packed


def pack(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Packed:
    """The weights as they are."""
    bias = None if bias_N is None else bias_N.to(weight_NK.dtype)
    return Packed(weight_NK.contiguous(), bias, weight_NK.shape[-2], weight_NK.shape[-1])


def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
    """In the type of x, by way of the weights': what multiplies bfloat16 has no use for more of x."""
    return functional.linear(x_MK.to(weight.data.dtype), weight.data, weight.bias_N).to(x_MK.dtype)
