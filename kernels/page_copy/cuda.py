# pyright: basic, reportIndexIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# ruff: noqa: ANN001 - Triton takes annotations of kernels for its own types
# Nor has it types that pyright could check.
"""`page_copy` on CUDA, and in Triton's interpreter where the tests ask for it."""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidemill.kernels.page_copy.planes import FIELDS, Direction, Plane, numbers, sizes

VECTOR_BYTES = 16  # the unit of one thread, if everything is aligned to it
TILE_WORDS = 1024  # of one program: two vectors of each thread in flight, in few registers


@triton.jit(do_not_specialize=["tokens", "page_tokens", "block_tokens"])
def copy_tile(
    planes,  # int64 [planes, FIELDS], in words but for the addresses
    pages,  # int32 [N]
    slots,  # int64 [T]
    tokens,
    page_tokens,
    block_tokens,
    IS_EXPORT: tl.constexpr,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,  # an integer type
    VECTOR: tl.constexpr,  # words to which every address and stride is aligned
    WORDS: tl.constexpr,  # power of two, at least the words of a row
    TOKENS: tl.constexpr,
) -> None:
    """Tile i of TOKENS tokens, head j, plane k of a grid (i, j, k)."""
    plane = planes + tl.program_id(2) * FIELDS
    head = tl.program_id(1).to(tl.int64)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    word_W = tl.arange(0, WORDS)
    mask_T = token_T < tokens
    page_T = tl.load(pages + token_T // page_tokens, mask=mask_T, other=0).to(tl.int64)
    slot_T = tl.load(slots + token_T, mask=mask_T, other=0)
    ours_T = (
        page_T * tl.load(plane + 1)
        + head * tl.load(plane + 2)
        + (token_T % page_tokens).to(tl.int64) * tl.load(plane + 3)
    )
    theirs_T = (
        slot_T // block_tokens * tl.load(plane + 5)
        + head * tl.load(plane + 6)
        + slot_T % block_tokens * tl.load(plane + 7)
    )
    # What the compiler cannot know of numbers that it loads: without it every word is moved alone.
    ours_T = tl.multiple_of(ours_T, [VECTOR])
    theirs_T = tl.multiple_of(theirs_T, [VECTOR])
    vector_bytes: tl.constexpr = VECTOR * WORD.primitive_bitwidth // 8
    ours = tl.multiple_of(tl.load(plane).to(tl.pointer_type(WORD)), [vector_bytes])
    theirs = tl.multiple_of(tl.load(plane + 4).to(tl.pointer_type(WORD)), [vector_bytes])
    words = tl.multiple_of(tl.load(plane + 8), [VECTOR])
    mask_TW = mask_T[:, None] & (word_W < words)[None, :]
    ours_TW = ours + ours_T[:, None] + word_W[None, :]
    theirs_TW = theirs + theirs_T[:, None] + word_W[None, :]
    if IS_EXPORT:
        tl.store(theirs_TW, tl.load(ours_TW, mask=mask_TW), mask=mask_TW)
    else:
        tl.store(ours_TW, tl.load(theirs_TW, mask=mask_TW), mask=mask_TW)


def page_copy(planes: Sequence[Plane], page_N: Tensor, slot_T: Tensor, direction: Direction) -> None:
    if not planes or not len(slot_T):
        return
    heads, page_tokens, block_tokens = sizes(planes, page_N, slot_T)
    table = numbers(planes)
    aligned_bytes = gcd(VECTOR_BYTES, *(number for row in table for number in row))
    word_bytes = min(aligned_bytes, 4)
    for row in table:
        for field in (1, 2, 3, 5, 6, 7, 8):
            row[field] //= word_bytes
    words = triton.next_power_of_2(max(row[8] for row in table))
    tile_tokens = max(1, min(triton.next_power_of_2(page_tokens), TILE_WORDS // words))
    # Pinned, so that the host does not wait for the device to take it.
    host = torch.tensor(table, dtype=torch.int64, pin_memory=page_N.is_cuda)
    copy_tile[(triton.cdiv(len(slot_T), tile_tokens), heads, len(planes))](
        host.to(page_N.device, non_blocking=True),
        page_N,
        slot_T,
        len(slot_T),
        page_tokens,
        block_tokens,
        IS_EXPORT=direction == "export",
        FIELDS=FIELDS,
        WORD={1: tl.int8, 2: tl.int16, 4: tl.int32}[word_bytes],
        VECTOR=aligned_bytes // word_bytes,
        WORDS=words,
        TOKENS=tile_tokens,
    )
