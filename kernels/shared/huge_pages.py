"""Memory in huge pages for weights.

A step of few rows reads all of them from memory, which scattered pages of 4 KiB slow down by up to a third.
"""

import mmap
from contextlib import suppress

import torch

CHUNK_BYTES = 64 << 20
HUGE_BYTES = 2 << 20
LINE_BYTES = 64


class HugePages:
    """Hands out memory from chunks. A chunk is freed with the last tensor in it; what no one takes of it is
    never mapped."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose memory begins at a line of the cache, in huge pages where Linux has them."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        lines_bytes = _up(num_bytes, LINE_BYTES)
        if lines_bytes > len(self._left):
            self._left = _chunk(max(lines_bytes, CHUNK_BYTES))
        taken, self._left = self._left[:num_bytes], self._left[lines_bytes:]
        return taken.view(dtype).view(shape)


def _chunk(num_bytes: int) -> torch.Tensor:
    whole_bytes = _up(num_bytes, HUGE_BYTES)
    memory = mmap.mmap(-1, whole_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % HUGE_BYTES
    return found[start : start + whole_bytes]


def _up(num_bytes: int, to_bytes: int) -> int:
    return -(-num_bytes // to_bytes) * to_bytes
