"""`gated_delta` on CPU: recurrent for decode and prefill alike, so a sequence may be cut anywhere."""

from collections.abc import Callable

import torch

from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows

GatedDelta = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Rows], torch.Tensor
]


def bind(library: Library) -> GatedDelta:
    call = library.function("gated_delta")

    def gated_delta(
        mixed_TGC: torch.Tensor,
        gates_TI: torch.Tensor,
        a_log_H: torch.Tensor,
        dt_bias_H: torch.Tensor,
        state_SGRKV: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        _, groups, heads, key_dim, value_dim = state_SGRKV.shape
        assert mixed_TGC.dtype == gates_TI.dtype == torch.float32
        assert state_SGRKV.dtype in {torch.float32, torch.bfloat16}
        assert mixed_TGC.is_contiguous()
        assert gates_TI.stride(1) == 1
        assert state_SGRKV.stride()[2:] == (key_dim * value_dim, value_dim, 1)
        assert rows.writes_BK.is_contiguous()
        o_TGRV = mixed_TGC.new_empty(len(mixed_TGC), groups, heads, value_dim)
        call(
            mixed_TGC.data_ptr(), gates_TI.data_ptr(), gates_TI.stride(0),
            a_log_H.data_ptr(), dt_bias_H.data_ptr(),
            state_SGRKV.data_ptr(), state_SGRKV.dtype == torch.bfloat16,
            state_SGRKV.stride(0), state_SGRKV.stride(1), o_TGRV.data_ptr(),
            rows.cu_B1.data_ptr(), rows.read_B.data_ptr(), rows.writes_BK.data_ptr(),
            *rows.writes_BK.shape, groups, heads, key_dim, value_dim,
        )  # fmt: skip
        return o_TGRV

    return gated_delta
