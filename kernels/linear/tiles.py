# pyrefly: ignore-errors[bad-argument-type, bad-return, unexpected-keyword]
# ruff: noqa: ANN001 - Triton takes annotations of kernels for its own types
"""Products with codes on CUDA, and with floats if a token's sum must have one order in every batch.

There is one launch, or two where the rows are too few to fill a device.

The weights are the left side, as those of experts are, and tokens its columns. The depth is cut into spans by
the shape of the weights alone; a span is a sum of its own, and the spans are added in order, by one program
or after several. So a token's sum has one order in every batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.kernels.linear.factors import (
    BLOCK,
    TILES,
    constants,
    factors,
    scaled,
    taken,
    tile_of_codes,
    zeros,
)
from tidemill.kernels.linear.packed import Packed

TOKENS_MAX = 128  # of a tile; of 4 bits half of them: registers hold factors beside two sums
SMALL_TOKENS = 32  # of float32, which no matrix unit multiplies: for small models
PROGRAMS = 512  # that a device has room for at least
SPAN_MIN = 512
SPANS_MAX = 16


@triton.jit(do_not_specialize=["tokens"])
def product_tile(
    x,  # [T, H, K], bfloat16, or float32 as the weights, or of w8a8 int8
    x_scales,  # of int8 [T, H], or None
    codes,  # uint8 [H, ROWS, ROW], or floats
    scales, offsets,  # [H, GROUPS, ROWS]; either may be None
    bias,  # [ROWS], or None
    y,  # [T, H, ROWS]; of spans apart float32 [spans, T, H, ROWS], of w8a8 int32
    tokens, token_stride, head_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    APART: tl.constexpr,
    KIND: tl.constexpr, HALVES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
) -> None:  # fmt: skip
    """Compute tile i of tokens, j of rows, and span k // H of head k % H, or all its spans, of a grid
    (i, j, k)."""
    head, span = (tl.program_id(2) % H).to(tl.int64), tl.program_id(2) // H
    token_M, row_N = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    depth_D = tl.arange(0, D)
    in_M, in_N = token_M < tokens, row_N < ROWS
    x_MD = x + token_M.to(tl.int64)[:, None] * token_stride + head * head_stride + depth_D[None, :]
    code_ND = codes + (head * ROWS + row_N)[:, None] * ROW + depth_D[None, :]
    if scales is not None:
        scales += head * GROUPS * ROWS
    if offsets is not None:
        offsets += head * GROUPS * ROWS
    total_NM = zeros(KIND, N, M)
    for first in range(span * SPAN, span * SPAN + SPAN if APART else K, SPAN):
        sum_NM = zeros(KIND, N, M)
        for depth in range(first, min(first + SPAN, K), D * HALVES):
            mask_ND = in_N[:, None]
            if KIND is None and K % D:  # rows of codes are filled up
                mask_ND = mask_ND & (depth_D < K - depth)[None, :]
            step_ND = tl.load(code_ND + depth // HALVES, mask=mask_ND, other=0)
            for half in tl.static_range(HALVES):
                at = depth + half * D
                mask_MD = in_M[:, None]
                if K % (D * HALVES):
                    mask_MD = mask_MD & (depth_D < K - at)[None, :]
                x_DM = tl.trans(tl.load(x_MD + at, mask=mask_MD, other=0.0))
                weight_ND = factors(
                    step_ND, half, scales, offsets, row_N, in_N, at, ROWS, KIND, GROUPS, GROUP, N, D
                )
                sum_NM = tl.dot(weight_ND, x_DM, sum_NM, input_precision="ieee", out_dtype=sum_NM.dtype)
        total_NM += sum_NM
    if not APART:
        total_NM = scaled(total_NM, x_scales, token_M * H + head, in_M, scales, row_N, in_N, KIND)
    if bias is not None:
        total_NM += tl.load(bias + row_N, mask=in_N, other=0.0).to(tl.float32)[:, None]
    to_M = (span.to(tl.int64) * tokens + token_M) * H + head
    mask_MN = in_M[:, None] & in_N[None, :]
    tl.store(
        y + to_M[:, None] * ROWS + row_N[None, :], tl.trans(total_NM).to(y.dtype.element_ty), mask=mask_MN
    )


@triton.jit(do_not_specialize=["elements"])
def add_spans(
    part,  # float32 [SPANS, elements], of w8a8 int32
    x_scales, scales,  # of int32 [elements / ROWS] and [ROWS], else None
    bias,  # [ROWS], or None
    y,  # [elements / ROWS, ROWS]
    elements,
    ROWS: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Add the spans of block i, of a grid (i,), in order."""
    at_B = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask_B = at_B < elements
    total_B = tl.zeros([BLOCK], part.dtype.element_ty)
    for span in tl.static_range(SPANS):
        total_B += tl.load(part + elements.to(tl.int64) * span + at_B, mask=mask_B, other=0.0)
    if x_scales is not None:
        total_B = total_B.to(tl.float32) * tl.load(x_scales + at_B // ROWS, mask=mask_B, other=0.0)
        total_B *= tl.load(scales + at_B % ROWS, mask=mask_B, other=0.0).to(tl.float32)
    if bias is not None:
        total_B += tl.load(bias + at_B % ROWS, mask=mask_B, other=0.0).to(tl.float32)
    tl.store(y + at_B, total_B.to(y.dtype.element_ty), mask=mask_B)


def span_of(heads: int, rows: int, depth: int) -> int:
    """Return the columns of a span, so that few rows make enough programs."""
    tiles, blocks = heads * triton.cdiv(rows, TILES[16][0]), triton.cdiv(depth, BLOCK)
    spans = min(SPANS_MAX, max(1, PROGRAMS // tiles), max(1, depth // SPAN_MIN))
    return triton.cdiv(blocks, spans) * BLOCK


def products(x_THK: Tensor, weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return `[T, H, N]` of x by heads and weights `[H, N, K]`; the last dimension of x has stride 1."""
    (tokens, heads, depth), rows = x_THK.shape, weight.out_features
    assert depth == weight.in_features
    assert x_THK.stride(2) == 1
    y_THN = x_THK.new_empty(tokens, heads, rows, dtype=dtype)
    if not tokens:
        return y_THN
    span, fixed = span_of(heads, rows, depth), constants(weight)
    x_THK, x_scales = taken(x_THK, weight)
    most = SMALL_TOKENS if weight.data.dtype == torch.float32 else TOKENS_MAX // fixed["HALVES"]
    m = min(most, max(16, triton.next_power_of_2(tokens)))
    tile = tile_of_codes(weight, m)
    grid, spans = (triton.cdiv(tokens, m), triton.cdiv(rows, tile["N"])), triton.cdiv(depth, span)
    apart = spans > 1 and grid[0] * grid[1] * heads < PROGRAMS // 2
    sums = torch.int32 if weight.kind == "w8a8" else torch.float32
    to = x_THK.new_empty(spans, tokens, heads, rows, dtype=sums) if apart else y_THN
    product_tile[(*grid, heads * spans if apart else heads)](
        x_THK, x_scales, weight.data, weight.scales, weight.offsets, None if apart else weight.bias_N, to,
        tokens, x_THK.stride(0), x_THK.stride(1), H=heads, K=depth, ROWS=rows,
        SPAN=span, APART=apart, **fixed, **tile,
    )  # fmt: skip
    if apart:
        size = y_THN.numel()
        add_spans[(triton.cdiv(size, 1024),)](
            to, x_scales, None if x_scales is None else weight.scales, weight.bias_N, y_THN, size,
            ROWS=rows, SPANS=spans, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return y_THN
