"""`linear` and its kin on CPU: weights packed once into panels; an output is a sum in index order."""

from collections.abc import Callable, Sequence

import torch

from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.stored import Stored
from tidemill.kernels.shared.arguments import address_or_null
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.huge_pages import HugePages

FLOATS, WIDENED, PAIRS = range(3)  # of cpu.h
BLOCK = 32  # elements of depth that PAIRS are padded to


def kind_of(weight: Packed) -> int:
    return FLOATS if weight.data.dtype == torch.float32 else PAIRS if weight.rounds else WIDENED


def type_into(weight: Packed) -> torch.dtype:
    """Return the type that a product takes without another copy of its rows."""
    return torch.bfloat16 if weight.rounds and weight.in_features % BLOCK == 0 else torch.float32


def bind_pack(
    library: Library, compute_dtype: ComputeDtype
) -> Callable[[Sequence[Stored], torch.Tensor | None], Packed]:
    call = library.function("linear_pack")
    panel = library.function("linear_panel")()
    assert panel is not None
    memory = HugePages()

    def pack(parts: Sequence[Stored], bias_N: torch.Tensor | None = None) -> Packed:
        weight_NK = torch.cat([part.factors(compute_dtype) for part in parts], -2)
        *experts, n, k = weight_NK.shape
        is_half = weight_NK.dtype == torch.bfloat16
        rounds = is_half and compute_dtype == "bfloat16"
        weight_ENK = (weight_NK if is_half else weight_NK.float()).contiguous().view(-1, n, k)
        depth = -(-k // BLOCK) * BLOCK if rounds else k
        data = memory.empty(len(weight_ENK), -(-n // panel), depth, panel, dtype=weight_ENK.dtype)
        bias = None if bias_N is None else bias_N.float().contiguous()
        packed = Packed(data.view(*experts, *data.shape[1:]), bias, n, k, rounds)
        for source, target in zip(weight_ENK, data, strict=True):
            call(source.data_ptr(), target.data_ptr(), kind_of(packed), n, k)
        return packed

    return pack


def bind_linear(library: Library) -> Callable[[torch.Tensor, Packed], torch.Tensor]:
    call = library.function("linear")

    def linear(x_MK: torch.Tensor, weight: Packed) -> torch.Tensor:
        m, k = x_MK.shape
        assert k == weight.in_features
        halves = x_MK.dtype == torch.bfloat16
        assert halves <= weight.rounds
        assert halves or x_MK.dtype == torch.float32
        assert x_MK.stride(1) == 1
        y_MN = x_MK.new_empty(m, weight.out_features, dtype=torch.float32)
        call(
            x_MK.data_ptr(), x_MK.stride(0), halves, weight.data.data_ptr(), kind_of(weight),
            address_or_null(weight.bias_N, weight.out_features), y_MN.data_ptr(), m, weight.out_features, k,
        )  # fmt: skip
        return y_MN

    return linear


def bind_linear_silu(library: Library) -> Callable[[torch.Tensor, Packed, Packed], torch.Tensor]:
    call = library.function("linear_silu")

    def linear_silu(x_MK: torch.Tensor, gate_up: Packed, into: Packed) -> torch.Tensor:
        (m, k), inner = x_MK.shape, gate_up.out_features // 2
        assert k == gate_up.in_features
        assert x_MK.dtype == torch.float32
        assert x_MK.stride(1) == 1
        dtype = type_into(into)
        # Rows a power of 2 apart would share few sets of L1.
        y_MI = x_MK.new_empty(m, inner + BLOCK, dtype=dtype)[:, :inner]
        call(
            x_MK.data_ptr(), x_MK.stride(0), gate_up.data.data_ptr(), kind_of(gate_up),
            address_or_null(gate_up.bias_N, gate_up.out_features),
            y_MI.data_ptr(), y_MI.stride(0), dtype == torch.bfloat16, m, inner, k,
        )  # fmt: skip
        return y_MI

    return linear_silu


def bind_linear_heads(library: Library) -> Callable[[torch.Tensor, Packed], torch.Tensor]:
    call = library.function("linear_heads")

    def linear_heads(x_THI: torch.Tensor, weight: Packed) -> torch.Tensor:
        tokens, heads, width = x_THI.shape
        data = weight.data
        assert weight.bias_N is None
        assert (heads, width) == (len(data), weight.in_features)
        assert x_THI.dtype == torch.float32
        assert x_THI.stride(2) == 1
        y_THO = x_THI.new_empty(tokens, heads, weight.out_features)
        call(
            x_THI.data_ptr(), x_THI.stride(0), x_THI.stride(1),
            data.data_ptr(), data.stride(0) * data.element_size(), kind_of(weight),
            y_THO.data_ptr(), tokens, heads, weight.out_features, width,
        )  # fmt: skip
        return y_THO

    return linear_heads
