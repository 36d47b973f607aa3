"""The definition of `moe_inner` and `moe_outer`: softmax routing, top-k, and the weighted sum of the experts.

Two halves, so that ranks that hold slices of the experts can exchange `hidden` between them.
"""

import torch
from torch.nn import functional

from tidemill.kernels.moe.experts import Experts


def moe_inner(
    x_TH: torch.Tensor, logits_TE: torch.Tensor, experts: Experts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """silu(gate(x)) * up(x) of the K experts of each token, as wide as `experts.gate_up` says.

    Returns hidden `[T, K, I]`, the experts chosen, int32 `[T, K]`, ascending, and their weights `[T, K]`.
    """
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(experts.top_k)
    if experts.renormalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    chosen_TK, order_TK = chosen_TK.sort(-1)
    hidden_TKI = x_TH.new_empty(*chosen_TK.shape, experts.gate_up.out_features // 2)
    for expert in range(logits_TE.shape[1]):
        token, pick = torch.where(chosen_TK == expert)
        gate, up = functional.linear(x_TH[token], experts.gate_up.data[expert].to(x_TH.dtype)).chunk(
            2, dim=-1
        )
        hidden_TKI[token, pick] = functional.silu(gate) * up
    return hidden_TKI, chosen_TK.int(), weights_TK.gather(-1, order_TK)


def moe_outer(
    hidden_TKI: torch.Tensor,
    chosen_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    experts: Experts,
    shared_TH: torch.Tensor | None,
    gate_T1: torch.Tensor | None,
) -> torch.Tensor:
    """Sum over a token's experts, in ascending order, of weight * down(hidden), `[T, H]`; then what an expert
    that all tokens share computed for it, times sigmoid(gate).

    hidden_TKI  the full width of the experts; H is that of `experts.down`
    shared_TH   None, as its gate, where there is no such expert
    """
    y_TH = hidden_TKI.new_zeros(len(hidden_TKI), experts.down.out_features)
    for expert, down_HI in enumerate(experts.down.data):
        token, pick = torch.where(chosen_TK == expert)
        y_TH[token] += weights_TK[token, pick, None] * functional.linear(
            hidden_TKI[token, pick], down_HI.to(y_TH.dtype)
        )
    if shared_TH is None or gate_T1 is None:
        return y_TH
    return y_TH + shared_TH * gate_T1.sigmoid()
