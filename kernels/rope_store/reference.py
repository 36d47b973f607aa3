"""The definition of `rope_angles` and `rope_store`: q and k normed and rotated, k and v into pages."""

import torch

from tidemill.kernels.rms_norm.reference import rms_norm
from tidemill.kernels.shared.fp8 import Fp8, Pages, encode, scale_of
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
    cache: Pages,
    rows: Rows,
) -> torch.Tensor:
    """Returns q / rms(q) * weight, rotated, `[T, H, D]`; stores k, treated alike, and v.

    Tokens of a row whose `lens` is 0, the padding of a batch, store nothing.

    v_TKD       None for latents: the cache is [pages, kv_heads, 1, P, D], and only k is stored
    q_weight_D  None: q is not normed; so with k
    angles_T2R  of `rope_angles`; element i < R turns with element i + R, the rest of D is left as it is
    cache       [pages, kv_heads, 2, P, D], strided; float32, or bfloat16 or FP8 to which k and v are
                rounded. Scales of tokens are written too
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
    for part, x_TKD in enumerate([k_TKD] if v_TKD is None else [k_TKD, v_TKD]):
        _store(x_TKD[stored_T], cache, (page_T, slice(None), part, position_T % page_tokens))
    return _rotated(q_THD, q_weight_D, epsilon, angles_T2R)


def _store(x_TKD: torch.Tensor, cache: Pages, at: tuple[torch.Tensor, slice, int, torch.Tensor]) -> None:
    if not isinstance(cache, Fp8):
        cache[at] = x_TKD.to(cache.dtype)
        return
    if not cache.is_fixed:
        cache.scales[at] = scale_of(x_TKD.abs().amax(-1))
    cache.codes[at] = encode(x_TKD, cache.scales[at])


def _rotated(
    x_THD: torch.Tensor, weight_D: torch.Tensor | None, epsilon: float, angles_T2R: torch.Tensor
) -> torch.Tensor:
    if weight_D is not None:
        x_THD = rms_norm(x_THD, weight_D, epsilon)
    half = angles_T2R.shape[-1]
    cos, sin = angles_T2R[:, None].unbind(2)
    low, high = x_THD[..., :half], x_THD[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x_THD[..., 2 * half :]], dim=-1)
