"""Blocks of KV caches as bytes: whatever the strides are, they read the same, and come back alone."""

import itertools
from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor

from tidemill.connect.blocks import GroupMemory

BLOCKS, KERNEL_BLOCKS, HEADS, TOKENS, WIDTH = 5, 2, 3, 4, 6
SHAPE = (BLOCKS * KERNEL_BLOCKS, HEADS, TOKENS, WIDTH)
LAYERS = 2


def layer_first(order: tuple[int, ...]) -> list[Tensor]:
    """Return one tensor for each layer, with its dimensions in this order in memory."""
    back = tuple(order.index(dim) for dim in range(4))
    return [
        torch.zeros([SHAPE[dim] for dim in order], dtype=torch.bfloat16).permute(back) for _ in range(LAYERS)
    ]


def block_first() -> list[Tensor]:
    """Return layers whose blocks lie side by side, with a gap after each."""
    block = (HEADS, KERNEL_BLOCKS * TOKENS, WIDTH)
    whole = torch.zeros(BLOCKS, LAYERS, prod(block) + 8, dtype=torch.bfloat16)
    return [whole[:, layer, :-8].unflatten(1, block) for layer in range(LAYERS)]


def filled(caches: list[Tensor]) -> list[Tensor]:
    for layer, cache in enumerate(caches):
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) % 251 + layer)
    return caches


@pytest.mark.parametrize("order", [(0, *rest, 3) for rest in itertools.permutations((1, 2))] + [(1, 0, 2, 3)])
def test_bytes_do_not_depend_on_strides(order: tuple[int, ...]) -> None:
    plain, other = (
        GroupMemory(filled(layer_first((0, 1, 2, 3))), BLOCKS),
        GroupMemory(filled(layer_first(order)), BLOCKS),
    )
    assert plain.layout == other.layout
    stages = plain.stage(3), other.stage(3)
    plain.read([4, 0, 2], stages[0])
    other.read([4, 0, 2], stages[1])
    assert torch.equal(*stages)
    assert stages[0].count_nonzero()


@pytest.mark.parametrize(
    "make", [lambda: layer_first((0, 2, 1, 3)), lambda: layer_first((1, 0, 2, 3)), block_first]
)
def test_blocks_come_back_and_no_others_change(make: Callable[[], list[Tensor]]) -> None:
    source, target = filled(make()), make()
    expected = [cache.clone() for cache in target]
    count = len(source[0]) // BLOCKS
    for there, cache in zip(expected, source, strict=True):
        there[:count], there[3 * count : 4 * count] = cache[4 * count :], cache[count : 2 * count]
    reader, writer = GroupMemory(source, BLOCKS), GroupMemory(target, BLOCKS)
    stage_NB = reader.stage(2)
    reader.read([4, 1], stage_NB)
    assert reader.fence() is None
    writer.write([0, 3], stage_NB)
    for there, cache in zip(expected, target, strict=True):
        assert torch.equal(there, cache)


def test_another_shape_or_type_is_another_layout() -> None:
    plain = GroupMemory(layer_first((0, 1, 2, 3)), BLOCKS)
    halved = GroupMemory([cache.view(torch.uint8) for cache in layer_first((0, 1, 2, 3))], BLOCKS)
    coarser = GroupMemory(
        [cache.unflatten(0, (BLOCKS, 2)).flatten(1, 2) for cache in layer_first((0, 1, 2, 3))], BLOCKS
    )
    assert len({plain.layout, halved.layout, coarser.layout}) == 3
    assert plain.block_bytes == coarser.block_bytes == LAYERS * KERNEL_BLOCKS * HEADS * TOKENS * WIDTH * 2
