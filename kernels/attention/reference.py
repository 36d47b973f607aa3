"""The definition of `attention`: causal softmax attention over paged keys and values."""

import torch

from tidemill.kernels.rows import Rows, integers


def attention(q_THD: torch.Tensor, cache: torch.Tensor, rows: Rows) -> torch.Tensor:
    """o = softmax(q K^T / sqrt(D)) V over the tokens up to and including the query's own, `[T, H, D]`.

    cache   [pages, kv_heads, 2, P, D], strided, in which this step's keys and values are stored already;
            query head h reads kv head h // (H / kv_heads)
    """
    o_THD = torch.empty_like(q_THD)
    group = q_THD.shape[1] // cache.shape[1]
    starts = integers(rows.cu_B1)
    for b, length in enumerate(integers(rows.lens_B)):
        q_NHD = q_THD[starts[b] : starts[b + 1]]
        pages_N = rows.pages_BN[b, : -(-length // cache.shape[3])].long()
        kv_K2LD = cache[pages_N].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].to(q_THD.dtype)
        k_HLD, v_HLD = kv_K2LD.repeat_interleave(group, dim=0).unbind(1)
        scores_HNL = torch.einsum("nhd,hld->hnl", q_NHD, k_HLD) * q_THD.shape[2] ** -0.5
        every_NL = torch.ones(len(q_NHD), length, dtype=torch.bool, device=q_THD.device)
        unseen_NL = every_NL.triu(length - len(q_NHD) + 1)
        weights_HNL = scores_HNL.masked_fill(unseen_NL, float("-inf")).softmax(-1)
        o_THD[starts[b] : starts[b + 1]] = torch.einsum("hnl,hld->nhd", weights_HNL, v_HLD)
    return o_THD
