"""The definition of `moe`: softmax routing, top-k, and the weighted sum of the experts chosen."""

import torch
from torch.nn import functional

from tidemill.kernels.moe.experts import Experts


def moe(x_TH: torch.Tensor, logits_TE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Sum over a token's experts of weight * down(silu(gate(x)) * up(x)), `[T, H]`."""
    weights_TK, chosen_TK = logits_TE.softmax(-1).topk(experts.top_k)
    if experts.renormalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    y_TH = torch.zeros_like(x_TH)
    for expert in range(logits_TE.shape[1]):
        token, pick = torch.where(chosen_TK == expert)
        gate, up = functional.linear(x_TH[token], experts.gate_up.data[expert]).chunk(2, dim=-1)
        out = functional.linear(functional.silu(gate) * up, experts.down.data[expert])
        y_TH[token] += weights_TK[token, pick, None] * out
    return y_TH
