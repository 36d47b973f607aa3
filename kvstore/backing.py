"""The memory under an arena: one reservation at a fixed address whose ranges are mapped and unmapped.

Fixed       one allocation on any device, all of it always there
Mmap        host memory: reserved for nothing, taken when mapped, given back to the system when unmapped
Kvcached    CUDA virtual memory in extents: the place of kvcached's `vmm_ops`
"""

import mmap
from typing import Protocol

import torch

from tidemill.kvstore.errors import OutOfMemory

PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # Linux on x86-64 and arm64; the mmap module of Python 3.11 does not name it


class Backing(Protocol):
    """Memory of an arena. Whoever unmaps a range has waited for the work that used it.

    memory      uint8 [reserved bytes], contiguous, at storage offset 0 (`as_strided` counts from there), at
                one address for life; that address is page-aligned on a host
    """

    @property
    def memory(self) -> torch.Tensor: ...

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Make `[offset, offset + num)` usable. Its bytes are undefined, unless it was mapped already."""
        ...

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        """Give the memory of `[offset, offset + num)` back; what it held is lost."""
        ...

    def close(self) -> None:
        """Give all memory back. Nothing may use `memory` afterwards. May be called twice."""
        ...


class Fixed:
    """One allocation; map and unmap do nothing, close leaves it to the last tensor that uses it."""

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        if torch.device(device).type == "cpu":
            self.memory = torch.frombuffer(_anonymous(num_bytes, flags=0), dtype=torch.uint8)
        else:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        pass

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class Mmap:
    """Host memory that is reserved far beyond what is used: only mapped ranges count as resident.

    Offsets and lengths are multiples of `PAGE_BYTES`, because the system takes memory back in whole pages.
    """

    def __init__(self, num_bytes: int) -> None:
        self._reservation = _anonymous(num_bytes, flags=_MAP_NORESERVE)
        self.memory = torch.frombuffer(self._reservation, dtype=torch.uint8)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Touches each page, so that no step pays for page faults and resident memory is what was mapped."""
        self._check(offset_bytes, num_bytes)
        self.memory[offset_bytes : offset_bytes + num_bytes : PAGE_BYTES].add_(0)

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        self._check(offset_bytes, num_bytes)
        self._reservation.madvise(mmap.MADV_DONTNEED, offset_bytes, num_bytes)

    def close(self) -> None:
        """The addresses stay reserved until the last tensor over them is gone: a late reader sees zeros."""
        self._reservation.madvise(mmap.MADV_DONTNEED)

    def _check(self, offset_bytes: int, num_bytes: int) -> None:
        assert offset_bytes % PAGE_BYTES == 0
        assert num_bytes % PAGE_BYTES == 0
        assert 0 <= offset_bytes < offset_bytes + num_bytes <= len(self._reservation)


def _anonymous(num_bytes: int, flags: int) -> mmap.mmap:
    """Private zeroed memory at a page-aligned address. Raises OutOfMemory when it is not granted."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as error:
        raise OutOfMemory(
            f"the system does not grant {num_bytes} bytes of address space ({error.strerror}):"
            " ask for less memory, or set vm.overcommit_memory to 0 or 1"
        ) from error
