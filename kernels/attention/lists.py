# pyrefly: ignore-errors[bad-argument-type, missing-attribute, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""Lists of what there is to do in a step for the programs of `attention` on CUDA.

A CUDA graph has the grid of its longest sequences, where nearly all combinations of rows, tiles and spans are
empty. So one kernel lists the others, once for all layers of a step. The programs of a launch, a few for each
multiprocessor, go through its list in turn. Results have places of their own, so no bit depends on which
program computes them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.kernels.shared.row_of import ROWS_AT_ONCE
from tidemill.kernels.shared.rows import Made, Rows

PROGRAMS = 1056  # of one launch, at most: eight for each multiprocessor of an H200
ENTRIES_AT_ONCE = 128  # of one round of `list_entries`
ALIGNED = 2  # numbers: kernels are compiled once for addresses that are multiples of 16 bytes

SINGLES, SHORT, ADDED, LONG, SPLIT, SPLIT_ADDED = range(6)
"""The lists: spans of rows of one token; tiles and spans of short rows, and tiles of their tokens to add up;
tiles of longer rows; the same as for short rows of longer ones after a long text."""

UNBOUNDED = 1 << 30  # a budget


class Cut(NamedTuple):
    """The constants by which rows are cut into entries.

    short       tokens of a row, at most, whose keys are split; 0: those of no row
    group       query vectors of a token in one program, of which a tile has `tile`, one of a short row
                `short_tile`
    added       tokens of a program that adds up spans
    span        tokens of a span, as long as a row of one token has at most `spans`, and a short one, of
                `budget` results at most, has `spans_short`
    split       tokens of a longer row, at most, whose keys are split into `spans_split` if it is one of a
                sequence of at least `split_keys`: its tiles alone would leave most of a device idle
    """

    short: int
    group: int
    tile: int
    short_tile: int
    added: int
    span: int
    spans: int
    spans_short: int
    budget: int
    split: int
    split_keys: int
    spans_split: int
    window: int | None


@triton.jit
def spans_of(length, SPAN: tl.constexpr, SPANS: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that a sequence's last token sees, the tokens of a span, and the span of that key.

    Spans lie at multiples of their tokens, and the keys that the token sees are in SPANS of them at most.
    """
    seen_from = length * 0
    seen, spans = length, SPANS
    if WINDOW is not None:
        seen_from = tl.maximum(length - WINDOW, 0)
        # A window may begin and end in the middle of a span.
        seen, spans = tl.minimum(length, WINDOW), SPANS - 1
    span_tokens = tl.maximum(SPAN * tl.cdiv(seen, SPAN * spans), 1)
    return seen_from, span_tokens, seen_from // span_tokens


@triton.jit
def short_spans(tokens, length, SPAN: tl.constexpr, SPANS: tl.constexpr, BUDGET: tl.constexpr):
    """Return the spans of a short row and the tokens of each: the more tokens, the fewer spans, since a row
    has no more than BUDGET results."""
    spans = tl.minimum(BUDGET // tl.maximum(tokens, 1), SPANS)
    return spans, tl.maximum(SPAN * tl.cdiv(length, SPAN * tl.maximum(spans, 1)), 1)


@triton.jit
def entries_of(
    kind, tokens, length,
    SHORT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SHORT_TILE: tl.constexpr,
    ADDED: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, SPANS_SHORT: tl.constexpr,
    BUDGET: tl.constexpr, SPLIT: tl.constexpr, SPLIT_KEYS: tl.constexpr, SPANS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Return the entries of rows in a list."""
    _, span_tokens, first_span = spans_of(length, SPAN, SPANS, WINDOW)
    _, short_tokens = short_spans(tokens, length, SPAN, SPANS_SHORT, BUDGET)
    is_short = (tokens > 1) & (tokens <= SHORT)
    singles = tl.where((tokens == 1) & (SHORT > 0), tl.cdiv(length, span_tokens) - first_span, 0)
    short = tl.where(is_short, tl.cdiv(tokens * GROUP, SHORT_TILE) * tl.cdiv(length, short_tokens), 0)
    added = tl.cdiv(tokens, ADDED)
    is_long = tokens > SHORT
    is_split = is_long & (tokens <= SPLIT) & (length >= SPLIT_KEYS)
    long = tl.where(is_split, 0, tl.where(is_long, tl.cdiv(tokens * GROUP, TILE), 0))
    spans = tl.cdiv(length, tl.maximum(SPAN * tl.cdiv(length, SPAN * SPANS_SPLIT), 1))
    split = tl.where(is_split, tl.cdiv(tokens * GROUP, SHORT_TILE) * spans, 0)
    found = tl.where(kind == 0, singles, tl.where(kind == 1, short, tl.where(is_short, added, 0)))
    found = tl.where(kind == 3, long, tl.where(kind == 4, split, found))
    return tl.where(kind == 5, tl.where(is_split, added, 0), found)


@triton.jit(do_not_specialize=["rows", "stride"])
def list_entries(
    cu, lens,
    lists,  # int64 [kinds, stride]: the number of entries, then of each its row << 32 | its number there
    rows, stride,
    SHORT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SHORT_TILE: tl.constexpr,
    ADDED: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, SPANS_SHORT: tl.constexpr,
    BUDGET: tl.constexpr, SPLIT: tl.constexpr, SPLIT_KEYS: tl.constexpr, SPANS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Row i in list j of a grid (i, j). The last entry is listed first: later tokens have more keys."""
    row, kind = tl.program_id(0), tl.program_id(1)
    after, own, every = 0, 0, 0
    for first in range(0, rows, ROWS):
        row_R = first + tl.arange(0, ROWS)
        is_row_R = row_R < rows
        start_R = tl.load(cu + row_R, mask=is_row_R, other=0)
        tokens_R = tl.load(cu + 1 + row_R, mask=is_row_R, other=0) - start_R
        length_R = tl.load(lens + row_R, mask=is_row_R, other=0)
        entries_R = entries_of(
            kind, tokens_R, length_R,
            SHORT, GROUP, TILE, SHORT_TILE, ADDED, SPAN, SPANS, SPANS_SHORT, BUDGET,
            SPLIT, SPLIT_KEYS, SPANS_SPLIT, WINDOW,
        )  # fmt: skip
        every += tl.sum(entries_R, 0)
        own += tl.sum(tl.where(row_R == row, entries_R, 0), 0)
        after += tl.sum(tl.where(row_R > row, entries_R, 0), 0)
    lists += kind.to(tl.int64) * stride
    tl.store(lists, every.to(tl.int64), mask=row == 0)
    for first in range(0, own, AT_ONCE):
        at_N = first + tl.arange(0, AT_ONCE)
        entry_N = (row.to(tl.int64) << 32) | (own - 1 - at_N).to(tl.int64)
        tl.store(lists + 1 + after + at_N, entry_N, mask=at_N < own)


@triton.jit
def entry_of(entries, at):
    """Return the row of an entry of a list, int64, and its number in the row."""
    found = tl.load(entries + 1 + at)
    return found >> 32, (found & 0xFFFFFFFF).to(tl.int32)


class Lists(NamedTuple):
    """Lists of a step, int64 [kinds, 1 + entries at most], and the entries that each may have."""

    lists_KN: Tensor
    most: tuple[int, ...]

    def grid(self, kind: int, heads: int) -> tuple[int, int]:
        """Return programs by head: of long rows, whose keys are not cut, one for each entry."""
        most = self.most[kind]
        return most if kind == LONG else min(most, -(-PROGRAMS // heads)), heads


def lists_of(rows: Rows, tokens: int, table_tokens: int, cut: Cut, made: Made | None) -> Lists:
    """Return the lists of a step for tables of `table_tokens`; `made` keeps them."""
    num_rows = len(rows.lens_B)
    spans = triton.cdiv(table_tokens, cut.span)
    singles = min(cut.spans, spans)
    if cut.window is not None:
        singles = min(singles, triton.cdiv(cut.window - 1, cut.span) + 1)
    most = [num_rows * singles]
    if tokens != num_rows or not cut.short:

        def tiles(least: int, longest: int, vectors: int, size: int) -> int:
            """Return tiles for every way in which tokens could be in rows of these numbers."""
            in_rows = min(num_rows, tokens // least)
            return min(
                tokens * vectors // size + in_rows, in_rows * -(-min(longest, tokens) * vectors // size)
            )

        short = tiles(2, cut.short, cut.group, cut.short_tile) * min(cut.spans_short, spans)
        long = tiles(cut.short + 1, tokens, cut.group, cut.tile)
        most += [short, tiles(2, cut.short, 1, cut.added), long]
        least = cut.short + 1
        if cut.split >= least <= tokens and table_tokens >= cut.split_keys:
            split = tiles(least, cut.split, cut.group, cut.short_tile) * min(cut.spans_split, spans)
            most += [split, tiles(least, cut.split, 1, cut.added)]
    key = cut, tuple(most)
    made = {} if made is None else made
    if key not in made:
        size = -(-(1 + max(most)) // ALIGNED) * ALIGNED
        made[key] = lists_KN = rows.lens_B.new_empty(len(most), size, dtype=torch.int64)
        list_entries[(num_rows, len(most))](
            rows.cu_B1, rows.lens_B, lists_KN, num_rows, size, *cut, ROWS_AT_ONCE, ENTRIES_AT_ONCE,
            num_warps=4,
        )  # fmt: skip
    return Lists(made[key], tuple(most))
