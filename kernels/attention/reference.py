"""The definition of `attention` and `gated_attention`: causal softmax attention over paged memory."""

import math

import torch

from tidemill.kernels.activation.reference import sigmoid_mul
from tidemill.kernels.shared.compute_dtype import ComputeDtype
from tidemill.kernels.shared.fp8 import Fp8, Pages, decode
from tidemill.kernels.shared.rows import Made, Rows, integers


def attention(
    q_THD: torch.Tensor,
    cache: Pages,
    rows: Rows,
    window: int | None,
    sinks_H: torch.Tensor | None,
    made: Made | None = None,  # noqa: ARG001 - of devices
    *,
    compute_dtype: ComputeDtype = "float32",
) -> torch.Tensor:
    """o = softmax(q K^T / sqrt(D)) V over the tokens up to and including the query's own, `[T, H, D]`.

    cache     [pages, kv_heads, 2, P, D], strided, in which this step's keys and values are stored already;
              query head h reads kv head h // (H / kv_heads). With 1 in place of 2 the values are the keys
    window    >= 1, the tokens that a query sees, its own included; None: all. Pages of which no query of a
              row sees a token are not read, and their ids may be anything
    sinks_H   float32, for each query head a score that takes its share of the softmax and has no value
              (attention sinks of gpt-oss); None: none

    compute_dtype
              of the factors of both products: with bfloat16, q log2(e) / sqrt(D), keys, values and the
              weights of the softmax are rounded, on CPU before the weights are divided by their sum. Scores
              are then exponents of 2

    A row with `lens` 0, the padding of a batch, gets zeros.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(x.dtype) if compute_dtype == "bfloat16" else x

    o_THD = torch.empty_like(q_THD)
    base = math.log2(math.e) if compute_dtype == "bfloat16" else 1.0
    group, page_tokens = q_THD.shape[1] // cache.shape[1], cache.shape[3]
    starts = integers(rows.cu_B1)
    for b, length in enumerate(integers(rows.lens_B)):
        q_NHD = q_THD[starts[b] : starts[b + 1]]
        before = length - len(q_NHD)
        first = 0 if window is None else max(0, before - window + 1)
        count, offset = length - first, first % page_tokens
        pages_N = rows.pages_BN[b, first // page_tokens : -(-length // page_tokens)].long()
        if isinstance(cache, Fp8):
            kv_NK2PD = decode(cache.codes[pages_N], cache.scales[pages_N])
        else:
            kv_NK2PD = cache[pages_N]
        kv_K2PD = kv_NK2PD.permute(1, 2, 0, 3, 4).flatten(2, 3)
        kv_H2LD = kv_K2PD[:, :, offset : offset + count].to(q_THD.dtype).repeat_interleave(group, dim=0)
        k_HLD, v_HLD = rounded(kv_H2LD[:, 0]), rounded(kv_H2LD[:, -1])
        scaled_NHD = rounded(q_NHD * (q_THD.shape[2] ** -0.5 * base))
        scores_HNL = torch.einsum("nhd,hld->hnl", scaled_NHD, k_HLD) / base
        every_NL = torch.ones(len(q_NHD), count, dtype=torch.bool, device=q_THD.device)
        unseen_NL = every_NL.triu(before - first + 1)
        if window is not None:
            unseen_NL |= every_NL.tril(before - first - window)
        scores_HNL = scores_HNL.masked_fill(unseen_NL, float("-inf"))
        if sinks_H is not None:
            sinks_HN1 = sinks_H.to(q_THD.dtype)[:, None, None].expand(-1, len(q_NHD), 1)
            scores_HNL = torch.cat([scores_HNL, sinks_HN1], -1)
        weights_HNL = scores_HNL.softmax(-1)[..., :count]
        o_THD[starts[b] : starts[b + 1]] = torch.einsum("hnl,hld->nhd", rounded(weights_HNL), v_HLD)
    return o_THD


def gated_attention(
    q_THD: torch.Tensor,
    cache: Pages,
    rows: Rows,
    window: int | None,
    sinks_H: torch.Tensor | None,
    gate_THD: torch.Tensor,
    made: Made | None = None,  # noqa: ARG001 - of devices
    *,
    compute_dtype: ComputeDtype = "float32",
) -> torch.Tensor:
    """Return `sigmoid_mul` of `attention` and the gate, `[T, H D]`. The gate may be strided except in D."""
    return sigmoid_mul(attention(q_THD, cache, rows, window, sinks_H, compute_dtype=compute_dtype), gate_THD)
