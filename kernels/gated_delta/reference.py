"""The definition of `gated_delta`: the gated delta rule (arXiv 2412.06464), one token after the other."""

import torch
from torch.nn import functional

from tidemill.kernels.shared.rows import Rows, integers, rounded_after, slots_after, wide

EPSILON = 1e-6


def gated_delta(
    mixed_TGC: torch.Tensor,
    gates_TI: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_SGRKV: torch.Tensor,
    rows: Rows,
    round_tokens: int = 0,
) -> torch.Tensor:
    """Per value head: S <- exp(g) S; S <- S + k beta (v - k S); o = q S. Returns `[T, G, R, V]`.

    mixed_TGC    q, k and R value heads of each of G key heads: C = 2 K + R V. q and k are normalised to
                 length 1, q is then scaled by K ** -0.5
    gates_TI     [T, G * 2 * R], of each key head b then a of its value heads: beta = sigmoid(b),
                 g = -exp(a_log) * softplus(a + dt_bias)
    state_SGRKV  [states, G, R, K, V], float32 or bfloat16, to which it is rounded after each token;
                 read by `rows.read_B` (-1: zeros), written by `rows.writes_BK`
    round_tokens a state is rounded to bfloat16 at each multiple of this number of tokens; 0: never
    """
    _, groups, heads, key_dim, value_dim = state_SGRKV.shape
    q_TGK = _unit(mixed_TGC[..., :key_dim]) * key_dim**-0.5
    k_TGK = _unit(mixed_TGC[..., key_dim : 2 * key_dim])
    v_TGRV = mixed_TGC[..., 2 * key_dim :].view(-1, groups, heads, value_dim)
    gates_TG2R = gates_TI.view(-1, groups, 2, heads)
    beta_TGR, a_TGR = torch.sigmoid(gates_TG2R[:, :, 0]), gates_TG2R[:, :, 1]
    g_TGR = -a_log_H.view(groups, heads).exp() * functional.softplus(a_TGR + dt_bias_H.view(groups, heads))
    o_TGRV = torch.empty_like(v_TGRV, memory_format=torch.contiguous_format)
    starts, slots = integers(rows.cu_B1), slots_after(rows)
    rounded = rounded_after(rows, round_tokens)
    for b, read in enumerate(integers(rows.read_B)):
        state = wide(state_SGRKV[read] if read >= 0 else torch.zeros_like(state_SGRKV[0]))
        for t in range(starts[b], starts[b + 1]):
            state = state * g_TGR[t, :, :, None, None].exp()
            known_GRV = torch.einsum("gk,grkv->grv", k_TGK[t], state)
            change_GRV = beta_TGR[t, :, :, None] * (v_TGRV[t] - known_GRV)
            state = state + torch.einsum("gk,grv->grkv", k_TGK[t], change_GRV)
            o_TGRV[t] = torch.einsum("gk,grkv->grv", q_TGK[t], state)
            state = wide(state.to(state_SGRKV.dtype))
            if t in rounded:
                state = state.bfloat16().to(state.dtype)
            if t in slots:
                state_SGRKV[slots[t]] = state
    return o_TGRV


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON)
