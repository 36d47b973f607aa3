"""`silu_mul` and `sigmoid_mul` on CPU."""

from collections.abc import Callable

import torch

from tidemill.kernels.shared.arguments import address
from tidemill.kernels.shared.build import Library


def bind_silu_mul(library: Library) -> Callable[[torch.Tensor], torch.Tensor]:
    call = library.function("silu_mul")

    def silu_mul(gate_up_T2I: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
        y_TI = gate_up_T2I.new_empty(rows, width)
        call(address(gate_up_T2I, rows, 2 * width), y_TI.data_ptr(), rows, width)
        return y_TI

    return silu_mul


def bind_sigmoid_mul(library: Library) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    call = library.function("sigmoid_mul")

    def sigmoid_mul(x_THD: torch.Tensor, gate_THD: torch.Tensor) -> torch.Tensor:
        tokens, heads, width = x_THD.shape
        assert gate_THD.shape == x_THD.shape
        assert gate_THD.dtype == torch.float32
        assert gate_THD.stride(2) in {0, 1}
        y_TI = x_THD.new_empty(tokens, heads * width)
        call(
            address(x_THD, tokens, heads, width), gate_THD.data_ptr(), *gate_THD.stride(), y_TI.data_ptr(),
            tokens, heads, width,
        )  # fmt: skip
        return y_TI

    return sigmoid_mul
