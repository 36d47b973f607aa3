# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The search for the row of a token on CUDA."""

import triton
import triton.language as tl

ROWS_AT_ONCE = 128  # of one round


@triton.jit
def row_of(cu, rows, token, ROWS: tl.constexpr):
    """Return the row of a token: the number of rows that end at it or before."""
    row = 0
    for first in range(0, rows, ROWS):
        row_R = first + tl.arange(0, ROWS)
        end_R = tl.load(cu + 1 + row_R, mask=row_R < rows, other=0)
        row += tl.sum(((row_R < rows) & (end_R <= token)).to(tl.int32), 0)
    return row


@triton.jit
def pads(cu, lens, rows, token, ONE_EACH: tl.constexpr, ROWS: tl.constexpr):
    """Return whether a token is the padding of a batch."""
    row = token
    if not ONE_EACH:
        row = row_of(cu, rows, token, ROWS).to(tl.int64)
    return tl.load(lens + row) == 0
