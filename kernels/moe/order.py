# pyrefly: ignore-errors[bad-argument-type, unexpected-keyword, unsupported-operation]
# ruff: noqa: ANN001, ANN201 - Triton takes annotations of kernels for its own types
"""The pairs (token, pick) by expert on CUDA, and the tiles into which they are cut.

Few pairs are not sorted: each tile looks through all of them for its own. Of more, every program of
`sort_pairs` takes a block and counts the pairs of all blocks by expert, or reads these counts where there are
many blocks: the place of a pair is the number of pairs of lower experts, of its expert in blocks before, and
of its expert before it. So the order is that of the pairs, without atomics, and the work grows with the pairs
alone and not with their product with the experts.
"""

import torch
import triton
import triton.language as tl

from tidemill.kernels.moe.routing import Order

BLOCK = 512  # pairs of a program
STRIPE = tl.constexpr(8)  # of them compared together
BLOCKS_COUNTED = 8  # up to this number of blocks, each program counts all of them
COUNTS_AT_ONCE = 16  # blocks whose counts are read together
PAIRS_AT_ONCE = 128  # of one round of a tile's search


@triton.jit
def counted(chosen, pairs, block, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the number of pairs of each expert in a block, int32 `[EXPERTS]`."""
    pair_B = block * BLOCK + tl.arange(0, BLOCK)
    chosen_B = tl.load(chosen + pair_B, mask=pair_B < pairs, other=-1)
    return tl.histogram(tl.maximum(chosen_B, 0), EXPERTS, mask=chosen_B >= 0)


@triton.jit(do_not_specialize=["pairs"])
def count_pairs(
    chosen,  # int32 [pairs]
    counts,  # int32 [blocks, EXPERTS]
    pairs,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Count block i of a grid (i,)."""
    block = tl.program_id(0)
    count_E = counted(chosen, pairs, block, EXPERTS, BLOCK)
    tl.store(counts + block * EXPERTS + tl.arange(0, EXPERTS), count_E)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def sort_pairs(
    chosen,  # int32 [pairs], -1: none
    counts,  # int32 [blocks, EXPERTS], or None: this program counts
    at,  # int32 [blocks, EXPERTS]
    order,  # int32 [pairs]
    starts,  # int32 [E + 1]
    pairs, blocks,
    E: tl.constexpr,
    EXPERTS: tl.constexpr,  # power of two, at least E
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Put the pairs of block i, of a grid (i,), where they belong; the first program stores the starts."""
    own = tl.program_id(0)
    expert_E = tl.arange(0, EXPERTS)
    all_E, before_E = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    if counts is None:
        for block in range(blocks):
            count_E = counted(chosen, pairs, block, EXPERTS, BLOCK)
            all_E += count_E
            before_E += tl.where(block < own, count_E, 0)
    else:
        for first in range(0, blocks, AT_ONCE):
            block_S = first + tl.arange(0, AT_ONCE)
            count_SE = tl.load(
                counts + block_S[:, None] * EXPERTS + expert_E[None, :],
                mask=(block_S < blocks)[:, None],
                other=0,
            )
            all_E += tl.sum(count_SE, 0)
            before_E += tl.sum(tl.where((block_S < own)[:, None], count_SE, 0), 0)
    start_E = tl.cumsum(all_E, 0) - all_E
    if own == 0:
        tl.store(starts + expert_E, start_E, mask=expert_E < E)
        tl.store(starts + E, tl.sum(all_E, 0))
    tl.store(at + own * EXPERTS + expert_E, start_E + before_E)
    tl.debug_barrier()  # other threads of this program look up what was stored
    pair_B = own * BLOCK + tl.arange(0, BLOCK)
    chosen_B = tl.load(chosen + pair_B, mask=pair_B < pairs, other=-1)
    rank_B = tl.zeros([BLOCK], tl.int32)
    for first in range(0, BLOCK, STRIPE):
        pair_S = own * BLOCK + first + tl.arange(0, STRIPE)
        chosen_S = tl.load(chosen + pair_S, mask=pair_S < pairs, other=-1)
        earlier_BS = (chosen_B[:, None] == chosen_S[None, :]) & (pair_S[None, :] < pair_B[:, None])
        rank_B += tl.sum(earlier_BS.to(tl.int32), 1)
    is_pair_B = chosen_B >= 0
    place_B = tl.load(at + own * EXPERTS + chosen_B, mask=is_pair_B, other=0) + rank_B
    tl.store(order + place_B, pair_B, mask=is_pair_B)


@triton.jit
def tile_of(
    chosen,  # int32 [pairs], where they are few
    order, starts,  # else, or None
    pairs,
    E: tl.constexpr, M: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Return the expert of tile `program_id(0)`, -1 for none, and its pairs `[M]`, -1 for none.

    With an order expert e has the tiles from starts[e] // M + e on, room for as many as it can need. Without
    one, a tile begins at its pair if that is the first of its expert, or the M-th after another that is.
    """
    tile = tl.program_id(0)
    if order is None:
        expert = tl.load(chosen + tile)
        before = 0
        for first in range(0, tile, AT_ONCE):
            pair_B = first + tl.arange(0, AT_ONCE)
            chosen_B = tl.load(chosen + pair_B, mask=pair_B < tile, other=-1)
            before += tl.sum((chosen_B == expert).to(tl.int32), 0)
        expert = tl.where(before % M == 0, expert, -1)
        pair_M = tl.full([M], -1, tl.int32)
        found = 0
        for first in range(tile, tl.where(expert < 0, tile, pairs), AT_ONCE):
            pair_B = first + tl.arange(0, AT_ONCE)
            is_own_B = tl.load(chosen + pair_B, mask=pair_B < pairs, other=-1) == expert
            place_B = found + tl.cumsum(is_own_B.to(tl.int32), 0) - 1
            here_BM = is_own_B[:, None] & (place_B[:, None] == tl.arange(0, M)[None, :])
            pair_M = tl.maximum(pair_M, tl.max(tl.where(here_BM, pair_B[:, None], -1), 0))
            found += tl.sum(is_own_B.to(tl.int32), 0)
    else:
        expert_E = tl.arange(0, triton.next_power_of_2(E))
        first_E = tl.load(starts + expert_E, mask=expert_E < E, other=0) // M + expert_E
        expert = tl.sum(((expert_E < E) & (first_E <= tile)).to(tl.int32), 0) - 1
        start, end = tl.load(starts + expert), tl.load(starts + expert + 1)
        place = start + (tile - start // M - expert) * M
        pair_M = tl.load(order + place + tl.arange(0, M), mask=place + tl.arange(0, M) < end, other=-1)
        expert = tl.where(place < end, expert, -1)
    return expert, pair_M


def is_few(pairs: int, experts: int, tile_tokens: int) -> bool:
    """Return whether a tile for each pair is no more than tiles for every way to choose."""
    return pairs <= pairs // tile_tokens + experts


def order_of(chosen_TK: torch.Tensor, experts: int) -> Order:
    """Sort the pairs by expert: one launch, or two of many pairs."""
    pairs, width = chosen_TK.numel(), max(2, triton.next_power_of_2(experts))
    blocks = triton.cdiv(pairs, BLOCK)

    def integers(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=chosen_TK.device)

    found = Order(integers(pairs), integers(experts + 1))
    sizes = {"EXPERTS": width, "BLOCK": BLOCK, "num_warps": 8}
    counts = None
    if blocks > BLOCKS_COUNTED:
        counts = integers(blocks, width)
        count_pairs[(blocks,)](chosen_TK, counts, pairs, **sizes)
    sort_pairs[(blocks,)](
        chosen_TK,
        counts,
        integers(blocks, width),
        *found,
        pairs,
        blocks,
        E=experts,
        AT_ONCE=COUNTS_AT_ONCE,
        **sizes,
    )
    return found
