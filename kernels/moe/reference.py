"""The definition of `route`, `moe_inner` and `moe_outer`: the choice of experts and their weighted sum.

The sum is in two halves, so that ranks that hold slices of the experts can exchange `hidden` between them.
"""

import torch
from torch.nn import functional

from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing


def route(logits_TE: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, int32 `[T, K]`, ascending, and their weights `[T, K]`.

    Sums of weights in a denominator have 1e-20 added.
    """
    experts = logits_TE.shape[1]
    routing.check(experts)
    scores_TE = logits_TE.softmax(-1) if routing.score == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE if routing.bias_E is None else scores_TE + routing.bias_E
    if routing.groups > 1:
        choice_TGN = choice_TE.view(-1, routing.groups, experts // routing.groups)
        best_TG2, _ = choice_TGN.topk(2)
        _, group_TK = best_TG2.sum(-1).topk(routing.groups_kept)
        left_TG = torch.ones(choice_TGN.shape[:2], dtype=torch.bool, device=logits_TE.device)
        left_TG = left_TG.scatter(-1, group_TK, torch.zeros_like(group_TK, dtype=torch.bool))
        choice_TE = choice_TGN.masked_fill(left_TG[..., None], float("-inf")).flatten(1)
    _, chosen_TK = choice_TE.topk(routing.top_k)
    chosen_TK, _ = chosen_TK.sort(-1)
    weights_TK = scores_TE.gather(-1, chosen_TK)
    if routing.renormalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return chosen_TK.int(), weights_TK * routing.scale


def moe_inner(x_TH: torch.Tensor, chosen_TK: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The activation of gate and up of x, for the K experts of each token, `[T, K, I]`."""
    hidden_TKI = x_TH.new_empty(*chosen_TK.shape, experts.gate_up.out_features // 2)
    for expert in range(len(experts.gate_up.data)):
        token, pick = torch.where(chosen_TK == expert)
        gate, up = _of_expert(x_TH[token], experts.gate_up, expert).chunk(2, dim=-1)
        hidden_TKI[token, pick] = _activated(gate, up, experts)
    return hidden_TKI


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
    shared_TH   None where there is no such expert
    gate_T1     None where it has no gate, and is added as it is
    """
    y_TH = hidden_TKI.new_zeros(len(hidden_TKI), experts.down.out_features)
    for expert in range(len(experts.down.data)):
        token, pick = torch.where(chosen_TK == expert)
        out_NH = _of_expert(hidden_TKI[token, pick], experts.down, expert)
        y_TH[token] += weights_TK[token, pick, None] * out_NH
    if shared_TH is None:
        return y_TH
    return y_TH + (shared_TH if gate_T1 is None else shared_TH * gate_T1.sigmoid())


def _of_expert(x_NK: torch.Tensor, weight: Packed, expert: int) -> torch.Tensor:
    bias = None if weight.bias_N is None else weight.bias_N[expert].to(x_NK.dtype)
    return functional.linear(weight.rounded(x_NK), weight.data[expert].to(x_NK.dtype), bias)


def _activated(gate_NI: torch.Tensor, up_NI: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.activation == "silu":
        return functional.silu(gate_NI) * up_NI
    gate_NI, up_NI = gate_NI.clamp(max=experts.limit), up_NI.clamp(-experts.limit, experts.limit)
    return (up_NI + 1) * gate_NI * (experts.alpha * gate_NI).sigmoid()
