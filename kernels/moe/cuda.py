# pyrefly: ignore-errors[bad-argument-count, bad-argument-type, bad-keyword-argument, unexpected-keyword]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""`route`, `moe_inner`, `moe_outer` and `moe_outer_norm` on CUDA: 1 launch (2 or 3 for many pairs), 1, 2 and
2 launches, whose grids come from shapes alone.

A tile is a few tokens of one expert. The weights are the left side of every product, and the tokens its
columns: 16 of them are enough for wgmma, and the instruction that adds up an output is the same whether it
runs beside 16 tokens or 128, so that a token's sum has one order in every batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.kernels.activation.cuda import sigmoid
from tidemill.kernels.linear.factors import (
    constants,
    dtype_of,
    factors,
    scaled,
    taken,
    tile_of_codes,
    zeros,
)
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.moe import reference
from tidemill.kernels.moe.choose import choose
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.order import PAIRS_AT_ONCE, is_few, order_of, tile_of
from tidemill.kernels.moe.routing import Choice, Routing
from tidemill.kernels.moe.tiles import ExpertTiles, tiles_for
from tidemill.kernels.rms_norm.cuda import launch, normalised
from tidemill.kernels.shared.row_of import ROWS_AT_ONCE
from tidemill.kernels.shared.rows import Rows


@triton.jit(do_not_specialize=["pairs"])
def gate_up_tile(
    x, x_scales,  # [T, H], and of int8 float32 [T], else None
    weight,  # [E, 2 I, H], or codes [E, 2 I, ROW]
    scales, offsets,  # of codes [E, GROUPS, 2 I], else None
    bias,  # [E, 2 I], or None
    hidden,  # [T, K, I]
    chosen, order, starts,  # as of `tile_of`
    pairs,
    row_stride,  # of x
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    KIND: tl.constexpr, HALVES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 - the letter of the shapes
    K: tl.constexpr,
    M: tl.constexpr,  # tokens of a tile
    N: tl.constexpr,  # columns of gate, and of up
    D: tl.constexpr,  # depth of a step
    AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Compute tile i, block j of N columns, of a grid (i, j): silu(gate) * up, or the variant of
    `clamped`."""
    expert, pair_M = tile_of(chosen, order, starts, pairs, E, M, AT_ONCE)
    expert = expert.to(tl.int64)
    if expert < 0:
        return
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    depth_D = tl.arange(0, D)
    x_MD = x + (pair_M // K).to(tl.int64)[:, None] * row_stride + depth_D[None, :]
    gate_ND = weight + expert * (2 * I * ROW) + column_N[:, None] * ROW + depth_D[None, :]
    if KIND is not None:
        scales += expert * (GROUPS * 2 * I)
    if offsets is not None:
        offsets += expert * (GROUPS * 2 * I)
    mask_M1, in_N = pair_M[:, None] >= 0, column_N < I
    gate_NM, up_NM = zeros(KIND, N, M), zeros(KIND, N, M)
    for depth in range(0, H, D * HALVES):
        mask_ND = in_N[:, None]
        if H % D and KIND is None:
            mask_ND = mask_ND & (depth_D < H - depth)[None, :]
        gates_ND = tl.load(gate_ND + depth // HALVES, mask=mask_ND, other=0)
        ups_ND = tl.load(gate_ND + I * ROW + depth // HALVES, mask=mask_ND, other=0)
        for half in tl.static_range(HALVES):
            at = depth + half * D
            mask_MD = mask_M1
            if H % (D * HALVES):
                mask_MD = mask_M1 & (depth_D < H - at)[None, :]
            x_DM = tl.trans(tl.load(x_MD + at, mask=mask_MD, other=0.0))
            gate = factors(
                gates_ND, half, scales, offsets, column_N, in_N, at, 2 * I, KIND, GROUPS, GROUP, N, D
            )
            gate_NM = tl.dot(gate, x_DM, gate_NM, input_precision="ieee", out_dtype=gate_NM.dtype)
            up = factors(
                ups_ND, half, scales, offsets, column_N + I, in_N, at, 2 * I, KIND, GROUPS, GROUP, N, D
            )
            up_NM = tl.dot(up, x_DM, up_NM, input_precision="ieee", out_dtype=up_NM.dtype)
    token_M, in_M = pair_M // K, pair_M >= 0
    gate_NM = scaled(gate_NM, x_scales, token_M, in_M, scales, column_N, in_N, KIND)
    up_NM = scaled(up_NM, x_scales, token_M, in_M, scales, column_N + I, in_N, KIND)
    if bias is not None:
        bias_N = bias + expert * (2 * I) + column_N
        gate_NM += tl.load(bias_N, mask=column_N < I, other=0.0).to(tl.float32)[:, None]
        up_NM += tl.load(bias_N + I, mask=column_N < I, other=0.0).to(tl.float32)[:, None]
    if CLAMPED:
        gate_NM = tl.where(gate_NM > limit, limit, gate_NM)
        up_NM = tl.where(up_NM > limit, limit, tl.where(up_NM < -limit, -limit, up_NM))
        hidden_MN = tl.trans((up_NM + 1.0) * gate_NM / (1.0 + tl.exp(-alpha * gate_NM)))
    else:
        hidden_MN = tl.trans(gate_NM / (1.0 + tl.exp(-gate_NM)) * up_NM)
    to_MN = hidden + pair_M.to(tl.int64)[:, None] * I + column_N[None, :]
    mask_MN = (pair_M[:, None] >= 0) & (column_N[None, :] < I)
    tl.store(to_MN, hidden_MN.to(hidden.dtype.element_ty), mask=mask_MN)


@triton.jit(do_not_specialize=["pairs"])
def down_tile(
    hidden, x_scales,  # [T K, I], and of int8 float32 [T K], else None
    weight,  # [E, H, I], or codes [E, H, ROW]
    scales, offsets,  # of codes [E, GROUPS, H], else None
    bias,  # [E, H], or None
    part,  # [T K, H]
    chosen, order, starts,  # as of `tile_of`
    pairs,
    KIND: tl.constexpr, HALVES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, ROW: tl.constexpr,
    E: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 - the letter of the shapes
    H: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Tile i, block j of N columns, of a grid (i, j): what each of a token's experts adds to it."""
    expert, pair_M = tile_of(chosen, order, starts, pairs, E, M, AT_ONCE)
    expert = expert.to(tl.int64)
    if expert < 0:
        return
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    depth_D = tl.arange(0, D)
    x_MD = hidden + pair_M.to(tl.int64)[:, None] * I + depth_D[None, :]
    w_ND = weight + expert * (H * ROW) + column_N[:, None] * ROW + depth_D[None, :]
    if KIND is not None:
        scales += expert * (GROUPS * H)
    if offsets is not None:
        offsets += expert * (GROUPS * H)
    mask_M1, in_N = pair_M[:, None] >= 0, column_N < H
    out_NM = zeros(KIND, N, M)
    for depth in range(0, I, D * HALVES):
        mask_ND = in_N[:, None]
        if I % D and KIND is None:
            mask_ND = mask_ND & (depth_D < I - depth)[None, :]
        ws_ND = tl.load(w_ND + depth // HALVES, mask=mask_ND, other=0)
        for half in tl.static_range(HALVES):
            at = depth + half * D
            mask_MD = mask_M1
            if I % (D * HALVES):
                mask_MD = mask_M1 & (depth_D < I - at)[None, :]
            x_DM = tl.trans(tl.load(x_MD + at, mask=mask_MD, other=0.0))
            w = factors(ws_ND, half, scales, offsets, column_N, in_N, at, H, KIND, GROUPS, GROUP, N, D)
            out_NM = tl.dot(w, x_DM, out_NM, input_precision="ieee", out_dtype=out_NM.dtype)
    out_NM = scaled(out_NM, x_scales, pair_M, pair_M >= 0, scales, column_N, in_N, KIND)
    if bias is not None:
        bias_N = tl.load(bias + expert * H + column_N, mask=column_N < H, other=0.0)
        out_NM += bias_N.to(tl.float32)[:, None]
    to_MN = part + pair_M.to(tl.int64)[:, None] * H + column_N[None, :]
    mask_MN = (pair_M[:, None] >= 0) & (column_N[None, :] < H)
    tl.store(to_MN, tl.trans(out_NM).to(part.dtype.element_ty), mask=mask_MN)


@triton.jit
def summed(
    part,  # [T, K, H]
    chosen, weights,  # [T, K]
    shared, gate, gate_stride,
    token, column_N,
    H: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Return columns of a token's sum, float32, added in the order of K: no atomics. A pair without an expert
    has no part."""
    sum_N = tl.zeros(column_N.shape, tl.float32)
    in_N = column_N < H
    for k in tl.static_range(K):
        is_there = tl.load(chosen + token * K + k) >= 0
        part_N = tl.load(part + (token * K + k) * H + column_N, mask=in_N & is_there, other=0.0)
        sum_N += tl.load(weights + token * K + k) * part_N.to(tl.float32)
    if shared is not None:
        shared_N = tl.load(shared + token * H + column_N, mask=in_N, other=0.0).to(tl.float32)
        if gate is not None:
            shared_N *= sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        sum_N += shared_N
    return sum_N


@triton.jit
def combine(
    part,  # [T, K, H]
    chosen,  # int32 [T, K]
    weights,  # float32 [T, K]
    shared,  # [T, H], or None
    gate,  # float [T], or None
    gate_stride,
    y,  # [T, H]
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Token i, block j of N columns, of a grid (i, j)."""
    token = tl.program_id(0).to(tl.int64)
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    sum_N = summed(part, chosen, weights, shared, gate, gate_stride, token, column_N, H, K)
    tl.store(y + token * H + column_N, sum_N.to(y.dtype.element_ty), mask=column_N < H)


@triton.jit
def combine_norm(
    part, chosen, weights, shared, gate, gate_stride,  # as of `combine`
    residual,  # float32 [T, H], to which the sum is added
    norm,  # [H]
    y,  # [T, H]
    epsilon,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,  # power of two, at least H
) -> None:  # fmt: skip
    """Token i of a grid (i,). An element of the residual is read and written by one thread."""
    token = tl.program_id(0).to(tl.int64)
    at_N = tl.arange(0, N)
    sum_N = summed(part, chosen, weights, shared, gate, gate_stride, token, at_N, H, K)
    in_N = at_N < H
    total_N = tl.load(residual + token * H + at_N, mask=in_N, other=0.0) + sum_N
    tl.store(residual + token * H + at_N, total_N, mask=in_N)
    weight_N = tl.load(norm + at_N, mask=in_N, other=0.0)
    y_1N = normalised(total_N[None, :], weight_N, epsilon, H)
    tl.store(y + token * H + at_N[None, :], y_1N.to(y.dtype.element_ty), mask=in_N[None, :])


FLOAT32 = (64, 16, 4, 2)  # no matrix unit multiplies float32: for tests and small models


def tiles(
    choice: Choice, experts: int, *, codes: bool = False
) -> tuple[ExpertTiles, int, tuple[Tensor | int | None, ...]]:
    """Return the sizes of tiles, the number of them, enough for every way in which tokens could have
    chosen, and what `tile_of` takes."""
    pairs = choice.experts_TK.numel()
    row = tiles_for(pairs, experts, codes=codes)
    if is_few(pairs, experts, row.tokens):
        return row, pairs, (choice.experts_TK, None, None, pairs)
    assert choice.order is not None
    return row, pairs // row.tokens + experts, (choice.experts_TK, *choice.order, pairs)


def route(logits_TE: Tensor, routing: Routing, rows: Rows | None = None) -> Choice:
    """Route as the reference does, with float32 weights. Nothing waits for the device."""
    tokens, experts = logits_TE.shape[0], logits_TE.shape[1] - routing.gated
    routing.check(experts)
    assert logits_TE.stride(1) == 1
    every, each = experts + routing.shared, routing.top_k + routing.shared
    chosen_TK = torch.empty(tokens, each, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(tokens, each, dtype=torch.float32, device=logits_TE.device)
    if not tokens:
        return Choice(chosen_TK, weights_TK)
    of_rows = (None, None, 0) if rows is None else (rows.cu_B1, rows.lens_B, len(rows.lens_B))
    choose[(tokens,)](
        logits_TE, routing.bias_E, chosen_TK, weights_TK, *of_rows, logits_TE.stride(0), routing.scale,
        E=experts, K=routing.top_k, SHARED=routing.shared, GATED=routing.gated,
        SOFTMAX=routing.score == "softmax", RENORMALISE=routing.renormalise, GROUPS=routing.groups,
        KEPT=routing.groups_kept, ONE_EACH=of_rows[2] == tokens, BLOCK=triton.next_power_of_2(experts),
        ROWS=ROWS_AT_ONCE, num_warps=1,
    )  # fmt: skip
    pairs = tokens * each
    few = is_few(pairs, every, tiles_for(pairs, every).tokens)
    return Choice(chosen_TK, weights_TK, None if few else order_of(chosen_TK, every))


def own_experts(choice: Choice, first: int, end: int) -> Choice:
    """Choose as the reference does, and sort the pairs again."""
    own = reference.own_experts(choice, first, end)
    pairs, experts = own.experts_TK.numel(), end - first
    few = is_few(pairs, experts, tiles_for(pairs, experts).tokens)
    return own if few or not pairs else own._replace(order=order_of(own.experts_TK, experts))


def moe_inner(x_TH: Tensor, choice: Choice, experts: Experts) -> Tensor:
    """Compute as the reference does, except that x and hidden are rounded to the dtype of the experts."""
    (tokens, top_k), width = choice.experts_TK.shape, experts.gate_up.in_features
    gate_up, inner = experts.gate_up, experts.gate_up.out_features // 2
    assert x_TH.shape == (tokens, width)
    assert choice.experts_TK.is_contiguous()
    assert x_TH.stride(1) == 1
    hidden_TKI = x_TH.new_empty(tokens, top_k, inner, dtype=dtype_of(gate_up))
    if not tokens:
        return hidden_TKI
    x_TH, x_scales_T = taken(x_TH, gate_up)
    row, count, found = tiles(choice, len(gate_up.data), codes=gate_up.scales is not None)
    tile = _tile(gate_up, row.tokens, row.gate_up, 2)
    gate_up_tile[(count, triton.cdiv(inner, tile["N"]))](
        x_TH, x_scales_T, *_weights(gate_up), hidden_TKI, *found, x_TH.stride(0),
        experts.alpha, experts.limit, CLAMPED=experts.activation == "clamped", **constants(gate_up),
        E=len(gate_up.data), H=width, I=inner, K=top_k, AT_ONCE=PAIRS_AT_ONCE, **tile,
    )  # fmt: skip
    return hidden_TKI


def moe_outer(
    hidden_TKI: Tensor, choice: Choice, experts: Experts, shared_TH: Tensor | None, gate_T1: Tensor | None
) -> Tensor:
    """Compute as the reference does, except that the inputs and outputs of experts and their sum are rounded
    to the dtype of the experts."""
    (tokens, top_k), width = choice.experts_TK.shape, experts.down.out_features
    y_TH = hidden_TKI.new_empty(tokens, width, dtype=dtype_of(experts.down))
    if tokens:
        parts = _parts(hidden_TKI, choice, experts, shared_TH, gate_T1)
        columns = min(1024, triton.next_power_of_2(width))
        combine[(tokens, triton.cdiv(width, columns))](*parts, y_TH, H=width, K=top_k, N=columns, num_warps=4)
    return y_TH


def moe_outer_norm(
    hidden_TKI: Tensor,
    choice: Choice,
    experts: Experts,
    shared_TH: Tensor | None,
    gate_T1: Tensor | None,
    residual_TH: Tensor,
    weight_H: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """The same, except that the sum over experts is not rounded; the sum takes the memory of the residual."""
    (tokens, top_k), width = choice.experts_TK.shape, experts.down.out_features
    assert residual_TH.shape == (tokens, width)
    assert residual_TH.dtype == torch.float32
    assert residual_TH.is_contiguous()
    y_TH = hidden_TKI.new_empty(tokens, width, dtype=dtype_of(experts.down))
    if tokens:
        parts = _parts(hidden_TKI, choice, experts, shared_TH, gate_T1)
        columns = triton.next_power_of_2(width)
        warps = launch(tokens, width)[1]["num_warps"]
        combine_norm[(tokens,)](
            *parts, residual_TH, weight_H, y_TH, epsilon, H=width, K=top_k, N=columns, num_warps=warps
        )
    return residual_TH, y_TH


def _parts(
    hidden_TKI: Tensor, choice: Choice, experts: Experts, shared_TH: Tensor | None, gate_T1: Tensor | None
) -> tuple[Tensor | int | None, ...]:
    """Multiply by `down`, and return what `combine` takes first."""
    tokens, top_k, inner = hidden_TKI.shape
    down, width = experts.down, experts.down.out_features
    assert down.in_features == inner
    assert hidden_TKI.is_contiguous()
    assert choice.experts_TK.is_contiguous()
    assert choice.weights_TK.is_contiguous()
    assert choice.experts_TK.dtype == torch.int32
    assert choice.experts_TK.shape == choice.weights_TK.shape == (tokens, top_k)
    if shared_TH is not None:
        assert shared_TH.shape == (tokens, width)
        assert shared_TH.is_contiguous()
    assert gate_T1 is None or gate_T1.shape == (tokens, 1)
    part_TKH = hidden_TKI.new_empty(tokens, top_k, width, dtype=dtype_of(down))
    hidden_TKI, x_scales_TK = taken(hidden_TKI, down)
    row, count, found = tiles(choice, len(down.data), codes=down.scales is not None)
    tile = _tile(down, row.tokens, row.down, 1)
    down_tile[(count, triton.cdiv(width, tile["N"]))](
        hidden_TKI, x_scales_TK, *_weights(down), part_TKH, *found, **constants(down), E=len(down.data),
        I=inner, H=width, AT_ONCE=PAIRS_AT_ONCE, **tile,
    )  # fmt: skip
    stride = 0 if gate_T1 is None else gate_T1.stride(0)
    return part_TKH, choice.experts_TK, choice.weights_TK, shared_TH, gate_T1, stride


def _tile(weight: Packed, tokens: int, sizes: tuple[int, int, int, int], products: int) -> dict[str, int]:
    """Return the sizes of a tile of `tokens`, and how it is launched."""
    if weight.scales is not None:
        return tile_of_codes(weight, tokens, products)
    n, depth, warps, stages = sizes if weight.data.dtype == torch.bfloat16 else FLOAT32
    return {"M": tokens, "N": n, "D": depth, "num_warps": warps, "num_stages": stages}


def _weights(packed: Packed) -> tuple[Tensor | None, ...]:
    """Return what a kernel takes of weights."""
    experts, rows, bias_EN = len(packed.data), packed.out_features, packed.bias_N
    assert packed.data.shape == (
        experts,
        rows,
        packed.data.shape[2] if packed.scales is not None else packed.in_features,
    )
    assert packed.data.is_contiguous()
    assert packed.rest is None
    assert bias_EN is None or (bias_EN.is_contiguous() and bias_EN.shape == (experts, rows))
    return packed.data, packed.scales, packed.offsets, bias_EN
