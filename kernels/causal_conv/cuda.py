# pyrefly: ignore-errors[bad-argument-type]
# ruff: noqa: ANN001 - Triton takes annotations of kernels for its own types
"""`causal_conv` on CUDA."""

import torch
import triton
import triton.language as tl

from tidemill.kernels.shared.rows import Rows, rows_at_once

TOKENS = 32  # of one program, where a row may have more than one
CHANNELS = 128
COLUMNS = tl.constexpr(128)  # of `writes` that are searched together for windows to keep


@triton.jit
def keep(
    x, x_token, window, has_window, state, state_slot, writes, kept, n, in_C,
    WIDTH: tl.constexpr, C: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the windows after the last `kept` tokens of a row of n that have a slot. Addresses are those of
    its channels."""
    past_W = tl.arange(0, triton.next_power_of_2(WIDTH))
    in_WC = (past_W < WIDTH - 1)[:, None] & in_C[None, :] & has_window
    old_WC = tl.load(window[None, :] + past_W[:, None] * C, mask=in_WC, other=0.0).to(tl.float32)
    tl.debug_barrier()  # what is written now may be the window that other threads of this program read
    for first in range(0, kept, COLUMNS):
        column_K = first + tl.arange(0, COLUMNS)
        in_K = (column_K >= kept - n) & (column_K < kept)
        slot_K = tl.load(writes + column_K, mask=in_K, other=-1)
        for _ in range(tl.sum((slot_K >= 0).to(tl.int32))):
            column = tl.min(tl.where(slot_K >= 0, column_K, kept))
            slot = tl.max(tl.where(column_K == column, slot_K, -1)).to(tl.int64)
            slot_K = tl.where(column_K == column, -1, slot_K)
            for past in tl.static_range(WIDTH - 1):
                at = n - (kept - 1 - column) - (WIDTH - 1) + past
                new_C = tl.load(x + at.to(tl.int64) * x_token, mask=in_C & (at >= 0), other=0.0)
                old_C = tl.sum(tl.where(past_W[:, None] == at + WIDTH - 1, old_WC, 0.0), 0)
                value_C = tl.where(at >= 0, new_C.to(tl.float32), old_C)
                tl.store(state + slot * state_slot + past * C, value_C, mask=in_C)


@triton.jit(do_not_specialize=["kept", "rows"])
def convolve(
    x, x_token, x_group, weight,
    bias,  # [groups, C], or None
    state, state_slot, state_group, y, cu, read, writes, kept, rows,
    WIDTH: tl.constexpr, C: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least the rows
) -> None:  # fmt: skip
    """Tokens i, group j, channels k of a grid (i, j, k); of tokens, row b has those from cu[b] // TOKENS + b.

    The first tokens of a row read its window, so they also write the windows that it keeps: a row may read
    and write one slot.
    """
    place, group, groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_B = tl.arange(0, ROWS)
    first_B = tl.load(cu + row_B, mask=row_B < rows, other=0) // TOKENS + row_B
    row = tl.sum(((row_B < rows) & (first_B <= place)).to(tl.int32)) - 1
    start = tl.load(cu + row)
    n = tl.load(cu + row + 1) - start
    first = (place - start // TOKENS - row) * TOKENS
    if first >= n:
        return
    token_T = first + tl.arange(0, TOKENS)
    channel_C = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    in_T, in_C = token_T < n, channel_C < C
    x += start.to(tl.int64) * x_token + group * x_group + channel_C
    y += (start.to(tl.int64) * groups + group) * C + channel_C
    weight += group * C + channel_C
    state += group * state_group + channel_C
    source = tl.load(read + row).to(tl.int64)
    window = state + source * state_slot
    y_TC = tl.zeros((TOKENS, CHANNELS), tl.float32)
    if bias is not None:
        y_TC += tl.load(bias + group * C + channel_C, mask=in_C, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        at_T = token_T - (WIDTH - 1) + tap
        in_TC = (in_T & (at_T >= 0))[:, None] & in_C[None, :]
        x_TC = tl.load(x[None, :] + at_T.to(tl.int64)[:, None] * x_token, mask=in_TC, other=0.0).to(
            tl.float32
        )
        in_TC = (in_T & (at_T < 0))[:, None] & in_C[None, :] & (source >= 0)
        old_TC = tl.load(window[None, :] + (at_T + WIDTH - 1)[:, None] * C, mask=in_TC, other=0.0)
        tap_C = tl.load(weight + tap * groups * C, mask=in_C, other=0.0).to(tl.float32)
        y_TC += (x_TC + old_TC.to(tl.float32)) * tap_C[None, :]
    e_TC = tl.exp(-tl.abs(y_TC))
    y_TC *= tl.where(y_TC < 0, e_TC, 1.0) / (1 + e_TC)  # silu
    at_TC = y[None, :] + token_T.to(tl.int64)[:, None] * groups * C
    tl.store(at_TC, y_TC, mask=in_T[:, None] & in_C[None, :])
    if first == 0:
        writes += row * kept
        keep(x, x_token, window, source >= 0, state, state_slot, writes, kept, n, in_C, WIDTH, C)


def causal_conv(
    x_TGC: torch.Tensor,
    weight_WGC: torch.Tensor,
    bias_GC: torch.Tensor | None,
    state_SGWC: torch.Tensor,
    rows: Rows,
) -> torch.Tensor:
    tokens, groups, channels = x_TGC.shape
    batch = len(rows.read_B)
    assert x_TGC.stride(2) == 1
    assert weight_WGC.is_contiguous()
    assert bias_GC is None or bias_GC.is_contiguous()
    assert state_SGWC.stride()[2:] == (channels, 1)
    assert rows.writes_BK.is_contiguous()
    y_TGC = x_TGC.new_empty(tokens, groups, channels)
    if not tokens:
        return y_TGC
    block = 1 if tokens == batch else TOKENS
    part = min(CHANNELS if block > 1 else TOKENS * CHANNELS, triton.next_power_of_2(channels))
    convolve[(tokens // block + batch, groups, triton.cdiv(channels, part))](
        x_TGC, x_TGC.stride(0), x_TGC.stride(1), weight_WGC, bias_GC,
        state_SGWC, state_SGWC.stride(0), state_SGWC.stride(1), y_TGC,
        rows.cu_B1, rows.read_B, rows.writes_BK, rows.writes_BK.shape[1], batch,
        WIDTH=len(weight_WGC), C=channels,
        TOKENS=block, CHANNELS=part, ROWS=rows_at_once(batch),
    )  # fmt: skip
    return y_TGC
