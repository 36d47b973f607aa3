"""`causal_conv` on CPU."""

from collections.abc import Callable

import torch

from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows

CausalConv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Rows], torch.Tensor]


def bind(library: Library) -> CausalConv:
    call = library.function("causal_conv")

    def causal_conv(
        x_TGC: torch.Tensor,
        weight_WGC: torch.Tensor,
        bias_GC: torch.Tensor | None,
        state_SGWC: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        tokens, groups, channels = x_TGC.shape
        assert x_TGC.dtype == weight_WGC.dtype == state_SGWC.dtype == torch.float32
        assert x_TGC.stride(2) == 1
        assert weight_WGC.is_contiguous()
        assert bias_GC is None or (bias_GC.dtype == torch.float32 and bias_GC.is_contiguous())
        assert rows.writes_BK.is_contiguous()
        y_TGC = x_TGC.new_empty(tokens, groups, channels)
        call(
            x_TGC.data_ptr(), x_TGC.stride(0), x_TGC.stride(1), weight_WGC.data_ptr(),
            None if bias_GC is None else bias_GC.data_ptr(), y_TGC.data_ptr(),
            state_SGWC.data_ptr(), state_SGWC.stride(0), state_SGWC.stride(1),
            rows.cu_B1.data_ptr(), rows.read_B.data_ptr(), rows.writes_BK.data_ptr(),
            *rows.writes_BK.shape, groups, channels, len(weight_WGC),
        )  # fmt: skip
        return y_TGC

    return causal_conv
