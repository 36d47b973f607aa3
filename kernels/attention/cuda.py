# pyrefly: ignore-errors[bad-argument-type, bad-keyword-argument, unbound-name, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`attention` on CUDA, and in Triton's interpreter where the tests ask for it.

A row of one token is cut at fixed places into spans of keys, to which programs attend side by side and
whose results are then added up (split-KV, as in Flash-Decoding). The tokens of a longer row are taken in
tiles, each of which goes through its keys from the first to the last (FlashAttention-2, arXiv 2307.08691).
A row of up to SHORT_TOKENS tokens, such as guesses or the tail of a prompt, has both tiles and spans, as has
a longer one that continues a long text in too few tiles for a device.
What comes out for a token depends on its own sequence, and on the number of tokens of its row, not on the
rest of the batch; with `batch_invariant` no keys are split, and it depends on its own sequence alone. A
window leaves out the spans, and the keys of a tile, that lie wholly before it; a sink is one more score.

Where values are the keys, an element is read once for both. Such latents are wide and of no power of two: the
first elements, those over, are multiplied apart from the rest, and query heads are shared among programs.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.activation.cuda import sigmoid_mul
from tidemill.kernels.attention.inner import LOG2_E, LOWEST, attend, both, put
from tidemill.kernels.attention.lists import (
    ADDED,
    LONG,
    SHORT,
    SINGLES,
    SPLIT,
    SPLIT_ADDED,
    UNBOUNDED,
    Cut,
    Lists,
    entry_of,
    lists_of,
    short_spans,
)
from tidemill.kernels.attention.spans import add_short, add_spans, attend_span, place_of
from tidemill.kernels.shared.fp8 import Fp8, Pages
from tidemill.kernels.shared.rows import Made, Rows
from tidemill.kernels.shared.tiles import has_large

SPAN_TOKENS = 256  # of one program of `attend_span`, as long as SPANS_MAX of them cover the sequence
SPANS_MAX = 64
SPANS_AT_ONCE = 16  # of one round of `add_spans`
WRAP, SMALL_BYTES = 1 << 32, 128 << 10  # of `described`
SHORT_TOKENS = 64  # of a row, at most, whose keys are split
SPANS_SHORT = 32  # of such a row, at most
RESULTS_MAX = 1 << 20  # elements of a short row's results, at most, before they are added up
TOKENS_AT_ONCE = 8  # of one program of `add_short`
SPLIT_PROGRAMS = 128  # of a longer row, at most, whose keys are split: as many as multiprocessors
SPLIT_KEYS, SPANS_SPLIT = 16_384, 4  # of its sequence, at least; and its spans


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
        if not has_large():
            return Tile(queries, 16, 8, 2)
        return Tile(queries, 16 if dtype == torch.uint8 else 32, 8, 3)
    if not has_large():
        return Tile(queries, 32, 4 if queries * dim <= 2048 else 8, 2)
    warps = 4 if queries * dim <= 8192 else 8
    if dtype == torch.uint8:  # registers hold codes beside their numbers
        return Tile(queries, 64, warps, 2) if dim <= 64 else Tile(queries, 32, warps, 3)
    return Tile(queries, 64 if dim <= 128 else 32, warps, 3)


def row_tile(dim: int, dtype: torch.dtype, *, short: bool) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 16, 8, 1)
    if dim > 256:
        if not has_large():
            return Tile(WIDE_QUERIES, 16, 8, 2)
        coded = dtype == torch.uint8
        return Tile(WIDE_QUERIES, 16 if coded and short else 32, 8, 2 if coded and not short else 3)
    if not has_large():
        return Tile(64, 64 if 64 < dim <= 128 else 32, 4 if dim <= 64 else 8, 2)
    if dim > 128 and dtype == torch.uint8:
        return Tile(64, 32, 8, 1 if short else 2)
    return Tile(64 if short and dim > 128 else 128, 64, 4 if dim <= 64 else 8, 2)


def shared_by(group: int, dim: int) -> int:
    """Into how many equal parts the query heads of a kv head are cut, each for programs of its own."""
    most = group if dim <= 256 else WIDE_QUERIES
    return next(parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= most)


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


@triton.jit
def keys_of_span(start, tokens, all_to, end, KEYS: tl.constexpr):
    """Return all_from, all_to and end of a tile of queries in a span of keys."""
    end = tl.minimum(end, start + tokens)
    return start, tl.maximum(tl.minimum(all_to, end // KEYS * KEYS), start), end


@triton.jit
def put_short(
    sums, weights, tops, sum_MD, sum_MR, weight_M, top_M, mask_M, vector_M, place, spans,
    D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Store what `add_short` adds up: a tile's results of a span, from the place of its first token on."""
    first = tl.program_id(1) * GROUP
    at_M = (place + vector_M // GROUP * spans) * (tl.num_programs(1) * GROUP) + first + vector_M % GROUP
    put(sums, at_M * D, mask_M, sum_MD, sum_MR, R, D)
    tl.store(weights + at_M, weight_M, mask=mask_M)
    tl.store(tops + at_M, top_M, mask=mask_M)


@triton.jit
def put_rows(
    out, sum_MD, sum_MR, weight_M, mask_M, vector_M, token,
    D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Store the results of a tile that has seen all keys; `token` is its first one."""
    whole_M1 = tl.where(weight_M > 0, weight_M, 1.0)[:, None]
    out_stride = tl.num_programs(1) * GROUP * D
    out += token.to(tl.int64) * out_stride + tl.program_id(1) * GROUP * D
    at_M = vector_M // GROUP * out_stride + vector_M % GROUP * D
    put(out, at_M, mask_M, sum_MD / whole_M1, sum_MR / whole_M1, R, D)


@triton.jit(do_not_specialize=["pages_stride"])
def attend_tile(
    q,  # [T, H, D]
    cache,  # [pages, kv_heads, 2, P, D]
    scales,  # as of `attend_span`
    tiles, first_tiles,  # as of `attend_span`
    sinks,  # float32 [H], or None
    entries,  # the list of tiles, and of spans if keys are cut
    cu, lens, pages, out,
    sums, weights, tops,  # as of `add_short`, or None: keys are not cut, and results go to `out`
    scale,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, BUDGET: tl.constexpr, WINDOW: tl.constexpr, ALIKE: tl.constexpr,
    FIXED: tl.constexpr, at=None,
) -> None:  # fmt: skip
    """Entry i, a tile of query vectors of one row, and kv head j of a grid (at least the entries, j). In
    `attend_rows`, entry `at`.

    The vectors of a row are its tokens' query heads of kv head j, side by side: GROUP vectors of each token.
    """
    if at is None:
        at = tl.program_id(0)
        if at >= tl.load(entries):
            return
    head = tl.program_id(1)
    row, tile = entry_of(entries, at)
    before = tl.load(cu + row)
    tokens = tl.load(cu + row + 1) - before
    length = tl.load(lens + row)
    if sums is not None:
        spans, span_tokens = short_spans(tokens, length, SPAN, SPANS, BUDGET)
        used = tl.cdiv(length, span_tokens)
        span, tile = tile % used, tile // used
    # From the tile's first token on: less for threads to keep.
    token, vector_M = tile * QUERIES // GROUP, tile * QUERIES % GROUP + tl.arange(0, QUERIES)
    left = tokens - token
    position_M = length - left + tl.minimum(vector_M // GROUP, left - 1)
    mask_M = vector_M < left * GROUP
    q += (before + token).to(tl.int64) * q_token_stride + head * GROUP * q_head_stride
    at_M = vector_M // GROUP * q_token_stride + vector_M % GROUP * q_head_stride
    q_MD, q_MR = both(q, at_M, mask_M, R, D, DIMS, FIRST)
    seen_from, all_from, all_to, end = keys_of(position_M, KEYS, WINDOW)
    weight_M, top_M = tl.zeros([QUERIES], tl.float32), tl.full([QUERIES], LOWEST, tl.float32)
    if sums is not None:
        seen_from = span * span_tokens
        all_from, all_to, end = keys_of_span(seen_from, span_tokens, all_to, end, KEYS)
    elif sinks is not None:
        sink_M = tl.load(sinks + head * GROUP + vector_M % GROUP) * LOG2_E
        weight_M, top_M = weight_M + 1.0, tl.maximum(top_M, sink_M)
    sum_MD, sum_MR, weight_M, top_M = attend(
        q_MD, q_MR, position_M, weight_M, top_M, length, seen_from, all_from, all_to, end,
        cache, scales, tiles, first_tiles, pages + row * pages_stride, head // PARTS, scale,
        page_stride, head_stride, kv_stride, token_stride, P, D, R, KEYS, STAGES, WINDOW, ALIKE, FIXED,
    )  # fmt: skip
    if sums is not None:
        first = place_of(before, row, SPANS, BUDGET) + token * spans + span
        put_short(
            sums, weights, tops, sum_MD, sum_MR, weight_M, top_M, mask_M, vector_M, first, spans,
            D, R, GROUP,
        )  # fmt: skip
    else:
        put_rows(out, sum_MD, sum_MR, weight_M, mask_M, vector_M, before + token, D, R, GROUP)


@triton.jit(do_not_specialize=["pages_stride"])
def attend_rows(
    q, cache, scales, tiles, first_tiles, sinks, entries, cu, lens, pages, out, sums, weights, tops, scale,
    q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
    P: tl.constexpr, D: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, DIMS: tl.constexpr, FIRST: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, BUDGET: tl.constexpr, WINDOW: tl.constexpr, ALIKE: tl.constexpr,
    FIXED: tl.constexpr,
) -> None:  # fmt: skip
    """`attend_tile` for a grid (any, j): a loop, which takes registers, over more entries than programs."""
    for at in range(tl.program_id(0), tl.load(entries).to(tl.int32), tl.num_programs(0)):
        attend_tile(
            q, cache, scales, tiles, first_tiles, sinks, entries, cu, lens, pages, out, sums, weights, tops,
            scale,
            q_token_stride, q_head_stride, page_stride, head_stride, kv_stride, token_stride, pages_stride,
            P, D, R, GROUP, PARTS, QUERIES, KEYS, DIMS, FIRST, STAGES, SPAN, SPANS, BUDGET, WINDOW, ALIKE,
            FIXED, at,
        )  # fmt: skip


def attention(
    q_THD: Tensor,
    cache: Pages,
    rows: Rows,
    window: int | None,
    sinks_H: Tensor | None,
    made: Made | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Multiplies in the dtype of `cache`, to which queries and weights are rounded; adds up in float32.

    Each window is compiled on its own: a model has few.
    """
    return _attention(q_THD, cache, rows, window, sinks_H, None, made, batch_invariant=batch_invariant)


def gated_attention(
    q_THD: Tensor,
    cache: Pages,
    rows: Rows,
    window: int | None,
    sinks_H: Tensor | None,
    gate_THD: Tensor,
    made: Made | None = None,
    *,
    batch_invariant: bool = False,
) -> Tensor:
    """Return the same times the gate, which takes a launch of its own where a row may be long."""
    assert cache.shape[2] == 2, "latents have no gate"
    assert gate_THD.shape == q_THD.shape
    assert gate_THD.stride(2) == 1 or q_THD.shape[2] == 1
    if batch_invariant or len(q_THD) > max(_short(q_THD, window), len(rows.lens_B)):
        out_THD = attention(q_THD, cache, rows, window, sinks_H, made, batch_invariant=batch_invariant)
        return sigmoid_mul(out_THD, gate_THD)
    return _attention(q_THD, cache, rows, window, sinks_H, gate_THD, made, batch_invariant=False).flatten(1)


def _attention(
    q_THD: Tensor,
    cache: Pages,
    rows: Rows,
    window: int | None,
    sinks_H: Tensor | None,
    gate_THD: Tensor | None,
    made: Made | None,
    *,
    batch_invariant: bool,
) -> Tensor:
    (tokens, q_heads, dim), num_rows = q_THD.shape, len(rows.lens_B)
    kv_heads, page_tokens = cache.shape[1], cache.shape[3]
    assert {q_THD.dtype, cache.dtype} <= {torch.float32, torch.bfloat16}
    numbers = _numbers(cache)
    assert dim == 1 or q_THD.stride(2) == numbers.stride(4) == 1
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
        "FIRST": max(16, triton.next_power_of_2(first)), "ALIKE": cache.shape[2] == 1, "WINDOW": window,
        "FIXED": isinstance(cache, Fp8) and cache.is_fixed,
    }  # fmt: skip
    tile = row_tile(width, numbers.dtype, short=False).queries
    splits = not (batch_invariant or window is not None or shape["ALIKE"])
    cut = Cut(
        short=0 if batch_invariant else _short(q_THD, window),
        group=group,
        tile=tile,
        short_tile=row_tile(width, numbers.dtype, short=True).queries,
        added=TOKENS_AT_ONCE,
        span=SPAN_TOKENS,
        spans=SPANS_MAX,
        spans_short=SPANS_SHORT,
        budget=_budget(q_THD),
        split=SPLIT_PROGRAMS * tile // q_heads if splits else 0,
        split_keys=SPLIT_KEYS,
        spans_split=SPANS_SPLIT,
        window=window,
    )
    lists = lists_of(rows, tokens, rows.pages_BN.shape[1] * page_tokens, cut, made)
    step = cache, rows, sinks_H, shape, cut, lists
    gate = (out_THD, gate_THD), (0, 0) if gate_THD is None else gate_THD.stride()[:2]
    if cut.short and (one_each or num_rows > 1):  # else the one row is longer
        _attend_singles(q_THD, *step, gate, one_each=one_each)
    if not (cut.short and one_each):
        if cut.short > 1 and (num_rows > 1 or tokens <= cut.short):
            _attend_several(q_THD, *step, gate, SHORT)
        if tokens > cut.short:
            _attend_several(q_THD, *step, gate, LONG)
        if len(lists.most) > SPLIT:
            _attend_several(q_THD, *step, gate, SPLIT)
    return out_THD


def _budget(q_THD: Tensor) -> int:
    """Return the results of a short row, before they are added up, at most."""
    return min(RESULTS_MAX // q_THD[0].numel(), SHORT_TOKENS * SPANS_SHORT)


def _short(q_THD: Tensor, window: int | None) -> int:
    """Return the tokens of a row, at most, whose keys are split; 1: of one token alone."""
    return 1 if window is not None else max(1, min(SHORT_TOKENS, _budget(q_THD) // 2))


Gate = tuple[tuple[Tensor, Tensor | None], tuple[int, ...]]  # where results go, the gate, its strides


def _attend_singles(
    q_THD: Tensor,
    cache: Pages,
    rows: Rows,
    sinks_H: Tensor | None,
    shape: dict[str, Any],
    cut: Cut,
    lists: Lists,
    gate: Gate,
    *,
    one_each: bool,
) -> None:
    """Attend for the rows of one token."""
    (_, q_heads, dim), num_rows = q_THD.shape, len(rows.lens_B)
    spans = lists.most[SINGLES] // num_rows
    sums = q_THD.new_empty(num_rows, q_heads, spans, dim, dtype=torch.float32)
    weights, tops = q_THD.new_empty(2, num_rows, q_heads, spans, dtype=torch.float32)
    constants = {"SPAN": cut.span, "SPANS": cut.spans}
    tile = span_tile(shape["GROUP"], shape["DIMS"], _numbers(cache).dtype)
    attend_span[lists.grid(SINGLES, cache.shape[1] * shape["PARTS"])](
        q_THD, *_memory(cache, tile.keys, shape["R"]), lists.lists_KN[SINGLES], *_ids(rows),
        sums, weights, tops, spans, dim**-0.5 * LOG2_E.value, *_strides(q_THD, cache, rows),
        **shape, **constants, QUERIES=tile.queries, KEYS=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    add_spans[(num_rows, q_heads)](
        sums, weights, tops, sinks_H, *_ids(rows)[:2], *gate[0], spans, *gate[1],
        **constants, ONE_EACH=one_each, WINDOW=shape["WINDOW"], D=dim, DIMS=triton.next_power_of_2(dim),
        AT_ONCE=SPANS_AT_ONCE, num_warps=4,
    )  # fmt: skip


def _attend_several(
    q_THD: Tensor,
    cache: Pages,
    rows: Rows,
    sinks_H: Tensor | None,
    shape: dict[str, Any],
    cut: Cut,
    lists: Lists,
    gate: Gate,
    kind: int,
) -> None:
    """Attend for the rows that are SHORT or SPLIT, whose keys are split, or LONG."""
    (tokens, q_heads, dim), num_rows = q_THD.shape, len(rows.lens_B)
    splits = kind != LONG
    spans, budget = (cut.spans_split, UNBOUNDED) if kind == SPLIT else (cut.spans_short, cut.budget)
    tile, sums = row_tile(shape["DIMS"], _numbers(cache).dtype, short=splits), (None, None, None)
    if splits:
        places = min(tokens * spans, num_rows * budget)
        weights, tops = q_THD.new_empty(2, places, q_heads, dtype=torch.float32)
        sums = q_THD.new_empty(places, q_heads, dim, dtype=torch.float32), weights, tops
    constants = {"SPAN": cut.span, "SPANS": spans, "BUDGET": budget if splits else None}
    (attend_rows if splits else attend_tile)[lists.grid(kind, cache.shape[1] * shape["PARTS"])](
        q_THD, *_memory(cache, tile.keys, shape["R"]), sinks_H, lists.lists_KN[kind], *_ids(rows),
        gate[0][0], *sums, dim**-0.5 * LOG2_E.value, *_strides(q_THD, cache, rows), **shape, **constants,
        QUERIES=tile.queries, KEYS=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if splits:
        added = SPLIT_ADDED if kind == SPLIT else ADDED
        add_short[lists.grid(added, q_heads)](
            *sums, sinks_H, lists.lists_KN[added], *_ids(rows)[:2], *gate[0], *gate[1], **constants,
            D=dim, DIMS=triton.next_power_of_2(dim), TOKENS=cut.added, num_warps=4,
        )  # fmt: skip


def _ids(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.cu_B1, rows.lens_B, rows.pages_BN


def _numbers(cache: Pages) -> Tensor:
    """Return the numbers, or their codes."""
    return cache.codes if isinstance(cache, Fp8) else cache


def _strides(q_THD: Tensor, cache: Pages, rows: Rows) -> tuple[int, ...]:
    return *q_THD.stride()[:2], *_numbers(cache).stride()[:4], rows.pages_BN.stride(0)


def described(pages: int, page_bytes: int, last_bytes: int) -> int:
    """Return the pages of a descriptor, at least `pages`: no kernel reads those that do not exist.
    `last_bytes` is the offset of the last element of a page.

    Triton 3.7 adds up the offset of the last element of all in 32 bits, and encodes a tensor as a small one
    if the sum is less than 128 KiB (`driver.c`, for drivers up to 13.1).
    """
    last = (pages - 1) * page_bytes + last_bytes
    found = last % WRAP
    if last < WRAP // 2 or SMALL_BYTES <= found < WRAP // 2:
        return pages
    return pages + -(-((SMALL_BYTES - found) % WRAP) // page_bytes)


def _memory(cache: Pages, keys: int, first: int) -> tuple[Tensor | TensorDescriptor | None, ...]:
    """The numbers or codes, the scales, and `_tiles`."""
    if not isinstance(cache, Fp8):
        return cache, None, *_tiles(cache, keys, first)
    assert cache.is_fixed or cache.is_beside
    return *cache, *_tiles(cache.codes, keys, first)


def _tiles(cache: Tensor, keys: int, first: int) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """The elements after the first ones, and these, for the copy engine (TMA): it takes whole tiles of pages,
    aligned, of powers of two.

    None where it cannot, and for float32, whose products would have to take their factors from registers.
    """
    bytes_apart = [cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:4])]
    page_tokens, dim = cache.shape[3:]
    widths = [dim - first, first] if first else [dim]
    whole = page_tokens % keys == 0 and all(n >= 16 and triton.next_power_of_2(n) == n for n in widths)
    whole = whole and has_large()  # others have no copy engine
    if cache.dtype == torch.float32 or not whole or any(number % 16 for number in bytes_apart):
        return None, None
    shape, strides = list(cache.shape), list(cache.stride())
    for at in (2, 1):  # a dimension of 1 has any stride, which the driver looks at nevertheless
        if shape[at] == 1:
            strides[at] = strides[at + 1] * shape[at + 1]
    last_bytes = sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    shape[0] = described(shape[0], bytes_apart[1], last_bytes * cache.element_size())
    tiles = [TensorDescriptor(cache, shape, strides, [1, 1, 1, keys, n]) for n in widths]
    return tiles[0], tiles[1] if first else None
