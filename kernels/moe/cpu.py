"""`moe_inner` and `moe_outer` on CPU: a token's sum runs in ascending order of its experts, in any batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.kernels.build import Library
from tidemill.kernels.moe.experts import Experts


def bind_moe_inner(library: Library) -> Callable[[Tensor, Tensor, Experts], tuple[Tensor, Tensor, Tensor]]:
    call = library.function("moe_inner")

    def moe_inner(x_TH: Tensor, logits_TE: Tensor, experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
        (tokens, width), count = x_TH.shape, logits_TE.shape[1]
        gate_up, inner = experts.gate_up.data, experts.gate_up.out_features // 2
        assert x_TH.dtype == logits_TE.dtype == torch.float32
        assert x_TH.is_contiguous()
        assert logits_TE.stride(1) == 1
        assert (len(gate_up), experts.gate_up.in_features) == (count, width)
        hidden_TKI = x_TH.new_empty(tokens, experts.top_k, inner)
        chosen_TK = torch.empty(tokens, experts.top_k, dtype=torch.int32)
        weights_TK = x_TH.new_empty(tokens, experts.top_k)
        call(
            x_TH.data_ptr(), logits_TE.data_ptr(), logits_TE.stride(0),
            gate_up.data_ptr(), gate_up.stride(0) * gate_up.element_size(), experts.gate_up.is_half,
            hidden_TKI.data_ptr(), chosen_TK.data_ptr(), weights_TK.data_ptr(),
            tokens, count, experts.top_k, experts.renormalise, width, inner,
        )  # fmt: skip
        return hidden_TKI, chosen_TK, weights_TK

    return moe_inner


def bind_moe_outer(
    library: Library,
) -> Callable[[Tensor, Tensor, Tensor, Experts, Tensor | None, Tensor | None], Tensor]:
    call = library.function("moe_outer")

    def moe_outer(
        hidden_TKI: Tensor,
        chosen_TK: Tensor,
        weights_TK: Tensor,
        experts: Experts,
        shared_TH: Tensor | None,
        gate_T1: Tensor | None,
    ) -> Tensor:
        tokens, top_k, inner = hidden_TKI.shape
        down, width = experts.down.data, experts.down.out_features
        assert hidden_TKI.dtype == weights_TK.dtype == torch.float32
        assert chosen_TK.dtype == torch.int32
        assert hidden_TKI.is_contiguous()
        assert chosen_TK.is_contiguous()
        assert weights_TK.is_contiguous()
        assert chosen_TK.shape == weights_TK.shape == (tokens, top_k)
        assert inner == experts.down.in_features
        shared, gate, gate_stride = None, None, 0
        if shared_TH is not None and gate_T1 is not None:
            assert shared_TH.dtype == gate_T1.dtype == torch.float32
            assert (shared_TH.shape, gate_T1.shape) == ((tokens, width), (tokens, 1))
            assert shared_TH.is_contiguous()
            shared, gate, gate_stride = shared_TH.data_ptr(), gate_T1.data_ptr(), gate_T1.stride(0)
        y_TH = hidden_TKI.new_empty(tokens, width)
        call(
            hidden_TKI.data_ptr(), chosen_TK.data_ptr(), weights_TK.data_ptr(),
            down.data_ptr(), down.stride(0) * down.element_size(), experts.down.is_half,
            shared, gate, gate_stride,
            y_TH.data_ptr(), tokens, len(down), top_k, width, inner,
        )  # fmt: skip
        return y_TH

    return moe_outer
