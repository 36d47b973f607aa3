"""The definition of `mamba2`: state space duality (arXiv 2405.21060), one token after the other."""

import torch
from torch.nn import functional

from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.shared.rows import Rows, integers, rounded_after, slots_after, wide


def mamba2(
    mixed_TGC: torch.Tensor,
    z_TGRV: torch.Tensor,
    dt_TH: torch.Tensor,
    heads: Heads,
    state_SGRKV: torch.Tensor,
    rows: Rows,
    round_tokens: int = 0,
) -> torch.Tensor:
    """Per head: S <- exp(-exp(a_log) dt) S + B dt x; y = (C S + skip x) silu(z). Returns `[T, G, R, V]`.

    mixed_TGC    B, C and the x of R heads of each of G head groups: C = 2 K + R V
    dt_TH        [T, G R], dt = softplus(dt + dt_bias) within its bounds
    state_SGRKV  [states, G, R, K, V], float32 or bfloat16, to which it is rounded after each token;
                 read by `rows.read_B` (-1: zeros), written by `rows.writes_BK`
    round_tokens a state is rounded to bfloat16 at each multiple of this number of tokens; 0: never
    """
    _, groups, values, key_dim, value_dim = state_SGRKV.shape
    b_TGK, c_TGK = mixed_TGC[..., :key_dim], mixed_TGC[..., key_dim : 2 * key_dim]
    x_TGRV = mixed_TGC[..., 2 * key_dim :].view(-1, groups, values, value_dim)
    dt_TH = functional.softplus(dt_TH + heads.dt_bias_H).clamp(heads.dt_min, heads.dt_max)
    decay_TGR = torch.exp(-heads.a_log_H.exp() * dt_TH).view(-1, groups, values)
    added_TGRV = dt_TH.view(-1, groups, values, 1) * x_TGRV
    y_TGRV = heads.skip_H.view(groups, values, 1) * x_TGRV
    starts, slots = integers(rows.cu_B1), slots_after(rows)
    rounded = rounded_after(rows, round_tokens)
    for b, read in enumerate(integers(rows.read_B)):
        state = wide(state_SGRKV[read] if read >= 0 else torch.zeros_like(state_SGRKV[0]))
        for t in range(starts[b], starts[b + 1]):
            state = state * decay_TGR[t, :, :, None, None]
            state = state + torch.einsum("gk,grv->grkv", b_TGK[t], added_TGRV[t])
            y_TGRV[t] += torch.einsum("gk,grkv->grv", c_TGK[t], state)
            state = wide(state.to(state_SGRKV.dtype))
            if t in rounded:
                state = state.bfloat16().to(state.dtype)
            if t in slots:
                state_SGRKV[slots[t]] = state
    return y_TGRV * functional.silu(z_TGRV)
