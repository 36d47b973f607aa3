# pyrefly: ignore-errors[bad-argument-type, bad-assignment, missing-argument, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`mamba2` on CUDA: rows of many tokens in chunks, short ones and short ends one token after the other.

Chunks (recurrence.py) are those of arXiv 2405.21060, section 6; `total` is the sum of -exp(a_log) dt from the
start of the chunk:

    advance, one after the other:  S <- exp(total_last) S + sum over i of
                                        exp(total_last - total_i) dt_i B_i x_i
    answer, all chunks together:   y_i = exp(total_i) C_i S + sum over j <= i of
                                         exp(total_i - total_j) (C_i . B_j) dt_j x_j
"""

import torch
import triton
import triton.language as tl

from tidemill.kernels.mamba2.heads import Heads
from tidemill.kernels.shared.recurrence import CHUNK, SHORT, between, chunk_at, cut, rounded, silu, softplus
from tidemill.kernels.shared.rows import Rows, rows_at_once
from tidemill.kernels.shared.states_inside import write_inside
from tidemill.kernels.shared.tiles import has_large

COLUMNS = 32  # of a state, kept in registers by one program; those of a head's programs share nothing
ANSWER_COLUMNS = 128


@triton.jit
def time_step(dt, bias, dt_min, dt_max):
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), dt_min), dt_max)


@triton.jit
def chunk_times(dt, dt_token, token_C, in_C, a_log, dt_bias, dt_min, dt_max):
    """(dt, g) of the tokens of a chunk, addresses being those of their head; 0 for those that it has not."""
    dt_C = tl.load(dt + token_C * dt_token, mask=in_C, other=0.0)
    dt_C = tl.where(in_C, time_step(dt_C, tl.load(dt_bias).to(tl.float32), dt_min, dt_max), 0.0)
    return dt_C, -tl.exp(tl.load(a_log).to(tl.float32)) * dt_C


@triton.jit(do_not_specialize=["kept"])
def advance(
    mixed, mixed_token, mixed_group, dt, dt_token, a_log, dt_bias, dt_min, dt_max,
    state, state_slot, state_group,
    before,  # [chunks, H, K, V]: the state before each
    cu, lens, read, writes, kept,
    HEADS: tl.constexpr,  # of a group
    K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr,  # power of two, at least K
    COLUMNS: tl.constexpr,
    INSIDE: tl.constexpr,  # a row may keep more states than its last
    ROUND: tl.constexpr,
) -> None:  # fmt: skip
    """Columns i of head j of row k, of a grid (i, j, k)."""
    head, every, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    start = tl.load(cu + row)
    n = tl.load(cu + row + 1) - start
    writes += row * kept
    chunked, slot = cut(n, writes + kept - 1, 1)
    if chunked == 0:
        return
    place_C, key_K = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column_V = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_K, in_V = key_K < K, column_V < V
    in_KV = in_K[:, None] & in_V[None, :]
    at_KV = key_K[:, None] * V + column_V[None, :]
    state += head // HEADS * state_group + head % HEADS * K * V
    source = tl.load(read + row).to(tl.int64)
    S_KV = tl.load(state + source * state_slot + at_KV, mask=in_KV & (source >= 0), other=0.0).to(tl.float32)
    before += ((start // CHUNK + row).to(tl.int64) * every + head) * K * V
    for chunk in range(tl.cdiv(chunked, CHUNK)):
        depth = tl.load(lens + row) - n + chunk * CHUNK
        tl.store(before + at_KV, S_KV, mask=in_KV)
        before += every.to(tl.int64) * K * V
        in_C = chunk * CHUNK + place_C < chunked
        token_C = (start + chunk * CHUNK + place_C).to(tl.int64)
        mixed_C = mixed + token_C * mixed_token + head // HEADS * mixed_group
        dt_C, g_C = chunk_times(
            dt + head, dt_token, token_C, in_C, a_log + head, dt_bias + head, dt_min, dt_max
        )
        total_C = tl.cumsum(g_C.to(tl.float64), 0)
        total_last = tl.sum(g_C.to(tl.float64), 0)
        left_C = dt_C * tl.exp((total_last - total_C).to(tl.float32))
        b_CK = tl.load(mixed_C[:, None] + key_K[None, :], mask=in_C[:, None] & in_K[None, :], other=0.0)
        x_C = mixed_C + 2 * K + head % HEADS * V
        x_CV = tl.load(x_C[:, None] + column_V[None, :], mask=in_C[:, None] & in_V[None, :], other=0.0)
        if INSIDE:
            first = kept - n + chunk * CHUNK
            write_inside(
                S_KV, b_CK, x_CV, dt_C, total_C, in_C, state + at_KV, state_slot, in_KV,
                writes, first, kept, depth, ROUND,
            )  # fmt: skip
        added_CV = (x_CV.to(tl.float32) * left_C[:, None]).to(x_CV.dtype)
        S_KV *= tl.exp(total_last.to(tl.float32))
        S_KV = tl.dot(tl.trans(b_CK), added_CV, S_KV, input_precision="ieee")
        S_KV = rounded(S_KV, depth + tl.minimum(CHUNK, chunked - chunk * CHUNK), ROUND)
    tl.store(state + slot * state_slot + at_KV, S_KV, mask=in_KV & (slot >= 0))


@triton.jit(do_not_specialize=["kept", "rows"])
def answer(
    mixed, mixed_token, mixed_group, dt, dt_token, a_log, dt_bias, dt_min, dt_max,
    z, z_token, z_group, skip, before, out, cu, writes, kept, rows,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least the rows
) -> None:  # fmt: skip
    """Columns i of chunk j of head k, of a grid (i, j, k)."""
    place, head, every = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    row, chunk = chunk_at(cu, rows, place, ROWS)
    start = tl.load(cu + row)
    chunked, _ = cut(tl.load(cu + row + 1) - start, writes + row * kept + kept - 1, 1)
    if chunk * CHUNK >= chunked:
        return
    place_C, key_K = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column_V = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_C, in_K, in_V = chunk * CHUNK + place_C < chunked, key_K < K, column_V < V
    in_CK, in_CV = in_C[:, None] & in_K[None, :], in_C[:, None] & in_V[None, :]
    token_C = (start + chunk * CHUNK + place_C).to(tl.int64)
    group, value = head // HEADS, head % HEADS
    mixed_C = mixed + token_C * mixed_token + group * mixed_group
    b_CK = tl.load(mixed_C[:, None] + key_K[None, :], mask=in_CK, other=0.0)
    c_CK = tl.load(mixed_C[:, None] + K + key_K[None, :], mask=in_CK, other=0.0)
    x_CV = tl.load(mixed_C[:, None] + 2 * K + value * V + column_V[None, :], mask=in_CV, other=0.0)
    dt_C, g_C = chunk_times(dt + head, dt_token, token_C, in_C, a_log + head, dt_bias + head, dt_min, dt_max)
    # The difference of two sums is small where both are large: after a token that forgot everything.
    total_C = tl.cumsum(g_C.to(tl.float64), 0)
    is_past = place_C[:, None] >= place_C[None, :]
    left_CC = tl.exp(tl.where(is_past, between(total_C, total_C), 0.0)) * dt_C[None, :]
    weight_CC = tl.where(is_past, tl.dot(c_CK, tl.trans(b_CK), input_precision="ieee") * left_CC, 0.0)
    before += (place.to(tl.int64) * every + head) * K * V
    at_KV = key_K[:, None] * V + column_V[None, :]
    S_KV = tl.load(before + at_KV, mask=in_K[:, None] & in_V[None, :], other=0.0)
    y_CV = tl.dot(c_CK, S_KV, input_precision="ieee") * tl.exp(total_C.to(tl.float32))[:, None]
    y_CV += tl.dot(weight_CC.to(x_CV.dtype), x_CV, input_precision="ieee")
    y_CV += tl.load(skip + head).to(tl.float32) * x_CV.to(tl.float32)
    z_C = z + token_C * z_token + group * z_group + value * V
    y_CV *= silu(tl.load(z_C[:, None] + column_V[None, :], mask=in_CV, other=0.0).to(tl.float32))
    tl.store(out + ((token_C * every + head) * V)[:, None] + column_V[None, :], y_CV, mask=in_CV)


@triton.jit(do_not_specialize=["kept", "alone"])
def recur(
    mixed, mixed_token, mixed_group, dt, dt_token, a_log, dt_bias, dt_min, dt_max,
    z, z_token, z_group, skip, state, state_slot, state_group, out, cu, lens, read, writes, kept,
    alone,  # 1: nothing ran in chunks
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    ROUND: tl.constexpr,  # tokens, as in the definition
) -> None:  # fmt: skip
    """Columns i of head j of row k, of a grid (i, j, k)."""
    head, every, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    start = tl.load(cu + row)
    n = tl.load(cu + row + 1) - start
    writes += row * kept
    done, slot = cut(n, writes + kept - 1, 1)
    done = tl.where(alone != 0, 0, done)
    if done >= n:
        return
    source = tl.where(done > 0, slot, tl.load(read + row).to(tl.int64))
    key_K, column_V = tl.arange(0, KEYS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_K, in_V = key_K < K, column_V < V
    in_KV = in_K[:, None] & in_V[None, :]
    group, value = head // HEADS, head % HEADS
    state += group * state_group + value * K * V + key_K[:, None] * V + column_V[None, :]
    S_KV = tl.load(state + source * state_slot, mask=in_KV & (source >= 0), other=0.0).to(tl.float32)
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    straight = tl.load(skip + head).to(tl.float32)
    length = tl.load(lens + row)
    for t in range(done, n):
        token = (start + t).to(tl.int64)
        mixed_at = mixed + token * mixed_token + group * mixed_group
        b_K = tl.load(mixed_at + key_K, mask=in_K, other=0.0).to(tl.float32)
        c_K = tl.load(mixed_at + K + key_K, mask=in_K, other=0.0).to(tl.float32)
        x_V = tl.load(mixed_at + 2 * K + value * V + column_V, mask=in_V, other=0.0).to(tl.float32)
        z_V = tl.load(z + token * z_token + group * z_group + value * V + column_V, mask=in_V, other=0.0)
        now = time_step(tl.load(dt + token * dt_token + head), bias, dt_min, dt_max)
        S_KV = S_KV * tl.exp(rate * now) + b_K[:, None] * (now * x_V)[None, :]
        y_V = (tl.sum(S_KV * c_K[:, None], 0) + straight * x_V) * silu(z_V.to(tl.float32))
        tl.store(out + (token * every + head) * V + column_V, y_V, mask=in_V)
        S_KV = rounded(S_KV.to(state.dtype.element_ty).to(tl.float32), length - (n - 1 - t), ROUND)
        column = kept - (n - t)
        if column >= 0:
            to = tl.load(writes + column).to(tl.int64)
            tl.store(state + to * state_slot, S_KV, mask=in_KV & (to >= 0))


def mamba2(
    mixed_TGC: torch.Tensor,
    z_TGRV: torch.Tensor,
    dt_TH: torch.Tensor,
    heads: Heads,
    state_SGRKV: torch.Tensor,
    rows: Rows,
    round_tokens: int = 0,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    _, groups, values, key_dim, value_dim = state_SGRKV.shape
    tokens, batch, every = len(mixed_TGC), len(rows.read_B), groups * values
    assert mixed_TGC.dtype in {torch.float32, torch.bfloat16}
    assert state_SGRKV.dtype in {torch.float32, torch.bfloat16}
    assert state_SGRKV.stride()[2:] == (key_dim * value_dim, value_dim, 1)
    assert z_TGRV.shape == (tokens, groups, values, value_dim)
    assert z_TGRV.stride()[2:] == (value_dim, 1)
    assert mixed_TGC.stride(2) == dt_TH.stride(1) == 1
    assert rows.writes_BK.is_contiguous()
    y_TGRV = mixed_TGC.new_empty(z_TGRV.shape)
    if not tokens:
        return y_TGRV
    times = (dt_TH, dt_TH.stride(0), heads.a_log_H, heads.dt_bias_H, heads.dt_min, heads.dt_max)
    inputs = (mixed_TGC, mixed_TGC.stride(0), mixed_TGC.stride(1), *times)
    gate = (z_TGRV, z_TGRV.stride(0), z_TGRV.stride(1), heads.skip_H)
    state = (state_SGRKV, state_SGRKV.stride(0), state_SGRKV.stride(1))
    writes = (rows.writes_BK, rows.writes_BK.shape[1])
    ids = (rows.cu_B1, rows.lens_B, rows.read_B, *writes)
    sizes = {"HEADS": values, "K": key_dim, "V": value_dim}
    sizes["KEYS"] = max(16, triton.next_power_of_2(key_dim))
    answered = ANSWER_COLUMNS if has_large() else COLUMNS
    few, many = (max(16, min(most, triton.next_power_of_2(value_dim))) for most in (COLUMNS, answered))
    parts = triton.cdiv(value_dim, few)
    alone = batch_invariant or tokens - batch < SHORT.value  # no row can have more
    if not alone:
        chunks = tokens // CHUNK.value + batch
        before = mixed_TGC.new_empty(chunks, every, key_dim, value_dim)
        wide = mixed_TGC.dtype == torch.float32 or sizes["KEYS"] > 128
        options = {"num_warps": 8 if wide else 4, "num_stages": 2, **sizes}
        advance[(parts, every, batch)](
            *inputs, *state, before, *ids, COLUMNS=few, INSIDE=writes[1] > 1, ROUND=round_tokens, **options
        )
        answer[(triton.cdiv(value_dim, many), chunks, every)](
            *inputs, *gate, before, y_TGRV, rows.cu_B1, *writes, batch,
            COLUMNS=many, ROWS=rows_at_once(batch), **options,
        )  # fmt: skip
    recur[(parts, every, batch)](
        *inputs, *gate, *state, y_TGRV, *ids, int(alone), COLUMNS=few, ROUND=round_tokens, **sizes
    )
    return y_TGRV
