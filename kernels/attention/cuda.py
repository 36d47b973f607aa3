# pyright: basic, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
# Nor has it types that pyright could check.
"""`attention` on CUDA, and in Triton's interpreter where the tests ask for it.

A row of one token is cut at fixed places into spans of keys, to which programs attend side by side and
whose results are then added up (split-KV, as in Flash-Decoding). The tokens of a longer row are taken in
tiles, each of which goes through its keys from the first to the last (FlashAttention-2, arXiv 2307.08691).
What comes out for a token depends on its own sequence, and on whether its row has other tokens, not on the
rest of the batch. A window leaves out the spans, and the keys of a tile, that lie wholly before it; a sink is
one more score.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.rows import Rows

SPAN_TOKENS = 256  # of one program of `attend_span`, as long as SPANS_MAX of them cover the sequence
SPANS_MAX = 64
SPANS_AT_ONCE = 16  # of one round of `add_spans`
ROWS_AT_ONCE = 128  # of one round of the search for a program's row
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # below any score, and finite: it may be taken from itself


@dataclass(frozen=True, slots=True)
class Tile:
    """How programs of one kernel are cut: query vectors and keys at once, warps, copies of keys in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


def span_tile(group: int, dim: int, dtype: torch.dtype) -> Tile:
    queries = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(queries, 16, 4, 2)
    return Tile(queries, 64 if dim <= 128 else 32, 4 if queries * dim <= 8192 else 8, 3)


def row_tile(dim: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 16, 8, 1)
    return Tile(128, 64, 4 if dim <= 64 else 8, 2)


@triton.jit
def attend(
    q_MD, position_M, weight_M, top_M, length,
    seen_from, all_from, all_to, end,
    cache, tiles,
    pages,  # of this row
    head, scale, page_stride, head_stride, kv_stride, token_stride,
    P: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Over keys [seen_from, end): float32 sums of values of weight 2^(score - top), the weights, the tops.

    Every query sees the keys [all_from, all_to), which are multiples of KEYS, and none sees one before
    `seen_from`. All before `all_to` are written. `weight_M` and `top_M` are those of what was seen before.
    """
    DIMS: tl.constexpr = q_MD.shape[1]
    sum_MD = tl.zeros(q_MD.shape, tl.float32)
    dim_D = tl.arange(0, DIMS)
    start = seen_from // KEYS * KEYS
    # The keys before all_from, those that all see, and the rest.
    for part in tl.static_range(1 if WINDOW is None else 0, 3):
        end_here = all_from if part == 0 else all_to if part == 1 else end
        # Looked up a round early, so that copies into shared memory wait for no other load.
        page = tl.load(pages + start // P, mask=start < end_here, other=0)
        for first in tl.range(start, end_here, KEYS, num_stages=STAGES):
            token_N = first + tl.arange(0, KEYS)
            if part == 2 or tiles is None:
                # Zeros in place of what is left in the rest of a page, and of pages before the window, which
                # may be NaN. What the copy engine takes is of one page, of which some query sees a token.
                mask_N = token_N < length
                if WINDOW is not None and tiles is None:
                    mask_N &= token_N >= seen_from
                page_N = tl.load(pages + token_N // P, mask=mask_N, other=0).to(tl.int64)
                at_N = page_N * page_stride + head.to(tl.int64) * head_stride + token_N % P * token_stride
                at_ND = cache + at_N[:, None] + dim_D[None, :]
                mask_ND = mask_N[:, None] & (dim_D < D)[None, :]
                k_ND = tl.load(at_ND, mask=mask_ND, other=0.0)
                v_ND = tl.load(at_ND + kv_stride, mask=mask_ND, other=0.0)
            else:
                k_ND = tiles.load([page, head, 0, first % P, 0]).reshape(KEYS, DIMS)
                v_ND = tiles.load([page, head, 1, first % P, 0]).reshape(KEYS, DIMS)
                page = tl.load(pages + (first + KEYS) // P, mask=first + KEYS < end_here, other=0)
            score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
            if part != 1:
                seen_MN = token_N[None, :] <= position_M[:, None]
                if WINDOW is not None:
                    seen_MN &= token_N[None, :] > position_M[:, None] - WINDOW
                score_MN = tl.where(seen_MN, score_MN, float("-inf"))
            new_top_M = tl.maximum(top_M, tl.max(score_MN, 1) * scale)
            shrink_M = tl.exp2(top_M - new_top_M)
            weight_MN = tl.exp2(score_MN * scale - new_top_M[:, None])
            sum_MD = sum_MD * shrink_M[:, None]
            sum_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, sum_MD, input_precision="ieee")
            weight_M = weight_M * shrink_M + tl.sum(weight_MN, 1)
            top_M = new_top_M
        start = end_here
    return sum_MD, weight_M, top_M


@triton.jit
def spans_of(length, SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a sequence's last token sees, the tokens of a span, and the span of that key.

    Spans lie at multiples of their tokens, and the keys that the token sees are in SPANS of them at most.
    """
    seen_from = 0
    seen, spans = length, SPANS
    if WINDOW is not None:
        seen_from = tl.maximum(length - WINDOW, 0)
        # A window may begin and end in the middle of a span.
        seen, spans = tl.minimum(length, WINDOW), SPANS - 1
    span_tokens = tl.maximum(SPAN * tl.cdiv(seen, SPAN * spans), 1)
    return seen_from, span_tokens, seen_from // span_tokens


@triton.jit(do_not_specialize=["pages_stride"])
def attend_span(
    q,  # [T, H, D]
    cache,  # [pages, kv_heads, 2, P, D]
    tiles,  # the same as a descriptor of tiles, or None
    cu, lens, pages,
    sums,  # float32 [B, H, spans, D]
    weights,  # float32 [B, H, spans]
    tops,  # float32 [B, H, spans]
    scale,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    ONE_EACH: tl.constexpr,  # every row has one token
    P: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Row i, kv head j, span k of those that the row's token sees, of a grid (i, j, k)."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    span = tl.program_id(2)
    token = row
    if not ONE_EACH:
        token = tl.load(cu + row).to(tl.int64)
        if tl.load(cu + row + 1) - token != 1:
            return
    length = tl.load(lens + row)
    seen_from, span_tokens, first_span = spans_of(length, SPAN, SPANS, WINDOW)
    start = (first_span + span) * span_tokens
    if start >= length:
        return
    h_M = tl.arange(0, QUERIES)
    dim_D = tl.arange(0, DIMS)
    at_MD = token * q_token_stride + (head * GROUP + h_M)[:, None] * q_head_stride + dim_D[None, :]
    mask_MD = (h_M < GROUP)[:, None] & (dim_D < D)[None, :]
    q_MD = tl.load(q + at_MD, mask=mask_MD, other=0.0).to(cache.dtype.element_ty)
    position_M = tl.full([QUERIES], 0, tl.int32) + length - 1
    end = tl.minimum(start + span_tokens, length)
    all_from, all_to = start, start + (end - start) // KEYS * KEYS
    if WINDOW is not None:
        start = tl.maximum(start, seen_from)
        all_from = tl.minimum(tl.cdiv(start, KEYS) * KEYS, all_to)
    weight_M = tl.zeros([QUERIES], tl.float32)
    top_M = tl.full([QUERIES], LOWEST, tl.float32)
    sum_MD, weight_M, top_M = attend(
        q_MD, position_M, weight_M, top_M, length, start, all_from, all_to, end,
        cache, tiles, pages + row * pages_stride,
        head, scale, page_stride, head_stride, kv_stride, token_stride, P, D, KEYS, STAGES, WINDOW,
    )  # fmt: skip
    heads = tl.num_programs(1) * GROUP
    at_M = (row * heads + head * GROUP + h_M) * tl.num_programs(2) + span
    tl.store(sums + at_M[:, None] * D + dim_D[None, :], sum_MD, mask=mask_MD)
    tl.store(weights + at_M, weight_M, mask=h_M < GROUP)
    tl.store(tops + at_M, top_M, mask=h_M < GROUP)


@triton.jit(do_not_specialize=["spans"])
def add_spans(
    sums, weights, tops,
    sinks,  # float32 [H], or None
    cu, lens,
    out,  # [T, H, D]
    spans,
    ONE_EACH: tl.constexpr, D: tl.constexpr, DIMS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Row i, query head j of a grid (i, j). A row that is the padding of a batch gets zeros."""
    row = tl.program_id(0).to(tl.int64)
    token = row
    if not ONE_EACH:
        token = tl.load(cu + row).to(tl.int64)
        if tl.load(cu + row + 1) - token != 1:
            return
    length = tl.load(lens + row)
    _, span_tokens, first_span = spans_of(length, SPAN, SPANS, WINDOW)
    used = tl.cdiv(length, span_tokens) - first_span
    dim_D = tl.arange(0, DIMS)
    first = (row * tl.num_programs(1) + tl.program_id(1)) * spans
    at_S = first + tl.arange(0, SPANS)
    top = tl.max(tl.load(tops + at_S, mask=at_S < first + used, other=float("-inf")), 0)
    sum_D = tl.zeros([DIMS], tl.float32)
    weight = 0.0
    if sinks is not None:
        sink = tl.maximum(tl.load(sinks + tl.program_id(1)) * LOG2_E, LOWEST)
        top = tl.maximum(top, sink)
        weight += tl.exp2(sink - top)
    for start in range(0, used, AT_ONCE):
        span_S = start + tl.arange(0, AT_ONCE)
        mask_S = span_S < used
        share_S = tl.exp2(tl.load(tops + first + span_S, mask=mask_S, other=float("-inf")) - top)
        weight += tl.sum(share_S * tl.load(weights + first + span_S, mask=mask_S, other=0.0), 0)
        at_SD = (first + span_S)[:, None] * D + dim_D[None, :]
        sum_SD = tl.load(sums + at_SD, mask=mask_S[:, None] & (dim_D < D)[None, :], other=0.0)
        sum_D += tl.sum(share_S[:, None] * sum_SD, 0)
    sum_D /= tl.where(weight > 0, weight, 1.0)
    at_D = (token * tl.num_programs(1) + tl.program_id(1)) * D + dim_D
    tl.store(out + at_D, sum_D.to(out.dtype.element_ty), mask=dim_D < D)


@triton.jit
def keys_of(position_M, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Of a tile of queries: seen_from, all_from, all_to and end, as `attend` takes them."""
    all_to = tl.maximum(tl.min(position_M, 0) + 1, 0) // KEYS * KEYS
    end = tl.max(position_M, 0) + 1
    seen_from, all_from = 0, 0
    if WINDOW is not None:
        seen_from = tl.maximum(tl.min(position_M, 0) - WINDOW + 1, 0)
        all_from = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), KEYS) * KEYS, end // KEYS * KEYS)
        all_to = tl.maximum(all_from, all_to)
    return seen_from, all_from, all_to, end


@triton.jit(do_not_specialize=["rows", "pages_stride"])
def attend_rows(
    q,  # [T, H, D]
    cache,  # [pages, kv_heads, 2, P, D]
    tiles,  # the same as a descriptor of tiles, or None
    sinks,  # float32 [H], or None
    cu, lens, pages,
    out,  # [T, H, D]
    scale, rows,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    P: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Some tile of query vectors of one row, and kv head j of a grid (at least the tiles, j).

    The vectors of a row are its tokens' query heads of kv head j, side by side: GROUP vectors of each token.
    Row b has the tiles from cu[b] * GROUP // QUERIES + b on, which is room for as many as it can need.
    """
    # Later tokens have more keys: the longest go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    row = -1
    for first in range(0, rows, ROWS):
        row_R = first + tl.arange(0, ROWS)
        tile_R = tl.load(cu + row_R, mask=row_R < rows, other=0) * GROUP // QUERIES + row_R
        row += tl.sum(((row_R < rows) & (tile_R <= tile)).to(tl.int32), 0)
    before = tl.load(cu + row)
    tokens = tl.load(cu + row + 1) - before
    first = (tile - before * GROUP // QUERIES - row) * QUERIES
    # A row of one token is that of `attend_span`.
    if (tokens < 2) | (first >= tokens * GROUP):
        return
    length = tl.load(lens + row)
    # From the tile's first token on, so that what every thread keeps of these is small.
    token = first // GROUP
    vector_M = first % GROUP + tl.arange(0, QUERIES)
    left = tokens - token
    position_M = length - left + tl.minimum(vector_M // GROUP, left - 1)
    dim_D = tl.arange(0, DIMS)
    mask_MD = (vector_M < left * GROUP)[:, None] & (dim_D < D)[None, :]
    q += (before + token).to(tl.int64) * q_token_stride + head * GROUP * q_head_stride
    at_M = vector_M // GROUP * q_token_stride + vector_M % GROUP * q_head_stride
    q_MD = tl.load(q + at_M[:, None] + dim_D[None, :], mask=mask_MD, other=0.0).to(cache.dtype.element_ty)
    pages += row.to(tl.int64) * pages_stride
    seen_from, all_from, all_to, end = keys_of(position_M, KEYS, WINDOW)
    weight_M = tl.zeros([QUERIES], tl.float32)
    top_M = tl.full([QUERIES], LOWEST, tl.float32)
    if sinks is not None:
        sink_M = tl.load(sinks + head * GROUP + vector_M % GROUP) * LOG2_E
        weight_M, top_M = weight_M + 1.0, tl.maximum(top_M, sink_M)
    sum_MD, weight_M, _ = attend(
        q_MD, position_M, weight_M, top_M, length, seen_from, all_from, all_to, end,
        cache, tiles, pages, head, scale,
        page_stride, head_stride, kv_stride, token_stride, P, D, KEYS, STAGES, WINDOW,
    )  # fmt: skip
    sum_MD /= tl.where(weight_M > 0, weight_M, 1.0)[:, None]
    out_stride = tl.num_programs(1) * GROUP * D
    out += (before + token).to(tl.int64) * out_stride + head * GROUP * D
    at_M = vector_M // GROUP * out_stride + vector_M % GROUP * D
    tl.store(out + at_M[:, None] + dim_D[None, :], sum_MD.to(out.dtype.element_ty), mask=mask_MD)


def attention(q_THD: Tensor, cache: Tensor, rows: Rows, window: int | None, sinks_H: Tensor | None) -> Tensor:
    """Multiplies in the dtype of `cache`, to which queries and weights are rounded; adds up in float32.

    Each window is compiled on its own: a model has few.
    """
    tokens, q_heads, dim = q_THD.shape
    kv_heads, page_tokens, num_rows = cache.shape[1], cache.shape[3], len(rows.lens_B)
    assert {q_THD.dtype, cache.dtype} <= {torch.float32, torch.bfloat16}
    assert dim == 1 or q_THD.stride(2) == cache.stride(4) == 1
    assert rows.pages_BN.stride(1) == 1 or rows.pages_BN.shape[1] == 1
    assert window is None or window > 0
    assert sinks_H is None or (sinks_H.dtype == torch.float32 and sinks_H.stride(0) == 1)
    out_THD = q_THD.new_empty(tokens, q_heads, dim)
    if not tokens:
        return out_THD
    width = max(16, triton.next_power_of_2(dim))
    group, one_each = q_heads // kv_heads, tokens == num_rows
    shape = {"P": page_tokens, "D": dim, "GROUP": group, "DIMS": width}
    strides = *q_THD.stride()[:2], *cache.stride()[:4], rows.pages_BN.stride(0)
    of_rows = rows.cu_B1, rows.lens_B, rows.pages_BN

    spans = min(SPANS_MAX, triton.cdiv(rows.pages_BN.shape[1] * page_tokens, SPAN_TOKENS))
    if window is not None:
        spans = min(spans, triton.cdiv(window - 1, SPAN_TOKENS) + 1)
    sums = q_THD.new_empty(num_rows, q_heads, spans, dim, dtype=torch.float32)
    weights, tops = q_THD.new_empty(2, num_rows, q_heads, spans, dtype=torch.float32)
    cut = {"ONE_EACH": one_each, "SPAN": SPAN_TOKENS, "SPANS": SPANS_MAX, "WINDOW": window}
    scale = dim**-0.5 * LOG2_E.value
    tile = span_tile(group, width, cache.dtype)
    attend_span[(num_rows, kv_heads, spans)](
        q_THD, cache, _tiles(cache, tile.keys), *of_rows, sums, weights, tops, scale, *strides,
        **shape, **cut, QUERIES=tile.queries, KEYS=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    add_spans[(num_rows, q_heads)](
        sums, weights, tops, sinks_H, *of_rows[:2], out_THD, spans,
        **cut, D=dim, DIMS=width, AT_ONCE=SPANS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    if not one_each:
        tile = row_tile(width, cache.dtype)
        attend_rows[(tokens * group // tile.queries + num_rows, kv_heads)](
            q_THD, cache, _tiles(cache, tile.keys), sinks_H, *of_rows, out_THD, scale, num_rows, *strides,
            **shape, QUERIES=tile.queries, KEYS=tile.keys, STAGES=tile.stages, ROWS=ROWS_AT_ONCE,
            WINDOW=window, num_warps=tile.warps,
        )  # fmt: skip
    return out_THD


def _tiles(cache: Tensor, keys: int) -> TensorDescriptor | None:
    """The cache for the copy engine (TMA), which takes whole tiles of a page, aligned, of a power of two.

    None where it cannot, and for float32, whose products would have to take their factors from registers.
    """
    bytes_apart = [cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:4])]
    page_tokens, dim = cache.shape[3:]
    whole = page_tokens % keys == 0 and dim >= 16 and triton.next_power_of_2(dim) == dim
    if cache.dtype == torch.float32 or not whole or any(number % 16 for number in bytes_apart):
        return None
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, 1, 1, keys, dim])
