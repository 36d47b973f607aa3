"""`attention` on CPU: one kernel and one order of summation for decode, replay and prefill."""

from collections.abc import Callable

import torch

from tidemill.kernels.activation.cpu import bind_sigmoid_mul
from tidemill.kernels.shared.arguments import address, address_or_null, page_arguments
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.fp8 import Pages
from tidemill.kernels.shared.rows import Made, Rows

DIM_MAX = 1024  # of cpu.cpp
UNBOUNDED = 1 << 62  # a window of more tokens than there are


AttentionCall = Callable[..., torch.Tensor]


def bind_attention(library: Library, compute_dtype: ComputeDtype) -> AttentionCall:
    call = library.function("attention")

    def attention(
        q_THD: torch.Tensor,
        cache: Pages,
        rows: Rows,
        window: int | None,
        sinks_H: torch.Tensor | None,
        _: Made | None = None,
    ) -> torch.Tensor:
        tokens, q_heads, dim = q_THD.shape
        kv_heads = cache.shape[1]
        assert dim == cache.shape[4] <= DIM_MAX
        assert q_heads % kv_heads == 0
        assert window is None or window > 0
        o_THD = torch.empty_like(q_THD)
        call(
            address(q_THD, tokens, q_heads, dim), *page_arguments(cache, rows, tokens), o_THD.data_ptr(),
            q_heads, kv_heads, dim, dim**-0.5, UNBOUNDED if window is None else window,
            address_or_null(sinks_H, q_heads), compute_dtype == "bfloat16",
        )  # fmt: skip
        return o_THD

    return attention


def bind_gated_attention(library: Library, compute_dtype: ComputeDtype) -> AttentionCall:
    """The two operators one after the other."""
    attention, sigmoid_mul = bind_attention(library, compute_dtype), bind_sigmoid_mul(library)

    def gated_attention(
        q_THD: torch.Tensor,
        cache: Pages,
        rows: Rows,
        window: int | None,
        sinks_H: torch.Tensor | None,
        gate_THD: torch.Tensor,
        _: Made | None = None,
    ) -> torch.Tensor:
        return sigmoid_mul(attention(q_THD, cache, rows, window, sinks_H), gate_THD)

    return gated_attention
