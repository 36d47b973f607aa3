"""`route`, `moe_inner` and `moe_outer` on CPU: a token's sum runs in ascending order of its experts."""

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.kernels.linear.cpu import type_into
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice, RouteTokens, Routing
from tidemill.kernels.rms_norm.cpu import bind_add_norm
from tidemill.kernels.shared.arguments import address, address_or_null
from tidemill.kernels.shared.build import Library
from tidemill.kernels.shared.rows import Rows


def bind_route(library: Library) -> RouteTokens:
    """It leaves no padding out, which no batch has on a CPU, and knows no shared experts."""
    call = library.function("route")

    def route(logits_TE: Tensor, routing: Routing, rows: Rows | None = None) -> Choice:  # noqa: ARG001
        tokens, experts = logits_TE.shape
        routing.check(experts)
        assert not routing.shared
        assert logits_TE.dtype == torch.float32
        assert logits_TE.stride(1) == 1
        chosen_TK = torch.empty(tokens, routing.top_k, dtype=torch.int32)
        weights_TK = logits_TE.new_empty(tokens, routing.top_k)
        call(
            logits_TE.data_ptr(), logits_TE.stride(0), address_or_null(routing.bias_E, experts),
            chosen_TK.data_ptr(), weights_TK.data_ptr(), tokens, experts, routing.top_k,
            routing.score == "softmax", routing.renormalise, routing.groups, routing.groups_kept,
            routing.scale,
        )  # fmt: skip
        return Choice(chosen_TK, weights_TK)

    return route


def bind_moe_inner(library: Library) -> Callable[[Tensor, Choice, Experts], Tensor]:
    call = library.function("moe_inner")

    def moe_inner(x_TH: Tensor, choice: Choice, experts: Experts) -> Tensor:
        chosen_TK = choice.experts_TK
        (tokens, top_k), width = chosen_TK.shape, experts.gate_up.in_features
        inner = experts.gate_up.out_features // 2
        hidden_TKI = x_TH.new_empty(tokens, top_k, inner, dtype=type_into(experts.down))
        call(
            address(x_TH, tokens, width), address(chosen_TK, tokens, top_k, dtype=torch.int32),
            *_weights(experts.gate_up), hidden_TKI.data_ptr(),
            hidden_TKI.dtype == torch.bfloat16, tokens, len(experts.gate_up.data), top_k, width, inner,
            experts.activation == "clamped", experts.alpha, experts.limit,
        )  # fmt: skip
        return hidden_TKI

    return moe_inner


MoeOuter = Callable[[Tensor, Choice, Experts, Tensor | None, Tensor | None], Tensor]
MoeOuterNorm = Callable[
    [Tensor, Choice, Experts, Tensor | None, Tensor | None, Tensor, Tensor, float], tuple[Tensor, Tensor]
]


def bind_moe_outer(library: Library) -> MoeOuter:
    call = library.function("moe_outer")

    def moe_outer(
        hidden_TKI: Tensor,
        choice: Choice,
        experts: Experts,
        shared_TH: Tensor | None,
        gate_T1: Tensor | None,
    ) -> Tensor:
        chosen_TK, weights_TK, _ = choice
        tokens, top_k, inner = hidden_TKI.shape
        down, width = experts.down, experts.down.out_features
        assert hidden_TKI.dtype in {torch.float32, type_into(down)}
        assert hidden_TKI.is_contiguous()
        assert inner == down.in_features
        gate, gate_stride = None, 0
        if gate_T1 is not None:
            assert gate_T1.dtype == torch.float32
            assert gate_T1.shape == (tokens, 1)
            gate, gate_stride = gate_T1.data_ptr(), gate_T1.stride(0)
        y_TH = weights_TK.new_empty(tokens, width)
        call(
            hidden_TKI.data_ptr(), hidden_TKI.dtype == torch.bfloat16,
            address(chosen_TK, tokens, top_k, dtype=torch.int32), address(weights_TK, tokens, top_k),
            *_weights(down), address_or_null(shared_TH, tokens, width), gate, gate_stride,
            y_TH.data_ptr(), tokens, len(down.data), top_k, width, inner,
        )  # fmt: skip
        return y_TH

    return moe_outer


def bind_moe_outer_norm(library: Library) -> MoeOuterNorm:
    """The two operators one after the other."""
    moe_outer, add_norm = bind_moe_outer(library), bind_add_norm(library)

    def moe_outer_norm(
        hidden_TKI: Tensor,
        choice: Choice,
        experts: Experts,
        shared_TH: Tensor | None,
        gate_T1: Tensor | None,
        residual_TH: Tensor,
        weight_H: Tensor,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        y_TH = moe_outer(hidden_TKI, choice, experts, shared_TH, gate_T1)
        return add_norm(residual_TH, y_TH, weight_H, epsilon)

    return moe_outer_norm


def _weights(packed: Packed) -> tuple[int, int, int, int | None]:
    """Address, bytes from expert to expert, kind, and the address of the biases."""
    assert packed.rest is None
    apart = packed.data.stride(0) * packed.data.element_size()
    bias = address_or_null(packed.bias_N, len(packed.data), packed.out_features)
    return packed.data.data_ptr(), apart, packed.format, bias
