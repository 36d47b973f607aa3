"""The definition of `rope_angles` and `rope_store`: q and k normed and rotated, k and v into pages."""

import torch

from tidemill.kernels.rms_norm.reference import rms_norm
from tidemill.kernels.shared.rows import Rows


def rope_angles(positions_T: torch.Tensor, frequencies_R: torch.Tensor) -> torch.Tensor:
    """cos and sin of position * frequency, `[T, 2, R]`; positions are int64."""
    angles_TR = positions_T[:, None].to(frequencies_R.dtype) * frequencies_R
    return torch.stack([angles_TR.cos(), angles_TR.sin()], dim=1)


def rope_store(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor | None,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    epsilon: float,
    angles_T2R: torch.Tensor,
    cache: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    """Returns q / rms(q) * weight, rotated, `[T, H, D]`; stores k, treated alike, and v.

    Tokens of a row whose `lens` is 0, the padding of a batch, store nothing.

    v_TKD       None for latents: the cache is [pages, kv_heads, 1, P, D], and only k is stored
    q_weight_D  None: q is not normed; so with k
    angles_T2R  of `rope_angles`; element i < R turns with element i + R, the rest of D is left as it is
    cache       [pages, kv_heads, 2, P, D], strided; float32, or bfloat16 to which k and v are rounded
    """
    page_tokens = cache.shape[3]
    cu_B1 = rows.cu_B1.long()
    row_T = torch.repeat_interleave(torch.arange(len(rows.lens_B), device=q_THD.device), cu_B1.diff())
    position_T = torch.arange(len(q_THD), device=q_THD.device) + rows.lens_B[row_T] - cu_B1[row_T + 1]
    stored_T = position_T >= 0
    row_T, position_T = row_T[stored_T], position_T[stored_T]
    page_T = rows.pages_BN[row_T, position_T // page_tokens].long()
    k_TKD = _rotated(k_TKD, k_weight_D, epsilon, angles_T2R)
    assert cache.shape[2] == (1 if v_TKD is None else 2)
    cache[page_T, :, 0, position_T % page_tokens] = k_TKD[stored_T].to(cache.dtype)
    if v_TKD is not None:
        cache[page_T, :, 1, position_T % page_tokens] = v_TKD[stored_T].to(cache.dtype)
    return _rotated(q_THD, q_weight_D, epsilon, angles_T2R)


def _rotated(
    x_THD: torch.Tensor, weight_D: torch.Tensor | None, epsilon: float, angles_T2R: torch.Tensor
) -> torch.Tensor:
    if weight_D is not None:
        x_THD = rms_norm(x_THD, weight_D, epsilon)
    half = angles_T2R.shape[-1]
    cos, sin = angles_T2R[:, None].unbind(2)
    low, high = x_THD[..., :half], x_THD[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x_THD[..., 2 * half :]], dim=-1)
