"""`add_norm`, `rms_norm` and `rms_norm_gated` on CPU."""

from collections.abc import Callable

import torch

from tidemill.kernels.shared.arguments import address, address_or_null
from tidemill.kernels.shared.build import Library


def bind_add_norm(
    library: Library,
) -> Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]:
    call = library.function("add_norm")

    def add_norm(
        residual_TH: torch.Tensor | None, branch_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = branch_TH.shape
        y_TH = branch_TH.new_empty(rows, width)
        call(
            address_or_null(residual_TH, rows, width), address(branch_TH, rows, width),
            address(weight_H, width), y_TH.data_ptr(), rows, width, epsilon,
        )  # fmt: skip
        return branch_TH if residual_TH is None else residual_TH, y_TH

    return add_norm


def bind_rms_norm(library: Library) -> Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]:
    call = library.function("rms_norm")

    def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, epsilon: float) -> torch.Tensor:
        rows, width = x_TH.shape
        assert x_TH.dtype == torch.float32
        assert x_TH.stride(1) == 1
        y_TH = x_TH.new_empty(rows, width)
        call(x_TH.data_ptr(), x_TH.stride(0), address(weight_H, width), y_TH.data_ptr(), rows, width, epsilon)
        return y_TH

    return rms_norm


def bind_rms_norm_gated(
    library: Library,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    call = library.function("rms_norm_gated")

    def rms_norm_gated(
        x_TGRV: torch.Tensor, gate_TGRV: torch.Tensor, weight_V: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        tokens, groups, heads, width = x_TGRV.shape
        token_stride, group_stride, head_stride, element_stride = gate_TGRV.stride()
        assert gate_TGRV.shape == x_TGRV.shape
        assert gate_TGRV.dtype == torch.float32
        assert (head_stride, element_stride) == (width, 1)
        y_TI = x_TGRV.new_empty(tokens, groups * heads * width)
        call(
            address(x_TGRV, tokens, groups, heads, width), gate_TGRV.data_ptr(), token_stride, group_stride,
            address(weight_V, width), y_TI.data_ptr(), tokens, groups, heads, width, epsilon,
        )  # fmt: skip
        return y_TI

    return rms_norm_gated
