"""`attention` on CPU: one kernel and one order of summation for decode, replay and prefill."""

from collections.abc import Callable

import torch

from tidemill.kernels.activation.cpu import bind_sigmoid_mul
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.pages import page_arguments
from tidemill.kernels.shared.rows import Rows

DIM_MAX = 1024  # of cpu.cpp
UNBOUNDED = 1 << 62  # a window of more tokens than there are


AttentionCall = Callable[[torch.Tensor, torch.Tensor, Rows, int | None, torch.Tensor | None], torch.Tensor]
GatedAttentionCall = Callable[
    [torch.Tensor, torch.Tensor, Rows, int | None, torch.Tensor | None, torch.Tensor], torch.Tensor
]


def bind(library: Library, compute_dtype: ComputeDtype) -> AttentionCall:
    call = library.function("attention")

    def attention(
        q_THD: torch.Tensor, cache: torch.Tensor, rows: Rows, window: int | None, sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        _, q_heads, dim = q_THD.shape
        _, kv_heads, _, page_tokens, _ = cache.shape
        assert q_THD.dtype == torch.float32
        assert q_THD.is_contiguous()
        assert dim <= DIM_MAX
        assert window is None or window > 0
        assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.is_contiguous())
        o_THD = torch.empty_like(q_THD)
        call(
            q_THD.data_ptr(), *page_arguments(cache), rows.pages_BN.data_ptr(), rows.pages_BN.stride(0),
            rows.cu_B1.data_ptr(), rows.lens_B.data_ptr(), o_THD.data_ptr(), len(rows.lens_B),
            q_heads, kv_heads, dim, page_tokens, dim**-0.5,
            UNBOUNDED if window is None else window, None if sinks_H is None else sinks_H.data_ptr(),
            compute_dtype == "bfloat16",
        )  # fmt: skip
        return o_THD

    return attention


def bind_gated(library: Library, compute_dtype: ComputeDtype) -> GatedAttentionCall:
    """The two operators one after the other."""
    attention, sigmoid_mul = bind(library, compute_dtype), bind_sigmoid_mul(library)

    def gated_attention(
        q_THD: torch.Tensor,
        cache: torch.Tensor,
        rows: Rows,
        window: int | None,
        sinks_H: torch.Tensor | None,
        gate_THD: torch.Tensor,
    ) -> torch.Tensor:
        return sigmoid_mul(attention(q_THD, cache, rows, window, sinks_H), gate_THD)

    return gated_attention
