# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The inner loop of `attention` on CUDA: a tile of queries over a range of a sequence's keys."""

import triton
import triton.language as tl

from tidemill.kernels.shared.codes import decode, power

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below any score, and finite: it may be taken from itself


@triton.jit
def vectors(x, at_M, mask_M, start: tl.constexpr, end: tl.constexpr, DIMS: tl.constexpr):
    """Elements [start, end) of vectors, zeros beyond."""
    dim_D = start + tl.arange(0, DIMS)
    mask_MD = mask_M[:, None] & (dim_D < end)[None, :]
    return tl.load(x + at_M[:, None] + dim_D[None, :], mask=mask_MD, other=0.0)


@triton.jit
def both(x, at_M, mask_M, R: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr):
    """Return the elements after the first R, and the first R. If R is 0 it returns the others twice,
    unused."""
    x_MD = vectors(x, at_M, mask_M, R, D, DIMS)
    x_MR = x_MD
    if R > 0:
        x_MR = vectors(x, at_M, mask_M, 0, R, FIRST)
    return x_MD, x_MR


@triton.jit
def put(x, at_M, mask_M, value_MD, value_MR, R: tl.constexpr, D: tl.constexpr) -> None:
    """The other way."""
    dim_D = R + tl.arange(0, value_MD.shape[1])
    mask_MD = mask_M[:, None] & (dim_D < D)[None, :]
    tl.store(x + at_M[:, None] + dim_D[None, :], value_MD.to(x.dtype.element_ty), mask=mask_MD)
    if R > 0:
        dim_R = tl.arange(0, value_MR.shape[1])
        mask_MR = mask_M[:, None] & (dim_R < R)[None, :]
        tl.store(x + at_M[:, None] + dim_R[None, :], value_MR.to(x.dtype.element_ty), mask=mask_MR)


@triton.jit
def keys_of_tokens(
    cache, page_N, token_N, mask_N, head, page_stride, head_stride, kv_stride, token_stride,
    P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr,
    ALIKE: tl.constexpr,
):  # fmt: skip
    """Keys and values after R elements, and the R of the keys; zeros where the mask is not."""
    at_N = page_N * page_stride + head.to(tl.int64) * head_stride + token_N % P * token_stride
    if ALIKE:
        k_ND, k_NR = both(cache, at_N, mask_N, R, D, DIMS, FIRST)
        v_ND = k_ND
    else:
        at_ND = cache + at_N[:, None] + tl.arange(0, DIMS)[None, :]
        mask_ND = mask_N[:, None] & (tl.arange(0, DIMS) < D)[None, :]
        k_ND = tl.load(at_ND, mask=mask_ND, other=0.0)
        v_ND = tl.load(at_ND + kv_stride, mask=mask_ND, other=0.0)
        k_NR = k_ND
    return k_ND, v_ND, k_NR


@triton.jit
def keys_of_tile(
    tiles, first_tiles, page, head, slot,
    R: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """The same of a tile of a page, by the copy engine."""
    k_ND = tiles.load([page, head, 0, slot, R]).reshape(KEYS, DIMS)
    v_ND, k_NR = k_ND, k_ND
    if not ALIKE:
        v_ND = tiles.load([page, head, 1, slot, 0]).reshape(KEYS, DIMS)
    if R > 0:
        k_NR = first_tiles.load([page, head, 0, slot, 0]).reshape(KEYS, R)
    return k_ND, v_ND, k_NR


@triton.jit
def as_factor(x, cache, scales):
    """Return x in the type of the numbers of `cache`."""
    return x.to(cache.dtype.element_ty) if scales is None else x.to(tl.bfloat16)


@triton.jit
def decoded(x, scales):
    """Return numbers as they are, or those of codes times 2^-8, without their scales."""
    if scales is not None:
        x = decode(x)
    return x


@triton.jit
def times_scales(x_MN, scales, at_N, mask_N, kv_stride, VALUES: tl.constexpr, FIXED: tl.constexpr):
    """Return x, of codes times 2^8 and the scales of keys or of values, where these are apart."""
    if scales is not None:
        if FIXED:
            at_N, kv_stride = at_N * 0, 1
        if VALUES:
            at_N += kv_stride
        x_MN *= power(tl.load(scales + at_N, mask=mask_N, other=127))[None, :]
    return x_MN


@triton.jit
def plus(sum_MD, shrink_M, weight_MN, v_ND):
    """Return the sum so far, scaled down, plus the values by their weights."""
    return tl.dot(weight_MN.to(v_ND.dtype), v_ND, sum_MD * shrink_M[:, None], input_precision="ieee")


@triton.jit
def attend(
    q_MD, q_MR,  # as of `both`
    position_M, weight_M, top_M, length, seen_from, all_from, all_to, end, cache, scales, tiles, first_tiles,
    pages,  # of this row
    head, scale, page_stride, head_stride, kv_stride, token_stride,
    P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, ALIKE: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Over keys [seen_from, end): float32 sums of values of weight 2^(score - top), of their elements after R
    and of these, the weights, the tops. ALIKE: values are the keys.

    Every query sees the keys [all_from, all_to), which are multiples of KEYS, and none sees one before
    `seen_from`. All before `all_to` are written. `weight_M` and `top_M` are those of what was seen before.
    """
    DIMS: tl.constexpr = q_MD.shape[1]
    FIRST: tl.constexpr = q_MR.shape[1]
    q_MD, q_MR = as_factor(q_MD, cache, scales), as_factor(q_MR, cache, scales)
    sum_MD, sum_MR = tl.zeros(q_MD.shape, tl.float32), tl.zeros(q_MR.shape, tl.float32)
    start = seen_from // KEYS * KEYS
    # The keys before all_from, those that all see, and the rest.
    for part in tl.static_range(1 if WINDOW is None else 0, 3):
        end_here = all_from if part == 0 else all_to if part == 1 else end
        # Looked up a round early, so that copies into shared memory wait for no other load.
        page = tl.load(pages + start // P, mask=start < end_here, other=0)
        for first in tl.range(start, end_here, KEYS, num_stages=STAGES):
            token_N = first + tl.arange(0, KEYS)
            mask_N = token_N < length
            if part == 2 or tiles is None:
                # Zeros in place of what is left in the rest of a page, and of pages before the window, which
                # may be NaN. What the copy engine takes is of one page, of which some query sees a token.
                if WINDOW is not None and tiles is None:
                    mask_N &= token_N >= seen_from
                page_N = tl.load(pages + token_N // P, mask=mask_N, other=0).to(tl.int64)
                scales_N = page_N * page_stride + head.to(tl.int64) * head_stride + token_N % P
                k_ND, v_ND, k_NR = keys_of_tokens(
                    cache, page_N, token_N, mask_N, head, page_stride, head_stride, kv_stride, token_stride,
                    P, D, R, DIMS, FIRST, ALIKE,
                )  # fmt: skip
            else:
                scales_N = page.to(tl.int64) * page_stride + head.to(tl.int64) * head_stride + token_N % P
                k_ND, v_ND, k_NR = keys_of_tile(
                    tiles, first_tiles, page, head, first % P, R, KEYS, DIMS, ALIKE
                )
                page = tl.load(pages + (first + KEYS) // P, mask=first + KEYS < end_here, other=0)
            k_ND, v_ND, k_NR = decoded(k_ND, scales), decoded(v_ND, scales), decoded(k_NR, scales)
            score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
            if R > 0:
                score_MN = tl.dot(q_MR, tl.trans(k_NR), score_MN, input_precision="ieee")
            score_MN = times_scales(score_MN, scales, scales_N, mask_N, kv_stride, VALUES=False, FIXED=FIXED)
            if part != 1:
                seen_MN = token_N[None, :] <= position_M[:, None]
                if WINDOW is not None:
                    seen_MN &= token_N[None, :] > position_M[:, None] - WINDOW
                score_MN = tl.where(seen_MN, score_MN, float("-inf"))
            new_top_M = tl.maximum(top_M, tl.max(score_MN, 1) * scale)
            shrink_M = tl.exp2(top_M - new_top_M)
            weight_MN = tl.exp2(score_MN * scale - new_top_M[:, None])
            weight_M = weight_M * shrink_M + tl.sum(weight_MN, 1)
            weight_MN = times_scales(
                weight_MN, scales, scales_N, mask_N, kv_stride, VALUES=not ALIKE, FIXED=FIXED
            )
            sum_MD = plus(sum_MD, shrink_M, weight_MN, v_ND)
            if R > 0:
                sum_MR = plus(sum_MR, shrink_M, weight_MN, k_NR)
            top_M = new_top_M
        start = end_here
    return sum_MD, sum_MR, weight_M, top_M
