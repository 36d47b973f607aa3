"""`linear` and its kin on CUDA: codes have their own kernels, and floats cuBLAS, where the order of a sum may
change with the rows' number. With `batch_invariant` floats run the kernels of codes, which have one order."""

from collections.abc import Sequence

import torch
from torch.nn import functional

from tidemill.kernels.activation.cuda import silu_mul
from tidemill.kernels.linear.factors import dtype_of, pack_codes, takes
from tidemill.kernels.linear.packed import Packed, in_segments
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.linear.tiles import products


def pack(parts: Sequence[Stored], bias_N: torch.Tensor | None = None) -> Packed:
    """Keep codes that kernels take, and widen others to bfloat16. Parts of several kinds are segments."""
    parts = [part if takes(part) else part.widened for part in parts]
    if all(part.scales is None for part in parts):
        return _pack_floats(torch.cat([part.codes for part in parts], -2), bias_N)
    return in_segments(parts, bias_N, _pack_run)


def linear(x_MK: torch.Tensor, weight: Packed, *, batch_invariant: bool = False) -> torch.Tensor:
    """Multiply in the dtype of the weights, of codes bfloat16: such a product needs no more of x."""

    def product(part: Packed) -> torch.Tensor:
        if batch_invariant or part.scales is not None:
            return products(x_MK[:, None], part, dtype_of(part))[:, 0]
        return functional.linear(x_MK.to(part.data.dtype), part.data, part.bias_N)

    return _joined([product(part) for part in weight.segments])


def linear_silu(
    x_MK: torch.Tensor,
    gate_up: Packed,
    into: Packed,  # noqa: ARG001 - of any type
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    return silu_mul(linear(x_MK, gate_up, batch_invariant=batch_invariant))


def logits(x_MK: torch.Tensor, weight: Packed, *, batch_invariant: bool = False) -> torch.Tensor:
    """float32, as the product adds it up."""

    def product(part: Packed) -> torch.Tensor:
        if batch_invariant or part.scales is not None:
            return products(x_MK[:, None], part, torch.float32)[:, 0]
        bias_N = None if part.bias_N is None else part.bias_N.float()
        if part.data.dtype == torch.float32 or part.data.device.type == "cpu":
            return functional.linear(x_MK.to(part.data.dtype).float(), part.data.float(), bias_N)
        y_MN = torch.mm(x_MK.to(part.data.dtype), part.data.T, out_dtype=torch.float32)
        return y_MN if bias_N is None else y_MN + bias_N

    return _joined([product(part) for part in weight.segments])


def linear_heads(x_THI: torch.Tensor, weight: Packed, *, batch_invariant: bool = False) -> torch.Tensor:
    """Multiply in the dtype of the weights; each head is one product of a batch."""
    assert weight.bias_N is weight.rest is None
    if batch_invariant or weight.scales is not None:
        return products(x_THI, weight, dtype_of(weight))
    x_HTI = x_THI.to(weight.data.dtype).transpose(0, 1)
    return torch.bmm(x_HTI, weight.data.transpose(1, 2)).transpose(0, 1).contiguous()


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _pack_run(part: Stored, bias_N: torch.Tensor | None) -> Packed:
    return _pack_floats(part.codes, bias_N) if part.scales is None else pack_codes(part, bias_N)


def _pack_floats(weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> Packed:
    """Pack weights as they are, in a type that all operators take."""
    data = (weight_NK if weight_NK.dtype == torch.bfloat16 else weight_NK.float()).contiguous()
    bias = None if bias_N is None else bias_N.to(data.dtype).contiguous()
    kind = "bfloat16" if data.dtype == torch.bfloat16 else "float32"
    return Packed(data, bias, data.shape[-2], data.shape[-1], kind=kind)
