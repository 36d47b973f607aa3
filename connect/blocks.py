"""Blocks of an engine's KV caches as bytes: copies between its memory, whatever the strides, and ours."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
from torch import Tensor


class GroupMemory:
    """The memory of the layers of one group.

    block_bytes     of all layers together
    layout          describes the bytes of a block: two groups with one layout can read each other's blocks
    """

    def __init__(self, caches: Sequence[Tensor], num_blocks: int) -> None:
        """Take the cache of each layer, `[num_blocks * n, heads, tokens, width]` for n kernel blocks each,
        with any strides but a last one of 1."""
        flat = [cache.view(torch.uint8) for cache in caches]
        self._views = [cache.view(num_blocks, -1, *cache.shape[1:]) for cache in flat]
        shapes = [tuple(view.shape[1:]) for view in self._views]
        self.layout = f"{shapes} of bytes of {[cache.dtype for cache in caches]}"
        ends = [*accumulate(map(prod, shapes), initial=0)]
        self._columns = [slice(start, end) for start, end in pairwise(ends)]
        self.block_bytes = ends[-1]
        self._device = caches[0].device

    def stage(self, num_blocks: int) -> Tensor:
        """Return host memory for blocks, uint8 `[num_blocks, block_bytes]`; pinned for a device."""
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_blocks, self.block_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def read(self, block_N: Sequence[int], stage_NB: Tensor) -> None:
        """Copy blocks into host memory. On a device, they are there when the current stream is."""
        ids_N = torch.tensor(block_N, dtype=torch.int64, device=self._device)
        near_NB = torch.empty_like(stage_NB, device=self._device) if self._device.type != "cpu" else stage_NB
        for view, part in zip(self._views, self._parts(near_NB), strict=True):
            part.copy_(view.index_select(0, ids_N))
        if near_NB is not stage_NB:
            stage_NB.copy_(near_NB, non_blocking=True)

    def fence(self) -> Callable[[], object] | None:
        """Return a call that waits for all reads so far, None when they have ended."""
        if self._device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def write(self, block_N: Sequence[int], stage_NB: Tensor) -> None:
        """Copy host memory into blocks, before what follows on the current stream."""
        ids_N = torch.tensor(block_N, dtype=torch.int64, device=self._device)
        near_NB = stage_NB.to(self._device, non_blocking=True)
        for view, part in zip(self._views, self._parts(near_NB), strict=True):
            view.index_copy_(0, ids_N, part)

    def _parts(self, stage_NB: Tensor) -> list[Tensor]:
        """Return the part of each layer, in the shape of its blocks."""
        parts = zip(self._columns, self._views, strict=True)
        return [stage_NB[:, columns].view(len(stage_NB), *view.shape[1:]) for columns, view in parts]
