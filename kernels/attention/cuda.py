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

Where values are the keys, an element is read once for both. Such latents are wide and of no power of two: the
first elements, those over, are multiplied apart from the rest, and query heads are shared among programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.attention.inner import LOG2_E, LOWEST, attend, both, put
from tidemill.kernels.shared.rows import Rows

SPAN_TOKENS = 256  # of one program of `attend_span`, as long as SPANS_MAX of them cover the sequence
SPANS_MAX = 64
SPANS_AT_ONCE = 16  # of one round of `add_spans`
ROWS_AT_ONCE = 128  # of one round of the search for a program's row


@dataclass(frozen=True, slots=True)
class Tile:
    """The tiling of one kernel: query vectors and keys per tile, warps, copies of keys in flight."""

    queries: int
    keys: int
    warps: int
    stages: int


WIDE_QUERIES = 32  # at most, of more than 256 elements: more sums than that would not fit the registers


def span_tile(group: int, dim: int, dtype: torch.dtype) -> Tile:
    queries = max(16, triton.next_power_of_2(group))
    if dtype == torch.float32:
        return Tile(queries, 16, 4, 2)
    if dim > 256:
        return Tile(queries, 32, 8, 3)
    return Tile(queries, 64 if dim <= 128 else 32, 4 if queries * dim <= 8192 else 8, 3)


def row_tile(dim: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 16, 8, 1)
    if dim > 256:
        return Tile(WIDE_QUERIES, 32, 8, 3)
    return Tile(128, 64, 4 if dim <= 64 else 8, 2)


def shared_by(group: int, dim: int) -> int:
    """Into how many equal parts the query heads of a kv head are cut, each for programs of its own."""
    most = group if dim <= 256 else WIDE_QUERIES
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


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
    tiles, first_tiles,  # the same as descriptors of tiles: after R elements, and these; or None
    cu, lens, pages,
    sums,  # float32 [B, H, spans, D]
    weights,  # float32 [B, H, spans]
    tops,  # float32 [B, H, spans]
    scale,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    ONE_EACH: tl.constexpr,  # every row has one token
    P: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr,  # elements apart from the rest
    GROUP: tl.constexpr,  # query heads of a program
    PARTS: tl.constexpr,  # programs of a kv head
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr, ALIKE: tl.constexpr,
) -> None:  # fmt: skip
    """Row i, part j % PARTS of kv head j // PARTS, span k of what the token sees, of a grid (i, j, k)."""
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
    q += token * q_token_stride + head * GROUP * q_head_stride
    q_MD, q_MR = both(q, h_M * q_head_stride, h_M < GROUP, R, D, DIMS, FIRST)
    position_M = tl.full([QUERIES], 0, tl.int32) + length - 1
    end = tl.minimum(start + span_tokens, length)
    all_from, all_to = start, start + (end - start) // KEYS * KEYS
    if WINDOW is not None:
        start = tl.maximum(start, seen_from)
        all_from = tl.minimum(tl.cdiv(start, KEYS) * KEYS, all_to)
    weight_M = tl.zeros([QUERIES], tl.float32)
    top_M = tl.full([QUERIES], LOWEST, tl.float32)
    sum_MD, sum_MR, weight_M, top_M = attend(
        q_MD.to(cache.dtype.element_ty), q_MR.to(cache.dtype.element_ty),
        position_M, weight_M, top_M, length, start, all_from, all_to, end,
        cache, tiles, first_tiles, pages + row * pages_stride,
        head // PARTS, scale, page_stride, head_stride, kv_stride, token_stride,
        P, D, R, KEYS, STAGES, WINDOW, ALIKE,
    )  # fmt: skip
    heads = tl.num_programs(1) * GROUP
    at_M = (row * heads + head * GROUP + h_M) * tl.num_programs(2) + span
    put(sums, at_M * D, h_M < GROUP, sum_MD, sum_MR, R, D)
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
    """Return seen_from, all_from, all_to and end of a tile of queries, as `attend` takes them."""
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
    tiles, first_tiles,  # as of `attend_span`
    sinks,  # float32 [H], or None
    cu, lens, pages,
    out,  # [T, H, D]
    scale, rows,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, WINDOW: tl.constexpr, ALIKE: tl.constexpr,
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
    # From the tile's first token on: less for threads to keep.
    token = first // GROUP
    vector_M = first % GROUP + tl.arange(0, QUERIES)
    left = tokens - token
    position_M = length - left + tl.minimum(vector_M // GROUP, left - 1)
    mask_M = vector_M < left * GROUP
    q += (before + token).to(tl.int64) * q_token_stride + head * GROUP * q_head_stride
    at_M = vector_M // GROUP * q_token_stride + vector_M % GROUP * q_head_stride
    q_MD, q_MR = both(q, at_M, mask_M, R, D, DIMS, FIRST)
    pages += row.to(tl.int64) * pages_stride
    seen_from, all_from, all_to, end = keys_of(position_M, KEYS, WINDOW)
    weight_M = tl.zeros([QUERIES], tl.float32)
    top_M = tl.full([QUERIES], LOWEST, tl.float32)
    if sinks is not None:
        sink_M = tl.load(sinks + head * GROUP + vector_M % GROUP) * LOG2_E
        weight_M, top_M = weight_M + 1.0, tl.maximum(top_M, sink_M)
    sum_MD, sum_MR, weight_M, _ = attend(
        q_MD.to(cache.dtype.element_ty), q_MR.to(cache.dtype.element_ty),
        position_M, weight_M, top_M, length, seen_from, all_from, all_to, end,
        cache, tiles, first_tiles, pages, head // PARTS, scale,
        page_stride, head_stride, kv_stride, token_stride, P, D, R, KEYS, STAGES, WINDOW, ALIKE,
    )  # fmt: skip
    whole_M1 = tl.where(weight_M > 0, weight_M, 1.0)[:, None]
    out_stride = tl.num_programs(1) * GROUP * D
    out += (before + token).to(tl.int64) * out_stride + head * GROUP * D
    at_M = vector_M // GROUP * out_stride + vector_M % GROUP * D
    put(out, at_M, mask_M, sum_MD / whole_M1, sum_MR / whole_M1, R, D)


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
    first, width = 0, max(16, triton.next_power_of_2(dim))
    if cache.shape[2] == 1 and dim > 16:
        width = 1 << (dim.bit_length() - 1)
        first = dim - width
    parts = shared_by(q_heads // kv_heads, width)
    group, one_each = q_heads // kv_heads // parts, tokens == num_rows
    shape = {
        "P": page_tokens, "D": dim, "R": first, "GROUP": group, "PARTS": parts, "DIMS": width,
        "FIRST": max(16, triton.next_power_of_2(first)), "ALIKE": cache.shape[2] == 1,
    }  # fmt: skip
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
    attend_span[(num_rows, kv_heads * parts, spans)](
        q_THD, cache, *_tiles(cache, tile.keys, first), *of_rows, sums, weights, tops, scale, *strides,
        **shape, **cut, QUERIES=tile.queries, KEYS=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    add_spans[(num_rows, q_heads)](
        sums, weights, tops, sinks_H, *of_rows[:2], out_THD, spans,
        **cut, D=dim, DIMS=triton.next_power_of_2(dim), AT_ONCE=SPANS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    if not one_each:
        tile = row_tile(width, cache.dtype)
        attend_rows[(tokens * group // tile.queries + num_rows, kv_heads * parts)](
            q_THD, cache, *_tiles(cache, tile.keys, first), sinks_H, *of_rows, out_THD, scale, num_rows,
            *strides, **shape, QUERIES=tile.queries, KEYS=tile.keys, STAGES=tile.stages, ROWS=ROWS_AT_ONCE,
            WINDOW=window, num_warps=tile.warps,
        )  # fmt: skip
    return out_THD


def _tiles(cache: Tensor, keys: int, first: int) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """The elements after the first ones, and these, for the copy engine (TMA): it takes whole tiles of pages,
    aligned, of powers of two.

    None where it cannot, and for float32, whose products would have to take their factors from registers.
    """
    bytes_apart = [cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:4])]
    page_tokens, dim = cache.shape[3:]
    widths = [dim - first, first] if first else [dim]
    whole = page_tokens % keys == 0 and all(n >= 16 and triton.next_power_of_2(n) == n for n in widths)
    if cache.dtype == torch.float32 or not whole or any(number % 16 for number in bytes_apart):
        return None, None
    shape, strides = list(cache.shape), list(cache.stride())
    for at in (2, 1):  # a dimension of 1 has any stride, which the driver looks at nevertheless
        if shape[at] == 1:
            strides[at] = strides[at + 1] * shape[at + 1]
    tiles = [TensorDescriptor(cache, shape, strides, [1, 1, 1, keys, n]) for n in widths]
    return tiles[0], tiles[1] if first else None
