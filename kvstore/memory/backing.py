"""The memory of an arena: one reservation at a fixed address, mapped and unmapped by ranges.

Fixed       one allocation on any device; all of it is always mapped
Mmap        host memory: reserving costs nothing, mapping takes memory, unmapping returns it
Kvcached    CUDA virtual memory: mapping takes device memory, unmapping returns it
"""

import ctypes
import errno
import mmap
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Thread
from typing import Protocol, cast

import torch

from tidemill.kvstore.errors import OutOfMemory

PAGE_BYTES = mmap.PAGESIZE
_MAP_NORESERVE = 0x4000  # Linux on x86-64 and arm64; the mmap module of Python 3.11 does not name it
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module of Python 3.11 does not name it
_POPULATE_BYTES = 4 << 20  # about 2 ms; mmap.madvise holds the GIL, so other threads wait
_madvise = ctypes.CDLL(None).madvise  # without the GIL


class Backing(Protocol):
    """Memory of an arena, mapped and unmapped in multiples of its `granule_bytes`.

    On a host, the caller has finished all work on a range before it unmaps the range.
    For a device, the backing itself waits for that work (Kvcached).

    memory      uint8 [reserved bytes], contiguous, at storage offset 0 (`as_strided` counts from
                there). Its address never changes; on a host it is page-aligned.
    """

    @property
    def memory(self) -> torch.Tensor: ...

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Map `[offset, offset + num)`, no part of which is mapped yet. Its bytes are undefined. Raises
        OutOfMemory when the memory is not granted; then no part of the range is mapped."""
        ...

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None:
        """Make a later `map` of this range fast, without waiting; it may have no effect. `unmap` returns the
        memory that this takes."""
        ...

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        """Unmap `[offset, offset + num)`; its contents are lost."""
        ...

    def close(self) -> None:
        """Unmap all memory, which must not be used afterwards. May be called twice."""
        ...


class Fixed:
    """One allocation. Map and unmap do nothing; the last tensor over it frees it."""

    granule_bytes = 1

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        if torch.device(device).type == "cpu":
            self.memory = torch.frombuffer(_anonymous(num_bytes, flags=0), dtype=torch.uint8)
        else:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        pass

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None:
        pass

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


class _Ahead:
    """Ranges that a thread maps before they are needed. What it cannot map is left to `map`."""

    def __init__(self, populate: Callable[[int, int], bool]) -> None:
        """Create it; `populate(offset_bytes, num_bytes)` runs on the thread and returns whether it mapped
        the whole range."""
        self._populate = populate
        self._ranges = deque[tuple[int, int]]()
        self._ready = set[tuple[int, int]]()  # mapped, and not taken yet
        self._thread: Thread | None = None  # it ends when it has mapped them

    def add(self, offset_bytes: int, num_bytes: int) -> None:
        self._ranges.append((offset_bytes, num_bytes))
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._run, name="map-ahead", daemon=True)
            self._thread.start()

    def take(self, offset_bytes: int, num_bytes: int) -> bool:
        """Return whether the thread has mapped the range. If not, the caller maps it."""
        wanted = (offset_bytes, num_bytes)
        with suppress(ValueError):
            self._ranges.remove(wanted)
        found = wanted in self._ready
        self._ready.discard(wanted)
        return found

    def stop(self) -> None:
        """Wait for the range that the thread is mapping, and leave those after it to `map`."""
        self._ranges.clear()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with suppress(IndexError):
            while True:
                wanted = self._ranges.popleft()
                if self._populate(*wanted):
                    self._ready.add(wanted)


class Mmap:
    """Host memory of which only mapped ranges are resident; the reservation can be far larger.

    Linux overcommits: beyond the limit of the machine or container it rarely refuses to map.
    It kills a process instead. When it does refuse, `map` raises OutOfMemory.
    """

    granule_bytes = PAGE_BYTES

    def __init__(self, num_bytes: int) -> None:
        self._reservation = _anonymous(num_bytes, flags=_MAP_NORESERVE)
        self._reservation.madvise(mmap.MADV_DONTDUMP)  # keeps prompts and gigabytes out of core dumps
        self.memory = torch.frombuffer(self._reservation, dtype=torch.uint8)
        self._ahead = _Ahead(self._populate)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Fault every page in, so that steps do not, and mapped memory is resident memory. What the thread
        has mapped is not walked again, which would take a fifth of the time of mapping it."""
        _check_range(self, offset_bytes, num_bytes)
        if self._ahead.take(offset_bytes, num_bytes):
            return
        end = offset_bytes + num_bytes
        try:
            for start in range(offset_bytes, end, _POPULATE_BYTES):
                self._reservation.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, end - start))
        except OSError as error:
            if error.errno == errno.EINVAL:  # an older kernel: touching has the same effect at half the speed
                self.memory[offset_bytes:end:PAGE_BYTES].add_(0)
                return
            self.unmap(offset_bytes, num_bytes)
            if error.errno not in {errno.ENOMEM, errno.EFAULT, errno.EAGAIN}:
                raise
            raise OutOfMemory(
                f"the system does not grant {num_bytes:,} bytes of memory ({error.strerror}):"
                " lower the memory of this worker, or give the machine or container more"
            ) from error

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None:
        """Fault the pages in on a thread, without the GIL."""
        _check_range(self, offset_bytes, num_bytes)
        self._ahead.add(offset_bytes, num_bytes)

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        _check_range(self, offset_bytes, num_bytes)
        self._ahead.stop()  # it would map the range again
        self._ahead.take(offset_bytes, num_bytes)
        self._reservation.madvise(mmap.MADV_DONTNEED, offset_bytes, num_bytes)

    def close(self) -> None:
        """Unmap everything. Addresses stay reserved for tensors; a late reader sees zeros."""
        self._ahead.stop()
        self._reservation.madvise(mmap.MADV_DONTNEED)

    def _populate(self, offset_bytes: int, num_bytes: int) -> bool:
        address = self.memory.data_ptr() + offset_bytes
        return not _madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)


class BackingUnavailable(Exception):
    """The backing cannot run on this machine; the message names what to install."""


class Event(Protocol):
    """A point in the work of a device, like torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed it."""
        ...


class VmmOps(Protocol):
    """The used part of `kvcached.vmm_ops`. Calls raise RuntimeError when the driver refuses."""

    def init_kvcached(self, dev_str: str, page_size: int, *, contiguous_layout: bool) -> None: ...

    def create_kv_tensors(
        self, size: int, dtype_size: int, dev_str: str, num_layers: int, num_kv_buffers: int
    ) -> list[torch.Tensor]: ...

    def map_to_kv_tensors(self, offsets: list[int]) -> bool: ...

    def unmap_from_kv_tensors(self, offsets: list[int]) -> bool: ...

    def shutdown_kvcached(self) -> None: ...


class Kvcached:
    """CUDA virtual memory through kvcached. At most one per process: a second one frees the first.

    It maps pieces: the largest that divide an extent and have at most PIECE_BYTES_MAX, because each
    costs four calls of the driver, about 100 us. `map_ahead` maps on a thread.

    Unmap and close wait for the event of the newest launched step, never for the whole device. A
    step in flight reads no range that is not mapped, so map waits for nothing. kvcached itself waits
    for nothing, and while it replaces a page, nothing is mapped there briefly.

    kvcached 0.1.6, from its source csrc/{torch_bindings,allocator,ftensor,page}.cpp:
    - It maps pages of `page_size` (multiples of 2 MiB) x layers x buffers. With one layer and one
      buffer, a page is a granule and the reservation is one int8 tensor. These calls ignore its
      environment variables.
    - Offsets are bytes from the start, one per page. A list is mapped as a whole or not at all;
      older releases end the process instead. Pages that are already mapped (unmapped) are skipped
      silently.
    - One physical page lies under every range that is not mapped: a read there never faults and
      returns undefined bytes, a write is lost. Mapping does not initialise memory.
    - A refusal is a RuntimeError with the driver's message. "state_inconsistency" in it means that
      the rollback failed too, and the reservation cannot be used any more.
    - Calls take a lock and release the GIL.
    """

    GRANULE_BYTES = 2 << 20
    PIECE_BYTES_MAX = 64 << 20

    def __init__(
        self,
        num_bytes: int,
        device: str = "cuda:0",
        vmm_ops: VmmOps | None = None,
        last_step: Callable[[], Event | None] = lambda: None,
        extent_bytes: int = GRANULE_BYTES,
    ) -> None:
        """Raise BackingUnavailable without kvcached or a device, OutOfMemory without memory. Ranges are
        multiples of `extent_bytes`."""
        assert num_bytes % extent_bytes == 0
        self.granule_bytes = piece_bytes(extent_bytes)
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise BackingUnavailable(
                f"no CUDA device for {device}: install a CUDA build of torch, or use mmap"
            )
        self._ops = _installed_vmm_ops() if vmm_ops is None else vmm_ops
        self._last_step = last_step
        self._device = device
        self._open = True
        self._ahead = _Ahead(self._map_quietly)
        self._ops.init_kvcached(device, self.granule_bytes, contiguous_layout=True)
        try:
            tensors = self._ops.create_kv_tensors(num_bytes, 1, device, num_layers=1, num_kv_buffers=1)
        except RuntimeError as error:
            self.close()
            self._raise_refusal(self.granule_bytes, error)
            raise
        self.memory = tensors[0].view(torch.uint8)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        """Map what `map_ahead` has not mapped."""
        offsets = self._granules(offset_bytes, num_bytes)
        try:
            created = self._ops.map_to_kv_tensors(offsets)
        except RuntimeError as error:
            self._raise_refusal(num_bytes, error)
            raise
        assert created

    def map_ahead(self, offset_bytes: int, num_bytes: int) -> None:
        """Map on a thread, without the GIL."""
        self._granules(offset_bytes, num_bytes)
        self._ahead.add(offset_bytes, num_bytes)

    def unmap(self, offset_bytes: int, num_bytes: int) -> None:
        offsets = self._granules(offset_bytes, num_bytes)
        self._ahead.stop()  # it would map the range again
        self._wait()
        created = self._ops.unmap_from_kv_tensors(offsets)
        assert created

    def close(self) -> None:
        """Release memory and addresses: a late reader faults."""
        if self._open:
            self._open = False
            self._ahead.stop()
            try:
                self._wait()
            finally:
                self._ops.shutdown_kvcached()

    def _map_quietly(self, offset_bytes: int, num_bytes: int) -> bool:
        with suppress(RuntimeError):  # `map` reports it
            return self._ops.map_to_kv_tensors(self._granules(offset_bytes, num_bytes))
        return False

    def _granules(self, offset_bytes: int, num_bytes: int) -> list[int]:
        assert self._open
        _check_range(self, offset_bytes, num_bytes)
        return list(range(offset_bytes, offset_bytes + num_bytes, self.granule_bytes))

    def _wait(self) -> None:
        event = self._last_step()
        if event is not None and not event.query():
            event.synchronize()

    def _raise_refusal(self, num_bytes: int, error: RuntimeError) -> None:
        """Raise OutOfMemory if waiting or evicting can help; return for any other error."""
        if "out of memory" in str(error) and "state_inconsistency" not in str(error):
            raise OutOfMemory(
                f"{self._device} does not grant {num_bytes:,} bytes:"
                " lower the memory of this worker, or stop other processes on the device"
            ) from error


def piece_bytes(extent_bytes: int) -> int:
    """Return the size of the pieces that Kvcached maps: the largest multiple of its granule that divides an
    extent and is at most PIECE_BYTES_MAX. `extent_bytes` is a multiple of the granule."""
    granule = Kvcached.GRANULE_BYTES
    assert extent_bytes % granule == 0
    return max(
        piece
        for piece in range(granule, min(extent_bytes, Kvcached.PIECE_BYTES_MAX) + 1, granule)
        if extent_bytes % piece == 0
    )


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
    """Map private zeroed memory at a page-aligned address. Raises OutOfMemory if refused."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    except OSError as error:
        raise OutOfMemory(
            f"the system does not grant {num_bytes} bytes of address space ({error.strerror}):"
            " ask for less memory, or set vm.overcommit_memory to 0 or 1"
        ) from error
