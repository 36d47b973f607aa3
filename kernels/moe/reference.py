"""The definition of `route`, `own_experts`, `moe_inner`, `moe_outer` and `moe_outer_norm`: the choice of
experts and their weighted sum.

The sum is in two halves, so that ranks that hold slices of the experts can exchange `hidden` between them.
"""

from dataclasses import replace

import torch
from torch.nn import functional

from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.linear.reference import linear
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Choice, Routing
from tidemill.kernels.rms_norm.reference import add_norm
from tidemill.kernels.shared.rows import Rows


def route(logits_TE: torch.Tensor, routing: Routing, rows: Rows | None = None) -> Choice:
    """Choose experts by logits `[T, E]`, to which `routing.gated` adds a column.

    Sums of weights in a denominator have 1e-20 added. Tokens of a row of `rows` whose `lens` is 0, the
    padding of a batch, have no experts where a variant can leave them out: reading the weights of experts
    takes time, and nothing reads what they compute for padding.
    """
    gate_T1, logits_TE = logits_TE[:, -1:], logits_TE[:, : logits_TE.shape[1] - routing.gated]
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
    chosen_TK, weights_TK = chosen_TK.int(), weights_TK * routing.scale
    if routing.shared:
        every_S = torch.arange(experts, experts + routing.shared, device=chosen_TK.device).int()
        share_T1 = gate_T1.sigmoid() if routing.gated else torch.ones_like(gate_T1)
        chosen_TK = torch.cat([chosen_TK, every_S.expand(len(chosen_TK), -1)], dim=1)
        weights_TK = torch.cat([weights_TK, share_T1.expand(-1, routing.shared)], dim=1)
    if rows is not None:
        padding_T = torch.repeat_interleave(rows.lens_B == 0, rows.cu_B1.diff())
        chosen_TK[padding_T], weights_TK[padding_T] = -1, 0.0
    return Choice(chosen_TK, weights_TK)


def own_experts(choice: Choice, first: int, end: int) -> Choice:
    """Return the choice among the experts `[first, end)`, whose ids count from `first`: a token has none in
    the place of the others."""
    chosen_TK = choice.experts_TK
    is_own_TK = (chosen_TK >= first) & (chosen_TK < end)
    own_TK = torch.where(is_own_TK, chosen_TK - first, -1).int()
    return Choice(own_TK, torch.where(is_own_TK, choice.weights_TK, 0.0))


def moe_inner(x_TH: torch.Tensor, choice: Choice, experts: Experts) -> torch.Tensor:
    """The activation of gate and up of x, for the K experts of each token, `[T, K, I]`. It is for `moe_outer`
    alone, and may be rounded as that takes it, and have that type. It is undefined where a token has none."""
    chosen_TK = choice.experts_TK
    hidden_TKI = x_TH.new_empty(*chosen_TK.shape, experts.gate_up.out_features // 2)
    for expert in range(len(experts.gate_up.data)):
        token, pick = torch.where(chosen_TK == expert)
        gate, up = _of_expert(x_TH[token], experts.gate_up, expert).chunk(2, dim=-1)
        hidden_TKI[token, pick] = experts.down.rounded(_activated(gate, up, experts))
    return hidden_TKI


def moe_outer(
    hidden_TKI: torch.Tensor,
    choice: Choice,
    experts: Experts,
    shared_TH: torch.Tensor | None,
    gate_T1: torch.Tensor | None,
) -> torch.Tensor:
    """Sum over a token's experts, in ascending order, of weight * down(hidden), `[T, H]`; then what an expert
    that all tokens share computed for it, times sigmoid(gate). A token without experts gets zeros.

    hidden_TKI  the full width of the experts; H is that of `experts.down`
    shared_TH   None where there is no such expert
    gate_T1     None where it has no gate, and is added as it is
    """
    chosen_TK, weights_TK, _ = choice
    y_TH = hidden_TKI.new_zeros(len(hidden_TKI), experts.down.out_features)
    for expert in range(len(experts.down.data)):
        token, pick = torch.where(chosen_TK == expert)
        out_NH = _of_expert(hidden_TKI[token, pick], experts.down, expert)
        y_TH[token] += weights_TK[token, pick, None] * out_NH
    if shared_TH is None:
        return y_TH
    return y_TH + (shared_TH if gate_T1 is None else shared_TH * gate_T1.sigmoid())


def moe_outer_norm(
    hidden_TKI: torch.Tensor,
    choice: Choice,
    experts: Experts,
    shared_TH: torch.Tensor | None,
    gate_T1: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `add_norm` of the residual and `moe_outer`."""
    y_TH = moe_outer(hidden_TKI, choice, experts, shared_TH, gate_T1)
    return add_norm(residual_TH, y_TH, weight_H, epsilon)


def _of_expert(x_NK: torch.Tensor, weight: Packed, expert: int) -> torch.Tensor:
    bias, scales = (None if part is None else part[expert] for part in (weight.bias_N, weight.scales))
    return linear(x_NK, replace(weight, data=weight.data[expert], bias_N=bias, scales=scales))


def _activated(gate_NI: torch.Tensor, up_NI: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.activation == "silu":
        return functional.silu(gate_NI) * up_NI
    gate_NI, up_NI = gate_NI.clamp(max=experts.limit), up_NI.clamp(-experts.limit, experts.limit)
    return (up_NI + 1) * gate_NI * (experts.alpha * gate_NI).sigmoid()
