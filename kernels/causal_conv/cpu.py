"""`causal_conv` on CPU."""

from collections.abc import Callable

import torch

from tidemill.kernels.shared.arguments import address, address_or_null, state_arguments
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows

CausalConv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, Rows], torch.Tensor]


def bind_causal_conv(library: Library) -> CausalConv:
    call = library.function("causal_conv")

    def causal_conv(
        x_TGC: torch.Tensor,
        weight_WGC: torch.Tensor,
        bias_GC: torch.Tensor | None,
        state_SGWC: torch.Tensor,
        rows: Rows,
    ) -> torch.Tensor:
        tokens, groups, channels = x_TGC.shape
        width = weight_WGC.shape[0]
        assert x_TGC.dtype == state_SGWC.dtype == torch.float32
        assert x_TGC.stride(2) == 1
        assert state_SGWC.shape[1:] == (groups, width - 1, channels)
        assert width <= 2 or state_SGWC.stride(2) == channels
        assert state_SGWC.stride(3) == 1
        y_TGC = x_TGC.new_empty(tokens, groups, channels)
        call(
            x_TGC.data_ptr(), x_TGC.stride(0), x_TGC.stride(1), address(weight_WGC, width, groups, channels),
            address_or_null(bias_GC, groups, channels), y_TGC.data_ptr(),
            *state_arguments(state_SGWC, rows, tokens), groups, channels, width,
        )  # fmt: skip
        return y_TGC

    return causal_conv
