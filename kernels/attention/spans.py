# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The kernels of `attention` on CUDA that cut a sequence into spans of keys and add up their results."""

import triton
import triton.language as tl

from tidemill.kernels.activation.cuda import sigmoid
from tidemill.kernels.attention.inner import LOG2_E, LOWEST, attend, both, put
from tidemill.kernels.attention.lists import entry_of, short_spans, spans_of


@triton.jit(do_not_specialize=["spans", "pages_stride"])
def attend_span(
    q,  # [T, H, D]
    cache,  # [pages, kv_heads, 2, P, D]
    scales,  # of codes: fixed ones, or by the strides of `cache`, side by side in a page; or None
    tiles, first_tiles,  # the same as descriptors of tiles: after R elements, and these; or None
    entries,  # the list of spans
    cu, lens, pages,
    sums,  # float32 [B, H, spans, D]
    weights,  # float32 [B, H, spans]
    tops,  # float32 [B, H, spans]
    spans, scale,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    P: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr,  # elements apart from the rest
    GROUP: tl.constexpr,  # query heads of a program
    PARTS: tl.constexpr,  # programs of a kv head
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr, ALIKE: tl.constexpr,
    FIXED: tl.constexpr,
) -> None:  # fmt: skip
    """Some spans of what rows of one token see; part j % PARTS of kv head j // PARTS of a grid (any, j)."""
    head = tl.program_id(1)
    h_M = tl.arange(0, QUERIES)
    for at in range(tl.program_id(0), tl.load(entries).to(tl.int32), tl.num_programs(0)):
        row, span = entry_of(entries, at)
        length = tl.load(lens + row)
        seen_from, span_tokens, first_span = spans_of(length, SPAN, SPANS, WINDOW)
        start = (first_span + span) * span_tokens
        own = q + tl.load(cu + row).to(tl.int64) * q_token_stride + head * GROUP * q_head_stride
        q_MD, q_MR = both(own, h_M * q_head_stride, h_M < GROUP, R, D, DIMS, FIRST)
        position_M = tl.full([QUERIES], 0, tl.int32) + length - 1
        end = tl.minimum(start + span_tokens, length)
        all_from, all_to = start, start + (end - start) // KEYS * KEYS
        if WINDOW is not None:
            start = tl.maximum(start, seen_from)
            all_from = tl.minimum(tl.cdiv(start, KEYS) * KEYS, all_to)
        weight_M = tl.zeros([QUERIES], tl.float32)
        top_M = tl.full([QUERIES], LOWEST, tl.float32)
        sum_MD, sum_MR, weight_M, top_M = attend(
            q_MD, q_MR, position_M, weight_M, top_M, length, start, all_from, all_to, end,
            cache, scales, tiles, first_tiles, pages + row * pages_stride,
            head // PARTS, scale, page_stride, head_stride, kv_stride, token_stride,
            P, D, R, KEYS, STAGES, WINDOW, ALIKE, FIXED,
        )  # fmt: skip
        heads = tl.num_programs(1) * GROUP
        at_M = (row * heads + head * GROUP + h_M) * spans + span
        put(sums, at_M * D, h_M < GROUP, sum_MD, sum_MR, R, D)
        tl.store(weights + at_M, weight_M, mask=h_M < GROUP)
        tl.store(tops + at_M, top_M, mask=h_M < GROUP)


@triton.jit(do_not_specialize=["spans"])
def add_spans(
    sums, weights, tops,
    sinks,  # float32 [H], or None
    cu, lens,
    out,  # [T, H, D]
    gate,  # [T, H, D], or None
    spans, gate_token_stride, gate_head_stride,
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
    if gate is not None:
        gate += token * gate_token_stride + tl.program_id(1) * gate_head_stride
        sum_D = sum_D.to(out.dtype.element_ty).to(tl.float32)
        sum_D *= sigmoid(tl.load(gate + dim_D, mask=dim_D < D, other=0.0).to(tl.float32))
    at_D = (token * tl.num_programs(1) + tl.program_id(1)) * D + dim_D
    tl.store(out + at_D, sum_D.to(out.dtype.element_ty), mask=dim_D < D)


@triton.jit
def place_of(before, row, SPANS: tl.constexpr, BUDGET: tl.constexpr):
    """Return the place of the first span of a short row's first token, which is the token `before` of all.
    The places of rows, of which each needs at most SPANS for each of its tokens, are apart."""
    return tl.minimum(before.to(tl.int64) * SPANS, row * BUDGET)


@triton.jit
def add_short(
    sums,  # float32 [places, H, D]
    weights, tops,  # float32 [places, H]
    sinks,  # float32 [H], or None
    entries,  # the list of tiles of TOKENS tokens
    cu, lens,
    out,  # [T, H, D]
    gate,  # [T, H, D], or None
    gate_token_stride, gate_head_stride,
    D: tl.constexpr, DIMS: tl.constexpr, TOKENS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, BUDGET: tl.constexpr,
) -> None:  # fmt: skip
    """Some tiles of tokens of short rows, and query head j of a grid (any, j)."""
    head, heads = tl.program_id(1), tl.num_programs(1)
    for at in range(tl.program_id(0), tl.load(entries).to(tl.int32), tl.num_programs(0)):
        row, tile = entry_of(entries, at)
        before = tl.load(cu + row)
        tokens = tl.load(cu + row + 1) - before
        length = tl.load(lens + row)
        spans, span_tokens = short_spans(tokens, length, SPAN, SPANS, BUDGET)
        place = place_of(before, row, SPANS, BUDGET)
        token_T, dim_D = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, DIMS)
        in_T = token_T < tokens
        in_TD = in_T[:, None] & (dim_D < D)[None, :]
        top_T, weight_T = tl.full([TOKENS], LOWEST, tl.float32), tl.zeros([TOKENS], tl.float32)
        if sinks is not None:
            top_T = tl.maximum(top_T, tl.load(sinks + head) * LOG2_E)
            weight_T += 1.0
        sum_TD = tl.zeros([TOKENS, DIMS], tl.float32)
        for span in range(tl.cdiv(length, span_tokens)):
            at_T = (place + token_T * spans + span) * heads + head
            new_top_T = tl.maximum(top_T, tl.load(tops + at_T, mask=in_T, other=LOWEST))
            old_T, new_T = (
                tl.exp2(top_T - new_top_T),
                tl.exp2(tl.load(tops + at_T, mask=in_T, other=LOWEST) - new_top_T),
            )
            weight_T = weight_T * old_T + tl.load(weights + at_T, mask=in_T, other=0.0) * new_T
            own_TD = tl.load(sums + at_T[:, None] * D + dim_D[None, :], mask=in_TD, other=0.0)
            sum_TD = sum_TD * old_T[:, None] + own_TD * new_T[:, None]
            top_T = new_top_T
        sum_TD /= tl.where(weight_T > 0, weight_T, 1.0)[:, None]
        at_T = (before + token_T).to(tl.int64)
        if gate is not None:
            gate_T = gate + at_T * gate_token_stride + head * gate_head_stride
            sum_TD = sum_TD.to(out.dtype.element_ty).to(tl.float32)
            sum_TD *= sigmoid(tl.load(gate_T[:, None] + dim_D[None, :], mask=in_TD, other=0.0).to(tl.float32))
        at_TD = ((at_T * heads + head) * D)[:, None] + dim_D[None, :]
        tl.store(out + at_TD, sum_TD.to(out.dtype.element_ty), mask=in_TD)
