# pyrefly: ignore-errors[bad-argument-type, bad-assignment, missing-argument, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`gated_delta` on CUDA: rows of many tokens in chunks, short ones and short ends one token after the
other.

Chunks (recurrence.py) are those of arXiv 2412.06464, section 3.3, with keys and queries as they are in
memory
and their lengths in the factors (`unit`, left out here); `total` is the sum of g from the start of the
chunk:

    prepare, all chunks together:  L[i, j] = beta_i (k_i . k_j) exp(total_i - total_j) for j < i
                                   A = inverse(1 + L),  w = A (beta exp(total) k),  u = A (beta v)
    advance, one after the other:  u <- u - w S
                                   S <- exp(total_last) S + sum over i of exp(total_last - total_i) k_i u_i
    answer, all chunks together:   o_i = exp(total_i) q_i S + sum over j <= i of
                                         exp(total_i - total_j) (q_i . k_j) u_j
"""

import torch
import triton
import triton.language as tl

from tidemill.kernels.shared.recurrence import CHUNK, SHORT, between, chunk_at, cut, rounded, softplus
from tidemill.kernels.shared.rows import Rows, rows_at_once
from tidemill.kernels.shared.states_inside import write_inside
from tidemill.kernels.shared.tiles import has_large

BLOCK = tl.constexpr(16)  # of the inverse: substituted row by row; a chunk has four
COLUMNS = 32  # of a state, kept in registers by one program; those of a head's programs share nothing
ANSWER_COLUMNS = 128
EPSILON = tl.constexpr(1e-6)


@triton.jit
def gate(b, a, a_log, dt_bias):
    """(beta, g)."""
    e = tl.exp(-tl.abs(b))
    return tl.where(b < 0, e, 1.0) / (1 + e), -tl.exp(a_log) * softplus(a + dt_bias)


@triton.jit
def blocks(L_CC, OFFSET: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """[COUNT, SIZE, SIZE]: of each row of blocks, that OFFSET blocks left of the diagonal, or 0."""
    row_N, column_N = tl.arange(0, COUNT), tl.arange(0, COUNT)
    chosen = row_N[:, None, None, None] == column_N[None, None, :, None] + OFFSET
    return tl.sum(tl.where(chosen, tl.reshape(L_CC, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)


@triton.jit
def merge(A_NSS, L_CC, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Inverses of diagonal blocks, from those of blocks half as large: COUNT of SIZE."""
    half = tl.arange(0, 2)
    pairs = tl.reshape(A_NSS, (COUNT // 2, 2, SIZE, SIZE))
    is_second = half[None, :, None, None] == 1
    first = tl.sum(tl.where(is_second, 0.0, pairs), 1)
    second = tl.sum(tl.where(is_second, pairs, 0.0), 1)
    below = tl.reshape(blocks(L_CC, 1, COUNT, SIZE), (COUNT // 2, 2, SIZE, SIZE))
    below = tl.sum(tl.where(is_second, below, 0.0), 1)
    below = tl.dot(tl.dot(second, below, input_precision="ieee"), first, input_precision="ieee")
    row, column = half[None, :, None, None, None], half[None, None, None, :, None]
    whole = tl.where(row > column, -below[:, None, :, None, :], 0.0)
    whole = tl.where(row == column, pairs[:, :, :, None, :], whole)
    return tl.reshape(whole, (COUNT // 2, 2 * SIZE, 2 * SIZE))


@triton.jit
def diagonal_inverses(upper_CC):
    """Return the inverses of the diagonal blocks of 1 + L, from the transpose of L, which is strictly lower
    triangular."""
    upper = blocks(upper_CC, 0, CHUNK // BLOCK, BLOCK)
    place = tl.arange(0, BLOCK)
    A = tl.where(place[None, :, None] == place[None, None, :], 1.0, tl.zeros_like(upper))
    for i in range(1, BLOCK):
        row = tl.sum(tl.where(place[None, None, :] == i, upper, 0.0), 2)
        change = tl.sum(row[:, :, None] * A, 1)
        A = tl.where(place[None, :, None] == i, A - change[:, None, :], A)
    return A


@triton.jit(do_not_specialize=["kept", "tokens", "rows"])
def prepare(
    mixed, mixed_token, mixed_group, gates, gates_token, a_log, dt_bias,
    total,  # float64 [H, T], of a chunk
    unit,  # float32 [H, T]
    w,  # [T, H, K]
    u,  # [T, H, V]
    cu, writes, kept, tokens, rows,
    HEADS: tl.constexpr,  # of a group
    K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr,  # power of two, at least K
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least the rows
) -> None:  # fmt: skip
    """Chunk i, value head j of a grid (i, j)."""
    head, every = tl.program_id(1), tl.num_programs(1)
    row, chunk = chunk_at(cu, rows, tl.program_id(0), ROWS)
    start = tl.load(cu + row)
    chunked, _ = cut(tl.load(cu + row + 1) - start, writes + row * kept + kept - 1, 1)
    if chunk * CHUNK >= chunked:
        return
    place_C, key_K, column_V = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.arange(0, COLUMNS)
    in_C, in_K = chunk * CHUNK + place_C < chunked, key_K < K
    in_CK = in_C[:, None] & in_K[None, :]
    token_C = (start + chunk * CHUNK + place_C).to(tl.int64)
    group, value = head // HEADS, head % HEADS
    mixed_C = mixed + token_C * mixed_token + group * mixed_group
    k_CK = tl.load(mixed_C[:, None] + K + key_K[None, :], mask=in_CK, other=0.0)
    unit_C = tl.rsqrt(tl.sum(k_CK.to(tl.float32) * k_CK.to(tl.float32), 1) + EPSILON)
    gate_C = gates + token_C * gates_token + group * 2 * HEADS + value
    beta_C, g_C = gate(
        tl.load(gate_C, mask=in_C, other=0.0).to(tl.float32),
        tl.load(gate_C + HEADS, mask=in_C, other=0.0).to(tl.float32),
        tl.load(a_log + head).to(tl.float32),
        tl.load(dt_bias + head).to(tl.float32),
    )
    # The difference of two sums is small where both are large: after a token that forgot everything.
    total_C = tl.cumsum(tl.where(in_C, g_C, 0.0).to(tl.float64), 0)
    tl.store(total + head * tokens + token_C, total_C, mask=in_C)
    tl.store(unit + head * tokens + token_C, unit_C, mask=in_C)
    keys_CC = tl.dot(k_CK, tl.trans(k_CK), input_precision="ieee") * unit_C[:, None] * unit_C[None, :]
    between_CC = between(total_C, total_C)
    is_lower, is_upper = place_C[:, None] > place_C[None, :], place_C[:, None] < place_C[None, :]
    upper_CC = tl.exp(tl.where(is_upper, -between_CC, 0.0)) * keys_CC * beta_C[None, :]
    A = diagonal_inverses(tl.where(is_upper, upper_CC, 0.0))
    L_CC = tl.exp(tl.where(is_lower, between_CC, 0.0)) * keys_CC * beta_C[:, None]
    L_CC = tl.where(is_lower, L_CC, 0.0)
    A = merge(A, L_CC, CHUNK // BLOCK, BLOCK)
    A_CC = tl.reshape(merge(A, L_CC, CHUNK // BLOCK // 2, 2 * BLOCK), (CHUNK, CHUNK))
    old_C = beta_C * unit_C * tl.exp(total_C.to(tl.float32))
    w_CK = tl.dot((A_CC * old_C[None, :]).to(k_CK.dtype), k_CK, input_precision="ieee")
    w_C = w + (token_C * every + head) * K
    tl.store(w_C[:, None] + key_K[None, :], w_CK, mask=in_CK)
    new_CC = (A_CC * beta_C[None, :]).to(k_CK.dtype)
    u_C = u + (token_C * every + head) * V
    mixed_C += 2 * K + value * V
    for first in range(0, V, COLUMNS):
        in_CV = in_C[:, None] & (first + column_V < V)[None, :]
        v_CV = tl.load(mixed_C[:, None] + first + column_V[None, :], mask=in_CV, other=0.0)
        u_CV = tl.dot(new_CC, v_CV, input_precision="ieee")
        tl.store(u_C[:, None] + first + column_V[None, :], u_CV, mask=in_CV)


@triton.jit(do_not_specialize=["kept", "tokens"])
def advance(
    mixed, mixed_token, mixed_group, total, unit, w, u, state, state_slot, state_group,
    before,  # [chunks, H, K, V]: the state before each
    cu, lens, read, writes, kept, tokens,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    INSIDE: tl.constexpr,  # a row may keep more states than its last
    ROUND: tl.constexpr,
) -> None:  # fmt: skip
    """Columns i of value head j of row k, of a grid (i, j, k)."""
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
        old_KV = S_KV.to(before.dtype.element_ty)
        tl.store(before + at_KV, old_KV, mask=in_KV)
        before += every.to(tl.int64) * K * V
        in_C = chunk * CHUNK + place_C < chunked
        in_CK, in_CV = in_C[:, None] & in_K[None, :], in_C[:, None] & in_V[None, :]
        token_C = (start + chunk * CHUNK + place_C).to(tl.int64)
        w_C, u_C = w + (token_C * every + head) * K, u + (token_C * every + head) * V
        mixed_C = mixed + token_C * mixed_token + head // HEADS * mixed_group + K
        w_CK = tl.load(w_C[:, None] + key_K[None, :], mask=in_CK, other=0.0)
        k_CK = tl.load(mixed_C[:, None] + key_K[None, :], mask=in_CK, other=0.0)
        u_CV = tl.load(u_C[:, None] + column_V[None, :], mask=in_CV, other=0.0).to(tl.float32)
        u_CV -= tl.dot(w_CK, old_KV, input_precision="ieee")
        tl.store(u_C[:, None] + column_V[None, :], u_CV, mask=in_CV)
        total_C = tl.load(total + head * tokens + token_C, mask=in_C, other=0.0)
        unit_C = tl.load(unit + head * tokens + token_C, mask=in_C, other=0.0)
        last = start + tl.minimum((chunk + 1) * CHUNK, chunked) - 1
        total_last = tl.load(total + head * tokens + last)
        left_C = unit_C * tl.exp((total_last - total_C).to(tl.float32))
        if INSIDE:
            first = kept - n + chunk * CHUNK
            write_inside(
                S_KV, k_CK, u_CV, unit_C, total_C, in_C, state + at_KV, state_slot, in_KV,
                writes, first, kept, depth, ROUND,
            )  # fmt: skip
        S_KV *= tl.exp(total_last.to(tl.float32))
        added_CV = (u_CV * left_C[:, None]).to(k_CK.dtype)
        S_KV = tl.dot(tl.trans(k_CK), added_CV, S_KV, input_precision="ieee")
        S_KV = rounded(S_KV, depth + tl.minimum(CHUNK, chunked - chunk * CHUNK), ROUND)
    tl.store(state + slot * state_slot + at_KV, S_KV, mask=in_KV & (slot >= 0))


@triton.jit(do_not_specialize=["kept", "tokens", "rows"])
def answer(
    mixed, mixed_token, mixed_group, total, unit, u, before, out, cu, writes, kept, tokens, rows,
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Columns i of chunk j of value head k, of a grid (i, j, k)."""
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
    mixed_C = mixed + token_C * mixed_token + head // HEADS * mixed_group
    q_CK = tl.load(mixed_C[:, None] + key_K[None, :], mask=in_CK, other=0.0)
    k_CK = tl.load(mixed_C[:, None] + K + key_K[None, :], mask=in_CK, other=0.0)
    total_C = tl.load(total + head * tokens + token_C, mask=in_C, other=0.0)
    unit_C = tl.load(unit + head * tokens + token_C, mask=in_C, other=0.0)
    is_past = place_C[:, None] >= place_C[None, :]
    # Of a place beyond the last chunk's tokens, whose sum counts as 0, the difference has any size.
    is_past &= in_C[:, None]
    left_CC = tl.exp(tl.where(is_past, between(total_C, total_C), 0.0)) * unit_C[None, :]
    weight_CC = tl.where(is_past, tl.dot(q_CK, tl.trans(k_CK), input_precision="ieee") * left_CC, 0.0)
    before += (place.to(tl.int64) * every + head) * K * V
    at_KV = key_K[:, None] * V + column_V[None, :]
    S_KV = tl.load(before + at_KV, mask=in_K[:, None] & in_V[None, :], other=0.0)
    o_CV = tl.dot(q_CK, S_KV, input_precision="ieee") * tl.exp(total_C.to(tl.float32))[:, None]
    own_C = (token_C * every + head) * V
    u_CV = tl.load(u + own_C[:, None] + column_V[None, :], mask=in_CV, other=0.0)
    o_CV += tl.dot(weight_CC.to(u_CV.dtype), u_CV, input_precision="ieee")
    length_C = tl.sum(q_CK.to(tl.float32) * q_CK.to(tl.float32), 1)
    o_CV *= (tl.rsqrt(length_C + EPSILON) * K**-0.5)[:, None]
    tl.store(out + own_C[:, None] + column_V[None, :], o_CV, mask=in_CV)


@triton.jit(do_not_specialize=["kept", "alone"])
def recur(
    mixed, mixed_token, mixed_group, gates, gates_token, a_log, dt_bias, state, state_slot, state_group,
    out, cu, lens, read, writes, kept,
    alone,  # 1: nothing ran in chunks
    HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr, COLUMNS: tl.constexpr,
    ROUND: tl.constexpr,  # tokens, as in the definition
) -> None:  # fmt: skip
    """Columns i of value head j of row k, of a grid (i, j, k)."""
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
    log_rate, bias = tl.load(a_log + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    length = tl.load(lens + row)
    for t in range(done, n):
        token = (start + t).to(tl.int64)
        mixed_at = mixed + token * mixed_token + group * mixed_group
        q_K = tl.load(mixed_at + key_K, mask=in_K, other=0.0).to(tl.float32)
        k_K = tl.load(mixed_at + K + key_K, mask=in_K, other=0.0).to(tl.float32)
        v_V = tl.load(mixed_at + 2 * K + value * V + column_V, mask=in_V, other=0.0).to(tl.float32)
        gate_at = gates + token * gates_token + group * 2 * HEADS + value
        b, a = tl.load(gate_at).to(tl.float32), tl.load(gate_at + HEADS).to(tl.float32)
        beta, g = gate(b, a, log_rate, bias)
        q_K *= tl.rsqrt(tl.sum(q_K * q_K) + EPSILON) * K**-0.5
        k_K *= tl.rsqrt(tl.sum(k_K * k_K) + EPSILON)
        S_KV *= tl.exp(g)
        # Both sums over the state as it was: neither waits for the other.
        known_V, asked_V = tl.sum(S_KV * k_K[:, None], 0), tl.sum(S_KV * q_K[:, None], 0)
        change_V = beta * (v_V - known_V)
        S_KV += k_K[:, None] * change_V[None, :]
        o_V = asked_V + tl.sum(q_K * k_K) * change_V
        tl.store(out + (token * every + head) * V + column_V, o_V, mask=in_V)
        S_KV = rounded(S_KV.to(state.dtype.element_ty).to(tl.float32), length - (n - 1 - t), ROUND)
        column = kept - (n - t)
        if column >= 0:
            to = tl.load(writes + column).to(tl.int64)
            tl.store(state + to * state_slot, S_KV, mask=in_KV & (to >= 0))


def gated_delta(
    mixed_TGC: torch.Tensor,
    gates_TI: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state_SGRKV: torch.Tensor,
    rows: Rows,
    round_tokens: int = 0,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    _, groups, heads, key_dim, value_dim = state_SGRKV.shape
    tokens, batch, every = len(mixed_TGC), len(rows.read_B), groups * heads
    assert mixed_TGC.dtype in {torch.float32, torch.bfloat16}
    assert state_SGRKV.dtype in {torch.float32, torch.bfloat16}
    assert state_SGRKV.stride()[2:] == (key_dim * value_dim, value_dim, 1)
    assert mixed_TGC.stride(2) == gates_TI.stride(1) == 1
    assert rows.writes_BK.is_contiguous()
    o_TGRV = mixed_TGC.new_empty(tokens, groups, heads, value_dim)
    if not tokens:
        return o_TGRV
    mixed = (mixed_TGC, mixed_TGC.stride(0), mixed_TGC.stride(1))
    gates = (gates_TI, gates_TI.stride(0), a_log_H, dt_bias_H)
    state = (state_SGRKV, state_SGRKV.stride(0), state_SGRKV.stride(1))
    writes = (rows.writes_BK, rows.writes_BK.shape[1])
    ends, ids = (rows.cu_B1, *writes), (rows.cu_B1, rows.lens_B, rows.read_B, *writes)
    sizes = {"HEADS": heads, "K": key_dim, "V": value_dim}
    sizes["KEYS"] = max(16, triton.next_power_of_2(key_dim))
    answered = ANSWER_COLUMNS if has_large() else COLUMNS
    few, many = (max(16, min(most, triton.next_power_of_2(value_dim))) for most in (COLUMNS, answered))
    parts = triton.cdiv(value_dim, few)
    alone = batch_invariant or tokens - batch < SHORT.value  # no row can have more
    if not alone:
        total_HT = torch.empty(every, tokens, dtype=torch.float64, device=mixed_TGC.device)
        unit_HT = torch.empty(every, tokens, dtype=torch.float32, device=mixed_TGC.device)
        w_THK, u_THV = mixed_TGC.new_empty(tokens, every, key_dim), torch.empty_like(o_TGRV)
        chunks = tokens // CHUNK.value + batch
        before = mixed_TGC.new_empty(chunks, every, key_dim, value_dim)
        wide = mixed_TGC.dtype == torch.float32 or sizes["KEYS"] > 128
        options = {"num_warps": 8 if wide else 4, "num_stages": 2, **sizes}
        padded = rows_at_once(batch)
        prepare[(chunks, every)](
            *mixed, *gates, total_HT, unit_HT, w_THK, u_THV, *ends, tokens, batch,
            COLUMNS=few, ROWS=padded, **options,
        )  # fmt: skip
        advance[(parts, every, batch)](
            *mixed, total_HT, unit_HT, w_THK, u_THV, *state, before, *ids, tokens,
            COLUMNS=few, INSIDE=writes[1] > 1, ROUND=round_tokens, **options,
        )  # fmt: skip
        answer[(triton.cdiv(value_dim, many), chunks, every)](
            *mixed, total_HT, unit_HT, u_THV, before, o_TGRV, *ends, tokens, batch,
            COLUMNS=many, ROWS=padded, **options,
        )  # fmt: skip
    recur[(parts, every, batch)](
        *mixed, *gates, *state, o_TGRV, *ids, int(alone), COLUMNS=few, ROUND=round_tokens, **sizes
    )
    return o_TGRV
