"""`attention` on CPU: one kernel and one order of summation for decode, replay and prefill."""

from collections.abc import Callable

import torch

from tidemill.kernels.build import Library
from tidemill.kernels.pages import page_arguments
from tidemill.kernels.rows import Rows


def bind(library: Library) -> Callable[[torch.Tensor, torch.Tensor, Rows], torch.Tensor]:
    call = library.function("attention")

    def attention(q_THD: torch.Tensor, cache: torch.Tensor, rows: Rows) -> torch.Tensor:
        _, q_heads, dim = q_THD.shape
        _, kv_heads, _, page_tokens, _ = cache.shape
        assert q_THD.dtype == torch.float32
        assert q_THD.is_contiguous()
        o_THD = torch.empty_like(q_THD)
        call(
            q_THD.data_ptr(), *page_arguments(cache), rows.pages_BN.data_ptr(), rows.pages_BN.stride(0),
            rows.cu_B1.data_ptr(), rows.lens_B.data_ptr(), o_THD.data_ptr(), len(rows.lens_B),
            q_heads, kv_heads, dim, page_tokens, dim**-0.5,
        )  # fmt: skip
        return o_THD

    return attention
