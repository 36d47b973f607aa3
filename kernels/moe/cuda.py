# pyright: basic, reportIndexIssue=false, reportCallIssue=false
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
# Nor has it types that pyright could check.
"""`route`, `moe_inner` and `moe_outer` on CUDA: 1, 2 and 3 launches, whose grids come from shapes alone.

A tile is a few tokens of one expert. The weights are the left side of every product, and the tokens its
columns: 16 of them are enough for wgmma, and the instruction that adds up an output is the same whether it
runs beside 16 tokens or 128, so that a token's sum has one order in every batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.kernels.activation.cuda import sigmoid
from tidemill.kernels.linear.packed import Packed
from tidemill.kernels.moe.experts import Experts
from tidemill.kernels.moe.routing import Routing

LOWEST = tl.constexpr(-3.4e38)  # of what can be chosen: -inf is what cannot, or is already
PLAN_PAIRS = 1024  # looked through at a time


@triton.jit
def in_kept_groups(choice_E, expert_E, GROUPS: tl.constexpr, KEPT: tl.constexpr, SIZE: tl.constexpr):
    """Return whether an expert is in one of the KEPT groups whose two best have the highest sums."""
    GROUPS_2: tl.constexpr = triton.next_power_of_2(GROUPS)
    group_G = tl.arange(0, GROUPS_2)
    sum_G = tl.full([GROUPS_2], float("-inf"), tl.float32)
    for group in range(GROUPS):
        own_E = tl.where(expert_E // SIZE == group, choice_E, float("-inf"))
        first = tl.max(own_E, 0)
        second = tl.max(tl.where(expert_E == tl.argmax(own_E, 0), float("-inf"), own_E), 0)
        # Halves, so that two that are the lowest do not add up to what is not there.
        sum_G = tl.where(group_G == group, first * 0.5 + second * 0.5, sum_G)
    kept_E = tl.zeros(choice_E.shape, tl.int1)
    for _ in range(KEPT):
        best = tl.argmax(sum_G, 0)
        kept_E = kept_E | (expert_E // SIZE == best)
        sum_G = tl.where(group_G == best, float("-inf"), sum_G)
    return kept_E


@triton.jit
def choose(
    logits,  # float [T, E]
    bias,  # float32 [E], or None
    chosen,  # int32 [T, K]
    weights,  # float32 [T, K]
    row_stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least E
) -> None:
    """One token. Ties go to the lower id; NaN is chosen last, so that ids are valid whatever the logits."""
    token = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, BLOCK)
    logit_E = tl.load(logits + token * row_stride + expert_E, mask=expert_E < E, other=float("-inf"))
    logit_E = logit_E.to(tl.float32)
    left_E = tl.where(logit_E > LOWEST, logit_E, LOWEST)
    if SOFTMAX:
        share_E = tl.exp(logit_E - tl.max(tl.where(expert_E < E, left_E, LOWEST), 0))
        total = tl.sum(share_E, 0)
    else:
        share_E, total = sigmoid(logit_E), 1.0
    # Shares order the experts as their logits do, but for those that are too small to tell apart.
    if bias is not None or GROUPS > 1:
        left_E = share_E / total
        if bias is not None:
            left_E += tl.load(bias + expert_E, mask=expert_E < E, other=0.0)
        left_E = tl.where(left_E > LOWEST, left_E, LOWEST)
    left_E = tl.where(expert_E < E, left_E, float("-inf"))
    if GROUPS > 1:
        left_E = tl.where(in_kept_groups(left_E, expert_E, GROUPS, KEPT, E // GROUPS), left_E, float("-inf"))
    taken_E = tl.zeros([BLOCK], tl.int1)
    for _ in range(K):
        taken_E = taken_E | (expert_E == tl.argmax(left_E, 0))
        left_E = tl.where(taken_E, float("-inf"), left_E)
    kept_E = tl.where(taken_E, share_E, 0.0)
    if RENORMALISE:
        total = tl.sum(kept_E, 0) + 1e-20
    place_E = token * K + tl.cumsum(taken_E.to(tl.int32), 0) - 1
    tl.store(chosen + place_E, expert_E, mask=taken_E)
    tl.store(weights + place_E, kept_E / total * scale, mask=taken_E)


@triton.jit(do_not_specialize=["pairs"])
def plan(
    chosen,  # int32 [pairs]
    tile_expert,  # int32 [tiles], -1: nothing to do
    tile_pair,  # int32 [tiles, M], -1: none
    pairs,
    M: tl.constexpr,
    BY_PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Cut the pairs of one expert, in order, into tiles. Their start follows from the number of pairs of
    lower experts. Tiles are not counted: some stay empty between the experts."""
    expert = tl.program_id(0)
    below_B = tl.zeros([BLOCK], tl.int32)
    own_B = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        pair_B = start + tl.arange(0, BLOCK)
        chosen_B = tl.load(chosen + pair_B, mask=pair_B < pairs, other=1 << 30)
        below_B += (chosen_B < expert).to(tl.int32)
        own_B += (chosen_B == expert).to(tl.int32)
    below, own = tl.sum(below_B, 0), tl.sum(own_B, 0)
    if BY_PAIR:
        first, end = below, below + own
    else:
        first, end = below // M + expert, (below + own) // M + expert + 1
    for start in range(first, end, M):
        tile_M = start + tl.arange(0, M)
        tl.store(tile_expert + tile_M, tl.where((tile_M - first) * M < own, expert, -1), mask=tile_M < end)
    place_M = own + tl.arange(0, M)
    tl.store(tile_pair + first * M + place_M, tl.full([M], -1, tl.int32), mask=place_M < tl.cdiv(own, M) * M)
    done = 0
    for start in range(0, pairs, BLOCK):
        pair_B = start + tl.arange(0, BLOCK)
        mine_B = tl.load(chosen + pair_B, mask=pair_B < pairs, other=1 << 30) == expert
        place_B = done + tl.cumsum(mine_B.to(tl.int32), 0) - 1
        tl.store(tile_pair + first * M + place_B, pair_B, mask=mine_B)
        done += tl.sum(mine_B.to(tl.int32), 0)


@triton.jit
def gate_up_tile(
    x,  # [T, H]
    weight,  # [E, 2 I, H]
    bias,  # [E, 2 I], or None
    hidden,  # [T, K, I]
    tile_expert,
    tile_pair,
    row_stride,  # of x
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741 - the letter of the shapes
    K: tl.constexpr,
    M: tl.constexpr,  # tokens of a tile
    N: tl.constexpr,  # columns of gate, and of up
    D: tl.constexpr,  # depth of a step
) -> None:
    """Compute tile i, block j of N columns, of a grid (i, j): silu(gate) * up, or the variant of
    `clamped`."""
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair_M = tl.load(tile_pair + tl.program_id(0) * M + tl.arange(0, M))
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    depth_D = tl.arange(0, D)
    x_MD = x + (pair_M // K).to(tl.int64)[:, None] * row_stride + depth_D[None, :]
    gate_ND = weight + expert * (2 * I * H) + column_N[:, None] * H + depth_D[None, :]
    mask_M1, mask_N1 = pair_M[:, None] >= 0, column_N[:, None] < I
    gate_NM = tl.zeros([N, M], tl.float32)
    up_NM = tl.zeros([N, M], tl.float32)
    for depth in range(0, H, D):
        mask_MD, mask_ND = mask_M1, mask_N1
        if H % D:
            mask_MD = mask_M1 & (depth_D < H - depth)[None, :]
            mask_ND = mask_N1 & (depth_D < H - depth)[None, :]
        x_DM = tl.trans(tl.load(x_MD + depth, mask=mask_MD, other=0.0))
        gate = tl.load(gate_ND + depth, mask=mask_ND, other=0.0)
        up = tl.load(gate_ND + I * H + depth, mask=mask_ND, other=0.0)
        gate_NM = tl.dot(gate, x_DM, gate_NM, input_precision="ieee")
        up_NM = tl.dot(up, x_DM, up_NM, input_precision="ieee")
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


@triton.jit
def down_tile(
    hidden,  # [T K, I]
    weight,  # [E, H, I]
    bias,  # [E, H], or None
    part,  # [T K, H]
    tile_expert,
    tile_pair,
    I: tl.constexpr,  # noqa: E741 - the letter of the shapes
    H: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """Tile i, block j of N columns, of a grid (i, j): what each of a token's experts adds to it."""
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair_M = tl.load(tile_pair + tl.program_id(0) * M + tl.arange(0, M))
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    depth_D = tl.arange(0, D)
    x_MD = hidden + pair_M.to(tl.int64)[:, None] * I + depth_D[None, :]
    w_ND = weight + expert * (H * I) + column_N[:, None] * I + depth_D[None, :]
    mask_M1, mask_N1 = pair_M[:, None] >= 0, column_N[:, None] < H
    out_NM = tl.zeros([N, M], tl.float32)
    for depth in range(0, I, D):
        mask_MD, mask_ND = mask_M1, mask_N1
        if I % D:
            mask_MD = mask_M1 & (depth_D < I - depth)[None, :]
            mask_ND = mask_N1 & (depth_D < I - depth)[None, :]
        x_DM = tl.trans(tl.load(x_MD + depth, mask=mask_MD, other=0.0))
        w = tl.load(w_ND + depth, mask=mask_ND, other=0.0)
        out_NM = tl.dot(w, x_DM, out_NM, input_precision="ieee")
    if bias is not None:
        bias_N = tl.load(bias + expert * H + column_N, mask=column_N < H, other=0.0)
        out_NM += bias_N.to(tl.float32)[:, None]
    to_MN = part + pair_M.to(tl.int64)[:, None] * H + column_N[None, :]
    mask_MN = (pair_M[:, None] >= 0) & (column_N[None, :] < H)
    tl.store(to_MN, tl.trans(out_NM).to(part.dtype.element_ty), mask=mask_MN)


@triton.jit
def combine(
    part,  # [T, K, H]
    weights,  # float32 [T, K]
    shared,  # [T, H], or None
    gate,  # float [T], or None
    gate_stride,
    y,  # [T, H]
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """Token i, block j of N columns, of a grid (i, j); adds in the order of K: no atomics."""
    token = tl.program_id(0).to(tl.int64)
    column_N = tl.program_id(1) * N + tl.arange(0, N)
    sum_N = tl.zeros([N], tl.float32)
    for k in range(K):
        part_N = tl.load(part + (token * K + k) * H + column_N, mask=column_N < H, other=0.0)
        sum_N += tl.load(weights + token * K + k) * part_N.to(tl.float32)
    if shared is not None:
        shared_N = tl.load(shared + token * H + column_N, mask=column_N < H, other=0.0).to(tl.float32)
        if gate is not None:
            shared_N *= sigmoid(tl.load(gate + token * gate_stride).to(tl.float32))
        sum_N += shared_N
    tl.store(y + token * H + column_N, sum_N.to(y.dtype.element_ty), mask=column_N < H)


# Tokens of a tile, and up to how many pairs of an average expert. Its weights are read once for each of its
# tiles, but for what the second finds in the L2: a tile takes most experts whole while reading is the cost.
TILES = ((16, 6), (32, 20), (64, 48), (128, None))
# By tokens of a tile: columns, depth of a step, warps, stages. Three or two programs share a multiprocessor
# while weights are streamed, which hides where each begins.
GATE_UP = {16: (64, 64, 4, 4), 32: (64, 64, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 4)}
DOWN = {16: (128, 64, 4, 4), 32: (128, 64, 4, 4), 64: (128, 64, 4, 4), 128: (256, 64, 8, 4)}
FLOAT32 = (64, 16, 4, 2)  # no matrix unit multiplies float32: for tests and small models


def tile_tokens(pairs: int, experts: int) -> int:
    """Return the tokens of a tile, from the shapes: the number of tokens of each expert is only on the
    device."""
    return next(tokens for tokens, most in TILES if most is None or pairs <= most * experts)


def tiles_of(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, int]:
    """The expert of each tile and its pairs, for every way in which tokens could have chosen; M of them."""
    pairs, m = chosen_TK.numel(), tile_tokens(chosen_TK.numel(), experts)
    by_pair = pairs <= pairs // m + experts
    tiles = pairs if by_pair else pairs // m + experts
    tile_expert = torch.empty(tiles, dtype=torch.int32, device=chosen_TK.device)
    tile_pair = torch.empty(tiles, m, dtype=torch.int32, device=chosen_TK.device)
    plan[(experts,)](
        chosen_TK, tile_expert, tile_pair, pairs, M=m, BY_PAIR=by_pair, BLOCK=PLAN_PAIRS, num_warps=4
    )
    return tile_expert, tile_pair, m


def route(logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Route as the reference does, with float32 weights. Nothing waits for the device."""
    tokens, experts = logits_TE.shape
    routing.check(experts)
    assert logits_TE.stride(1) == 1
    chosen_TK = torch.empty(tokens, routing.top_k, dtype=torch.int32, device=logits_TE.device)
    weights_TK = torch.empty(tokens, routing.top_k, dtype=torch.float32, device=logits_TE.device)
    if tokens:
        choose[(tokens,)](
            logits_TE, routing.bias_E, chosen_TK, weights_TK, logits_TE.stride(0), routing.scale,
            E=experts, K=routing.top_k, SOFTMAX=routing.score == "softmax", RENORMALISE=routing.renormalise,
            GROUPS=routing.groups, KEPT=routing.groups_kept, BLOCK=triton.next_power_of_2(experts),
            num_warps=1,
        )  # fmt: skip
    return chosen_TK, weights_TK


def moe_inner(x_TH: Tensor, chosen_TK: Tensor, experts: Experts) -> Tensor:
    """Compute as the reference does, except that x and hidden are rounded to the dtype of the experts."""
    (tokens, top_k), width = chosen_TK.shape, experts.gate_up.in_features
    gate_up, inner = experts.gate_up.data, experts.gate_up.out_features // 2
    assert x_TH.shape == (tokens, width)
    assert gate_up.shape[1:] == (2 * inner, width)
    assert gate_up.is_contiguous()
    assert chosen_TK.is_contiguous()
    assert x_TH.stride(1) == 1
    hidden_TKI = gate_up.new_empty(tokens, top_k, inner)
    if not tokens:
        return hidden_TKI
    tile_expert, tile_pair, m = tiles_of(chosen_TK, len(gate_up))
    n, depth, warps, stages = GATE_UP[m] if gate_up.dtype == torch.bfloat16 else FLOAT32
    x_TH = x_TH.to(gate_up.dtype)
    gate_up_tile[(len(tile_expert), triton.cdiv(inner, n))](
        x_TH, gate_up, _bias(experts.gate_up), hidden_TKI, tile_expert, tile_pair, x_TH.stride(0),
        experts.alpha, experts.limit, CLAMPED=experts.activation == "clamped",
        H=width, I=inner, K=top_k, M=m, N=n, D=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return hidden_TKI


def moe_outer(
    hidden_TKI: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
    experts: Experts,
    shared_TH: Tensor | None,
    gate_T1: Tensor | None,
) -> Tensor:
    """Compute as the reference does, except that the inputs and outputs of experts and their sum are rounded
    to the dtype of the experts."""
    tokens, top_k, inner = hidden_TKI.shape
    down, width = experts.down.data, experts.down.out_features
    assert down.shape[1:] == (width, inner)
    assert down.is_contiguous()
    assert hidden_TKI.is_contiguous()
    assert chosen_TK.is_contiguous()
    assert weights_TK.is_contiguous()
    assert chosen_TK.dtype == torch.int32
    assert chosen_TK.shape == weights_TK.shape == (tokens, top_k)
    if shared_TH is not None:
        assert shared_TH.shape == (tokens, width)
        assert shared_TH.is_contiguous()
    assert gate_T1 is None or gate_T1.shape == (tokens, 1)
    y_TH = down.new_empty(tokens, width)
    if not tokens:
        return y_TH
    part_TKH = down.new_empty(tokens, top_k, width)
    tile_expert, tile_pair, m = tiles_of(chosen_TK, len(down))
    n, depth, warps, stages = DOWN[m] if down.dtype == torch.bfloat16 else FLOAT32
    down_tile[(len(tile_expert), triton.cdiv(width, n))](
        hidden_TKI.to(down.dtype), down, _bias(experts.down), part_TKH, tile_expert, tile_pair,
        I=inner, H=width, M=m, N=n, D=depth, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    columns = min(1024, triton.next_power_of_2(width))
    combine[(tokens, triton.cdiv(width, columns))](
        part_TKH, weights_TK, shared_TH, gate_T1, 0 if gate_T1 is None else gate_T1.stride(0), y_TH,
        H=width, K=top_k, N=columns, num_warps=4,
    )  # fmt: skip
    return y_TH


def _bias(packed: Packed) -> Tensor | None:
    bias_EN = packed.bias_N
    assert bias_EN is None or (bias_EN.is_contiguous() and bias_EN.shape == packed.data.shape[:2])
    return bias_EN
