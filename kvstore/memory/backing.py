"""The memory under an arena: one reservation at a fixed address whose ranges are mapped and unmapped.

Fixed       one allocation on any device, all of it always there
Mmap        host memory: reserved for nothing, taken when mapped, given back to the system when unmapped
Kvcached    CUDA virtual memory: taken from the device when mapped, given back when unmapped
"""

import errno
import mmap
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

import torch

from tidemill.kvstore.errors import OutOfMemory

PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # Linux on x86-64 and arm64; the mmap module of Python 3.11 does not name it
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module of Python 3.11 does not name it
_POPULATE_BYTES = 4 << 20  # about 2 ms: madvise holds the interpreter's lock, and others wait for it


class Backing(Protocol):
    """Memory of an arena, mapped and unmapped in multiples of the class's `granule_bytes`.

    Work on a host has ended when its range is unmapped; for a device the backing waits itself (Kvcached).

    memory      uint8 [reserved bytes], contiguous, at storage offset 0 (`as_strided` counts from there), at
                one address for life; that address is page-aligned on a host
    """

    @property
    def memory(self) -> torch.Tensor: ...

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Make `[offset, offset + num)` usable, of which nothing is mapped yet. Its bytes are undefined.

        Raises OutOfMemory when the memory is not granted; then nothing of the range is mapped.
        """
        ...

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        """Give the memory of `[offset, offset + num)` back; what it held is lost."""
        ...

    def close(self) -> None:
        """Give all memory back. Nothing may use `memory` afterwards. May be called twice."""
        ...


class Fixed:
    """One allocation; map and unmap do nothing, close leaves it to the last tensor that uses it."""

    granule_bytes = 1

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

    Linux promises more memory than there is, so a map beyond the limit of the machine or container is rarely
    refused: the system kills a process instead. What it does refuse is told as OutOfMemory.
    """

    granule_bytes = PAGE_BYTES

    def __init__(self, num_bytes: int) -> None:
        self._reservation = _anonymous(num_bytes, flags=_MAP_NORESERVE)
        self._reservation.madvise(mmap.MADV_DONTDUMP)  # a core dump shall hold neither gigabytes nor prompts
        self.memory = torch.frombuffer(self._reservation, dtype=torch.uint8)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Faults every page in, so that no step pays for it and resident memory is what was mapped."""
        _check_range(self, offset_bytes, num_bytes)
        end = offset_bytes + num_bytes
        try:
            for start in range(offset_bytes, end, _POPULATE_BYTES):
                self._reservation.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, end - start))
        except OSError as error:
            if error.errno == errno.EINVAL:  # an older kernel: touching is the same at half the speed
                self.memory[offset_bytes:end:PAGE_BYTES].add_(0)
                return
            self.unmap(offset_bytes, num_bytes)
            if error.errno not in {errno.ENOMEM, errno.EFAULT, errno.EAGAIN}:
                raise
            raise OutOfMemory(
                f"the system does not grant {num_bytes:,} bytes of memory ({error.strerror}):"
                " lower the memory of this worker, or give the machine or container more"
            ) from error

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        _check_range(self, offset_bytes, num_bytes)
        self._reservation.madvise(mmap.MADV_DONTNEED, offset_bytes, num_bytes)

    def close(self) -> None:
        """The addresses stay reserved until the last tensor over them is gone: a late reader sees zeros."""
        self._reservation.madvise(mmap.MADV_DONTNEED)


class BackingUnavailable(Exception):
    """The wanted backing cannot run here; the message says what to install."""


class Event(Protocol):
    """A point in a device's work, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Return when the device has passed it."""
        ...


class VmmOps(Protocol):
    """What is used of `kvcached.vmm_ops`. Each of them raises RuntimeError for what the driver refuses."""

    def init_kvcached(self, dev_str: str, page_size: int, *, contiguous_layout: bool) -> None: ...

    def create_kv_tensors(
        self, size: int, dtype_size: int, dev_str: str, num_layers: int, num_kv_buffers: int
    ) -> list[torch.Tensor]: ...

    def map_to_kv_tensors(self, offsets: list[int]) -> bool: ...

    def unmap_from_kv_tensors(self, offsets: list[int]) -> bool: ...

    def shutdown_kvcached(self) -> None: ...


class Kvcached:
    """CUDA virtual memory through kvcached. At most one per process: kvcached frees the first for a second.

    Map and unmap wait for the event of the newest step launched so far, never for the whole device: kvcached
    itself waits for nothing, and for a moment nothing at all is mapped where one page replaces another.

    kvcached 0.1.6, read in its csrc/{torch_bindings,allocator,ftensor,page}.cpp:
    - it maps pages of `page_size` (multiples of 2 MiB) x layers x buffers: with one of each, a page is a
      granule and the reservation one int8 tensor. Its environment variables play no part in these calls;
    - offsets are bytes from the start, one per page. A list maps as a whole or not at all, and older releases
      end the process instead. Pages that are mapped (unmapped) already are passed over in silence;
    - one page of physical memory lies under all that is not mapped: reads there find anything, never a fault,
      and writes are lost. Mapping fills with nothing;
    - a refusal is a RuntimeError with the driver's words; "state_inconsistency" in it means that undoing
      failed too, and the reservation cannot be used any more;
    - calls take a lock, and let go of the interpreter's.
    """

    granule_bytes = 2 << 20

    def __init__(
        self,
        num_bytes: int,
        device: str = "cuda:0",
        vmm_ops: VmmOps | None = None,
        last_step: Callable[[], Event | None] = lambda: None,
    ) -> None:
        """Raises BackingUnavailable without kvcached or a device, OutOfMemory when no granule is free."""
        assert num_bytes % self.granule_bytes == 0
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise BackingUnavailable(
                f"no CUDA device for {device}: install a CUDA build of torch, or use mmap"
            )
        self._ops = _installed_vmm_ops() if vmm_ops is None else vmm_ops
        self._last_step = last_step
        self._device = device
        self._open = True
        self._ops.init_kvcached(device, self.granule_bytes, contiguous_layout=True)
        try:
            tensors = self._ops.create_kv_tensors(num_bytes, 1, device, num_layers=1, num_kv_buffers=1)
        except RuntimeError as error:
            self.close()
            self._raise_refusal(self.granule_bytes, error)
            raise
        self.memory = tensors[0].view(torch.uint8)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        offsets = self._granules(offset_bytes, num_bytes)
        self._wait()
        try:
            created = self._ops.map_to_kv_tensors(offsets)
        except RuntimeError as error:
            self._raise_refusal(num_bytes, error)
            raise
        assert created

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        offsets = self._granules(offset_bytes, num_bytes)
        self._wait()
        created = self._ops.unmap_from_kv_tensors(offsets)
        assert created

    def close(self) -> None:
        """The addresses go too: a late reader faults."""
        if self._open:
            self._open = False
            try:
                self._wait()
            finally:
                self._ops.shutdown_kvcached()

    def _granules(self, offset_bytes: int, num_bytes: int) -> list[int]:
        assert self._open
        _check_range(self, offset_bytes, num_bytes)
        return list(range(offset_bytes, offset_bytes + num_bytes, self.granule_bytes))

    def _wait(self) -> None:
        event = self._last_step()
        if event is not None and not event.query():
            event.synchronize()

    def _raise_refusal(self, num_bytes: int, error: RuntimeError) -> None:
        """Raise OutOfMemory for what waiting or evicting can heal; a broken device it cannot."""
        if "out of memory" in str(error) and "state_inconsistency" not in str(error):
            raise OutOfMemory(
                f"{self._device} does not grant {num_bytes:,} bytes:"
                " lower the memory of this worker, or stop what else uses the device"
            ) from error


def _installed_vmm_ops() -> VmmOps:
    try:
        return cast(VmmOps, import_module("kvcached.vmm_ops"))
    except ImportError as error:
        raise BackingUnavailable(
            f"kvcached does not load ({error}): pip install --no-build-isolation 'tidemill[gpu]'"
        ) from error


def _check_range(backing: Mmap | Kvcached, offset_bytes: int, num_bytes: int) -> None:
    assert offset_bytes % backing.granule_bytes == 0
    assert num_bytes % backing.granule_bytes == 0
    assert 0 <= offset_bytes < offset_bytes + num_bytes <= backing.memory.numel()


def _anonymous(num_bytes: int, flags: int) -> mmap.mmap:
    """Private zeroed memory at a page-aligned address. Raises OutOfMemory when it is not granted."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as error:
        raise OutOfMemory(
            f"the system does not grant {num_bytes} bytes of address space ({error.strerror}):"
            " ask for less memory, or set vm.overcommit_memory to 0 or 1"
        ) from error
