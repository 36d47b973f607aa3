"""The two ends of `page_copy` as strided views: pages of ours, and a cache of another engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["export", "import"]
"""The direction of a copy: from pages to the cache, or from the cache to pages."""


@dataclass(frozen=True, slots=True)
class Plane:
    """The keys, the values, or the latents of one layer, on both sides.

    pages   [pages, heads, P, D]    a view into page-first memory
    cache   [blocks, heads, B, D]   any strides, so any order of these dimensions in memory

    Elements are bytes here: both sides have dtypes of one width, and nothing is converted. Those of D lie
    side by side. The ranks of a group, and engines that share heads otherwise, slice `heads`.
    """

    pages: Tensor
    cache: Tensor


PageCopy = Callable[[Sequence[Plane], Tensor, Tensor, Direction], None]

FIELDS = 9
"""A plane as numbers: address, page stride, head stride and token stride of `pages`; address, block stride,
head stride and token stride of `cache`; and the bytes of a row of D."""


def numbers(planes: Sequence[Plane]) -> list[list[int]]:
    """`FIELDS` numbers of each plane; addresses and strides in bytes."""
    return [
        [*_side(plane.pages), *_side(plane.cache), plane.pages.shape[3] * plane.pages.element_size()]
        for plane in planes
    ]


def _side(view: Tensor) -> tuple[int, int, int, int]:
    size = view.element_size()
    first, head, token, _ = view.stride()
    return view.data_ptr(), first * size, head * size, token * size


def sizes(planes: Sequence[Plane], page_N: Tensor, slot_T: Tensor) -> tuple[int, int, int]:
    """Heads, P and B, the same for all planes; asserts what `page_copy` asks of its arguments."""
    (found,) = {(*plane.pages.shape[1:3], plane.cache.shape[2]) for plane in planes}
    heads, page_tokens, block_tokens = found
    for plane in planes:
        assert plane.cache.shape[1] == heads
        assert plane.pages.shape[3] == plane.cache.shape[3]
        assert plane.pages.element_size() == plane.cache.element_size()
        assert plane.pages.shape[3] <= 1 or plane.pages.stride(3) == plane.cache.stride(3) == 1
        assert plane.pages.device == plane.cache.device == page_N.device == slot_T.device
    assert page_N.dtype == torch.int32
    assert slot_T.dtype == torch.int64
    assert page_N.is_contiguous()
    assert slot_T.is_contiguous()
    assert len(page_N) == -(-len(slot_T) // page_tokens), "pages are filled from the first on"
    return heads, page_tokens, block_tokens
