# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The shared parts of recurrences on CUDA: cutting rows into chunks, sums of decays, softplus and silu.

Chunks start at the row's start, and the result of a token depends only on its row: neither the batch nor a
cut at a multiple of CHUNK changes a bit. A state that is rounded inside a chunk is rounded only where it is
kept: the chunk goes on from its own.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
SHORT = tl.constexpr(16)  # tokens that take about as long one by one as the launches of a chunk


@triton.jit
def softplus(x):
    """log(1 + e) is summed as 2 artanh(e / (2 + e)): of a small e, 1 + e would keep little."""
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    s2 = s * s
    tail = 1 / 9 + s2 * (1 / 11 + s2 * (1 / 13 + s2 * (1 / 15 + s2 * (1 / 17))))
    return tl.maximum(x, 0) + 2 * s * (1 + s2 * (1 / 3 + s2 * (1 / 5 + s2 * (1 / 7 + s2 * tail))))


@triton.jit
def silu(x):
    e = tl.exp(-tl.abs(x))
    return x * tl.where(x < 0, e, 1.0) / (1 + e)


@triton.jit
def cut(n, writes, KEPT: tl.constexpr):
    """Return how many of a row's n tokens run in chunks, and the state id where these leave their state.

    A short end runs token by token, and so does everything from the first chunk with a kept state on. These
    start from the state that the chunks leave in the first slot that the row writes, which belongs to this
    token or is overwritten later.
    """
    column_K = tl.arange(0, triton.next_power_of_2(KEPT))
    slot_K = tl.load(writes + column_K, mask=column_K < KEPT, other=-1)
    first = tl.min(tl.where(slot_K >= 0, column_K, KEPT))
    depth = n - (KEPT - 1) + first  # of the first kept state
    end = n % CHUNK
    chunked = tl.where(end <= SHORT, n - end, n)
    chunked = tl.where(depth < chunked, (depth - 1) // CHUNK * CHUNK, chunked)
    chunked = tl.where(first == KEPT, tl.where(n <= SHORT, 0, n), chunked)
    return chunked, tl.max(tl.where(column_K == first, slot_K, -1)).to(tl.int64)


@triton.jit
def rounded(S_KV, depth, ROUND: tl.constexpr):
    """The state after `depth` tokens of its sequence: in bfloat16 at multiples of ROUND; 0: nowhere."""
    if ROUND:
        S_KV = tl.where(depth % ROUND == 0, S_KV.to(tl.bfloat16).to(tl.float32), S_KV)
    return S_KV


@triton.jit
def chunk_at(cu, rows, place, ROWS: tl.constexpr):
    """(row, chunk of that row) of a place: row b has those from cu[b] // CHUNK + b, all it can need."""
    row_B = tl.arange(0, ROWS)
    first_B = tl.load(cu + row_B, mask=row_B < rows, other=0) // CHUNK + row_B
    row = tl.sum(((row_B < rows) & (first_B <= place)).to(tl.int32)) - 1
    return row, place - tl.load(cu + row) // CHUNK - row


@triton.jit
def between(later, earlier):
    """later - earlier of float64 sums, with float32 arithmetic, to float32 precision of the difference."""
    later_high, earlier_high = later.to(tl.float32), earlier.to(tl.float32)
    later_low = (later - later_high.to(tl.float64)).to(tl.float32)
    earlier_low = (earlier - earlier_high.to(tl.float64)).to(tl.float32)
    high = later_high[:, None] - earlier_high[None, :]
    return high + (later_low[:, None] - earlier_low[None, :])
