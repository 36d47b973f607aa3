# pyrefly: ignore-errors[bad-argument-type, bad-keyword-argument, unbound-name, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`rope_angles` and `rope_store` on CUDA, and in Triton's interpreter where the tests ask for it."""

import triton
import triton.language as tl
from torch import Tensor

from tidemill.kernels.rope_store import reference
from tidemill.kernels.shared.codes import put_codes
from tidemill.kernels.shared.fp8 import Fp8, Pages
from tidemill.kernels.shared.row_of import ROWS_AT_ONCE, row_of
from tidemill.kernels.shared.rows import Rows

ELEMENTS_MAX = 16_384  # of queries that a program holds

rope_angles = reference.rope_angles  # once per step and a few numbers per token: torch's own kernels do


@triton.jit
def norm_and_rotate(
    x,  # the first of HEADS vectors
    stride,
    heads,
    weight,  # [D], or None
    angles,  # of this token, [2, R]
    epsilon,
    R: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """x / rms(x) * weight, or x, turned, float32 `[HEADS, DIMS]`; an element's partner is read once more."""
    h_H, dim_D = tl.arange(0, HEADS), tl.arange(0, DIMS)
    partner_D = tl.where(dim_D < R, dim_D + R, dim_D - R)
    mask_HD = (h_H < heads)[:, None] & (dim_D < D)[None, :]
    at_H = h_H[:, None] * stride
    x_HD = tl.load(x + at_H + dim_D[None, :], mask=mask_HD, other=0.0).to(tl.float32)
    if weight is not None:
        scale_H = tl.rsqrt(tl.sum(x_HD * x_HD, 1) / D + epsilon)
        weight_D = tl.load(weight + dim_D, mask=dim_D < D, other=0.0).to(tl.float32)
        x_HD = x_HD * scale_H[:, None] * weight_D[None, :]
    if R > 0:
        rotated_D = dim_D < 2 * R
        mask_HD = (h_H < heads)[:, None] & rotated_D[None, :]
        other_HD = tl.load(x + at_H + partner_D[None, :], mask=mask_HD, other=0.0).to(tl.float32)
        if weight is not None:
            weight_D = tl.load(weight + partner_D, mask=rotated_D, other=0.0).to(tl.float32)
            other_HD = other_HD * scale_H[:, None] * weight_D[None, :]
        cos_D = tl.load(angles + dim_D % R, mask=rotated_D, other=1.0).to(tl.float32)
        sin_D = tl.load(angles + R + dim_D % R, mask=rotated_D, other=0.0).to(tl.float32)
        x_HD = x_HD * cos_D[None, :] + other_HD * tl.where(dim_D < R, -sin_D, sin_D)[None, :]
    return x_HD


@triton.jit(do_not_specialize=["rows", "pages_stride"])
def rotate_and_store(
    q,  # [T, H, D]
    k,  # [T, kv_heads, D]
    v,  # [T, kv_heads, D], or None
    q_weight, k_weight,  # [D], or None
    angles,  # [T, 2, R]
    out,  # [T, H, D]
    cache,  # [pages, kv_heads, 2, P, D], or 1 in place of 2 without v
    scales,  # of codes: two that are FIXED, or by the strides of `cache`, side by side in a page; or None
    cu, lens, pages, epsilon, rows,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    page_stride, head_stride, kv_stride, token_stride, pages_stride,
    ONE_EACH: tl.constexpr,  # every row has one token
    P: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a program
    PARTS: tl.constexpr,  # programs of a kv head
    HEADS: tl.constexpr, DIMS: tl.constexpr, ROWS: tl.constexpr, FIXED: tl.constexpr,
) -> None:  # fmt: skip
    """Token i, part j % PARTS of the query heads of kv head j // PARTS, of a grid (i, j); the first of them
    stores."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    angles += token * 2 * R
    dim_D = tl.arange(0, DIMS)
    mask_D = dim_D < D
    h_H = tl.arange(0, HEADS)
    q += token * q_token_stride + head * GROUP * q_head_stride
    q_HD = norm_and_rotate(q, q_head_stride, GROUP, q_weight, angles, epsilon, R, D, HEADS, DIMS)
    out += (token * tl.num_programs(1) + head) * GROUP * D
    mask_HD = (h_H < GROUP)[:, None] & mask_D[None, :]
    tl.store(out + h_H[:, None] * D + dim_D[None, :], q_HD.to(out.dtype.element_ty), mask=mask_HD)

    if head % PARTS > 0:
        return
    head = head // PARTS
    row = token
    if not ONE_EACH:
        row = row_of(cu, rows, token, ROWS)
        if row >= rows:
            return
    position = tl.load(lens + row) - 1
    if not ONE_EACH:
        position += token - tl.load(cu + row + 1) + 1
    if position < 0:  # the padding of a batch
        return
    page = tl.load(pages + row * pages_stride + position // P).to(tl.int64)
    first = page * page_stride + head * head_stride
    cache += first + position % P * token_stride
    if scales is not None and not FIXED:
        scales += first + position % P
    k += token * k_token_stride + head * k_head_stride
    k_HD = norm_and_rotate(k, 0, 1, k_weight, angles, epsilon, R, D, 1, DIMS)
    if scales is None:
        tl.store(cache + dim_D[None, :], k_HD.to(cache.dtype.element_ty), mask=mask_D[None, :])
    else:
        put_codes(k_HD, cache + dim_D[None, :], scales, mask_D[None, :], FIXED)
    if v is not None:
        v_D = tl.load(v + token * v_token_stride + head * v_head_stride + dim_D, mask=mask_D, other=0.0)
        v_D = v_D.to(tl.float32)
        if scales is None:
            tl.store(cache + kv_stride + dim_D, v_D.to(cache.dtype.element_ty), mask=mask_D)
        else:
            put_codes(v_D, cache + kv_stride + dim_D, scales + (1 if FIXED else kv_stride), mask_D, FIXED)


def rope_store(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor | None,
    q_weight_D: Tensor | None,
    k_weight_D: Tensor | None,
    epsilon: float,
    angles_T2R: Tensor,
    cache: Pages,
    rows: Rows,
) -> Tensor:
    """One launch: a program per token and kv head. Computes in float32."""
    tokens, q_heads, dim = q_THD.shape
    kv_heads, page_tokens, num_rows = cache.shape[1], cache.shape[3], len(rows.lens_B)
    scales, fixed = None, False
    if isinstance(cache, Fp8):
        fixed = cache.is_fixed
        assert fixed or cache.is_beside
        cache, scales = cache
    assert dim == 1 or q_THD.stride(2) == k_TKD.stride(2) == cache.stride(4) == 1
    assert v_TKD is None or dim == 1 or v_TKD.stride(2) == 1
    assert cache.shape[2] == (1 if v_TKD is None else 2)
    assert q_weight_D is None or q_weight_D.is_contiguous()
    assert k_weight_D is None or k_weight_D.is_contiguous()
    assert angles_T2R.is_contiguous()
    assert rows.pages_BN.stride(1) == 1 or rows.pages_BN.shape[1] == 1
    out_THD = q_THD.new_empty(tokens, q_heads, dim)
    if not tokens:
        return out_THD
    width = triton.next_power_of_2(dim)
    group = _group(q_heads // kv_heads, width)
    heads = triton.next_power_of_2(group)
    rotate_and_store[(tokens, q_heads // group)](
        q_THD, k_TKD, v_TKD, q_weight_D, k_weight_D, angles_T2R, out_THD, cache, scales,
        rows.cu_B1, rows.lens_B, rows.pages_BN, epsilon, num_rows,
        *q_THD.stride()[:2], *k_TKD.stride()[:2], *((0, 0) if v_TKD is None else v_TKD.stride()[:2]),
        *cache.stride()[:4],
        rows.pages_BN.stride(0), ONE_EACH=tokens == num_rows, P=page_tokens, R=angles_T2R.shape[2], D=dim,
        GROUP=group, PARTS=q_heads // kv_heads // group, HEADS=heads, DIMS=width, ROWS=ROWS_AT_ONCE,
        FIXED=fixed,
        num_warps=max(1, min(8, heads * width // 512)),
    )  # fmt: skip
    return out_THD


def _group(heads: int, width: int) -> int:
    """Return how many query heads of a kv head a program takes: the largest equal parts that fit."""
    return next(n for n in range(heads, 0, -1) if heads % n == 0 and (n == 1 or n * width <= ELEMENTS_MAX))
