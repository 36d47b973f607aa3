"""Backings keep their address, return unmapped memory, and refuse a range as a whole."""

import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.e2e.server import eventually
from tests.support.kvstore.fake_vmm import FakeVmm
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.backing import (
    PAGE_BYTES,
    Backing,
    BackingUnavailable,
    Event,
    Fixed,
    Kvcached,
    Mmap,
    piece_bytes,
)

MIB = 1 << 20
UNIT = 2 * MIB  # a multiple of every granule
POPULATE_WRITE = 23


def kvcached(num_bytes: int) -> Kvcached:
    return Kvcached(num_bytes, "cpu", FakeVmm())


BACKINGS: dict[str, Callable[[int], Backing]] = {"fixed": Fixed, "mmap": Mmap, "kvcached": kvcached}


@pytest.fixture(params=BACKINGS)
def backing(request: pytest.FixtureRequest) -> Backing:
    return BACKINGS[request.param](4 * UNIT)


def resident_pages(memory: torch.Tensor) -> list[bool]:
    """Return for each page whether it is in memory or swap: the top bits of its pagemap entry."""
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(memory.data_ptr() // PAGE_BYTES * 8)
        entries = pagemap.read(memory.numel() // PAGE_BYTES * 8)
    return [top >= 1 << 6 for top in entries[7::8]]


def resident_bytes(memory: torch.Tensor) -> int:
    return sum(resident_pages(memory)) * PAGE_BYTES


def test_backing_keeps_bytes_and_address_of_mapped_ranges(backing: Backing) -> None:
    memory = backing.memory
    address = memory.data_ptr()
    assert (memory.dtype, memory.shape) == (torch.uint8, (4 * UNIT,))
    assert memory.is_contiguous()
    assert memory.storage_offset() == 0  # as_strided counts from the start of the storage
    assert address % PAGE_BYTES == 0 or isinstance(backing, Kvcached)
    backing.map(0, 3 * UNIT)
    memory[: 3 * UNIT] = 7
    backing.unmap(UNIT, UNIT)
    backing.map(3 * UNIT, UNIT)
    assert backing.memory.data_ptr() == address
    assert bool((memory[:UNIT] == 7).all())
    assert bool((memory[2 * UNIT : 3 * UNIT] == 7).all())
    view = memory[2 * UNIT :]
    backing.close()
    backing.close()
    assert view.numel() == 2 * UNIT
    assert isinstance(backing, Kvcached) or int(view[0]) >= 0, "a view is valid after close"


def test_mmap_takes_memory_ahead_of_map_and_returns_it_on_unmap() -> None:
    backing = Mmap(1 << 40)
    around = backing.memory[: 128 * MIB]
    backing.map_ahead(0, 64 * MIB)
    backing.map_ahead(64 * MIB, 33 * MIB)
    backing.map(0, 64 * MIB)
    around[: 64 * MIB] = 7
    backing.unmap(64 * MIB, 33 * MIB)  # waits for the thread
    assert resident_bytes(around) == 64 * MIB
    assert bool((around[: 64 * MIB] == 7).all())
    backing.map_ahead(64 * MIB, 33 * MIB)
    eventually(lambda: resident_bytes(around) == 97 * MIB)
    backing.close()
    assert resident_bytes(around) == 0


RANGES = st.tuples(st.integers(0, 63), st.integers(1, 64)).map(
    lambda pair: range(pair[0], min(64, sum(pair)))
)


@given(wanted=st.lists(RANGES, max_size=20))
def test_mmap_unmaps_exactly_the_given_ranges(wanted: list[range]) -> None:
    backing = Mmap(64 * PAGE_BYTES)
    mapped: dict[int, int] = {}  # page -> its fill
    for fill, pages in enumerate(wanted):
        span = slice(pages.start, pages.stop)
        offset, size = pages.start * PAGE_BYTES, len(pages) * PAGE_BYTES
        if mapped.keys() & set(pages):
            backing.unmap(offset, size)
            assert not any(resident_pages(backing.memory)[span])
            mapped = {page: fill for page, fill in mapped.items() if page not in pages}
        else:
            backing.map(offset, size)
            assert all(resident_pages(backing.memory)[span])
            backing.memory[offset : offset + size] = fill
            mapped |= dict.fromkeys(pages, fill)
        assert all(resident_pages(backing.memory)[page] for page in mapped)
        for page, value in mapped.items():
            assert bool((backing.memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == value).all())


class FailingMmap(mmap.mmap):
    """An mmap that populates two pieces of memory and then fails with `error`."""

    error = 0
    pieces = 0

    def madvise(self, option: int, start: int = 0, length: int | None = None, /) -> None:
        length = len(self) if length is None else length
        if option == POPULATE_WRITE:
            if FailingMmap.pieces == 2:
                raise OSError(FailingMmap.error, os.strerror(FailingMmap.error))
            FailingMmap.pieces += 1
        super().madvise(option, start, length)


def failing_mmap(monkeypatch: pytest.MonkeyPatch, error: int, pieces: int) -> Mmap:
    monkeypatch.setattr(FailingMmap, "error", error)
    monkeypatch.setattr(FailingMmap, "pieces", pieces)
    monkeypatch.setattr("tidemill.kvstore.memory.backing.mmap.mmap", FailingMmap)
    return Mmap(64 * MIB)


@pytest.mark.parametrize("error", [errno.ENOMEM, errno.EFAULT, errno.EAGAIN])
def test_mmap_maps_nothing_when_the_system_refuses_a_part(
    monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    backing = failing_mmap(monkeypatch, error, pieces=0)
    with pytest.raises(OutOfMemory, match="lower the memory of this worker"):
        backing.map(16 * MIB, 32 * MIB)
    assert not any(resident_pages(backing.memory))


def test_mmap_passes_on_errors_that_are_not_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        failing_mmap(monkeypatch, errno.EIO, pieces=0).map(0, 32 * MIB)


def test_mmap_touches_pages_when_the_kernel_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    backing = failing_mmap(monkeypatch, errno.EINVAL, pieces=2)
    backing.map(16 * MIB, 32 * MIB)
    resident = resident_pages(backing.memory)
    assert all(resident[16 * MIB // PAGE_BYTES : 48 * MIB // PAGE_BYTES])


def test_mmap_walks_once_over_memory_that_is_there_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    backing = failing_mmap(monkeypatch, errno.EIO, pieces=2)  # any further walk of `map` raises
    for offset_bytes in (0, 16 * MIB):
        backing.map_ahead(offset_bytes, 16 * MIB)
    eventually(lambda: all(resident_pages(backing.memory)[: 32 * MIB // PAGE_BYTES]))
    eventually(lambda: not any(thread.name == "map-ahead" for thread in threading.enumerate()))
    backing.map(0, 16 * MIB)
    backing.unmap(0, 16 * MIB)
    backing.unmap(16 * MIB, 16 * MIB)
    for offset_bytes in (0, 16 * MIB, 32 * MIB):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            backing.map(offset_bytes, 16 * MIB)


@pytest.mark.parametrize("make", [Mmap, kvcached])
@pytest.mark.parametrize("units", [(0.5, 1), (0, 0.5), (0, 0), (4, 1), (-1, 1), (3, 2)])
def test_backing_asserts_ranges_in_whole_granules(
    make: Callable[[int], Mmap | Kvcached], units: tuple[float, float]
) -> None:
    backing = make(4 * make(UNIT).granule_bytes)
    offset, size = (int(part * backing.granule_bytes) for part in units)
    with pytest.raises(AssertionError):
        backing.map(offset, size)
    with pytest.raises(AssertionError):
        backing.unmap(offset, size)


@pytest.mark.parametrize("make", [Fixed, Mmap])
def test_host_backing_raises_out_of_memory_beyond_the_address_space(make: Callable[[int], Backing]) -> None:
    with pytest.raises(OutOfMemory, match="ask for less memory"):
        make(1 << 60)


EXTENT_GRANULES, EXTENTS = 3, 4


@settings(max_examples=50)
@given(
    toggled=st.lists(st.integers(0, EXTENTS - 1), max_size=12), pages=st.integers(1, 1 + 3 * EXTENT_GRANULES)
)
def test_kvcached_maps_a_range_whole_or_not_at_all(toggled: list[int], pages: int) -> None:
    granule = Kvcached.GRANULE_BYTES
    extent_bytes = EXTENT_GRANULES * granule
    vmm = FakeVmm(physical_pages=pages)
    backing = Kvcached(EXTENTS * extent_bytes, "cpu", vmm)
    mapped: dict[int, int] = {}  # extent -> its fill
    for fill, extent in enumerate(toggled):
        offset = extent * extent_bytes
        if extent in mapped:
            backing.unmap(offset, extent_bytes)
            del mapped[extent]
        elif pages - 1 < (len(mapped) + 1) * EXTENT_GRANULES:
            with pytest.raises(OutOfMemory, match="lower the memory of this worker"):
                backing.map(offset, extent_bytes)
        else:
            backing.map(offset, extent_bytes)
            backing.memory[offset : offset + extent_bytes] = fill
            mapped[extent] = fill
        assert vmm.mapped == {
            each * extent_bytes + i * granule for each in mapped for i in range(EXTENT_GRANULES)
        }
        for each, value in mapped.items():
            bytes_of_pages = backing.memory[each * extent_bytes : (each + 1) * extent_bytes : PAGE_BYTES]
            assert bool((bytes_of_pages == value).all())
    backing.close()
    assert vmm.physical_pages == pages


@pytest.mark.parametrize(
    "refusal",
    [
        "zero page unmap failed in CUDA: an illegal memory access was encountered",
        "state_inconsistency: physical page map failed: out of memory; rollback failed: out of memory",
    ],
)
def test_kvcached_passes_on_errors_of_a_broken_device(refusal: str) -> None:
    vmm = FakeVmm(physical_pages=2, refusal=refusal)
    backing = Kvcached(2 * UNIT, "cpu", vmm)
    with pytest.raises(RuntimeError, match=refusal.partition(":")[0]):
        backing.map(0, 2 * UNIT)


def test_kvcached_shuts_down_when_the_device_has_no_memory() -> None:
    vmm = FakeVmm(physical_pages=0)
    with pytest.raises(OutOfMemory, match="stop other processes on the device"):
        Kvcached(2 * UNIT, "cpu", vmm)
    assert vmm.log == ["init", "shutdown"]


class Step:
    """A step that runs until a caller waits for it."""

    def __init__(self, log: list[str], name: str, *, done: bool = False) -> None:
        self._log = log
        self._name = name
        self._done = done

    def query(self) -> bool:
        return self._done

    def synchronize(self) -> None:
        self._log.append(self._name)
        self._done = True


def test_kvcached_waits_for_the_newest_step() -> None:
    vmm = FakeVmm()
    newest: list[Event | None] = [None]
    backing = Kvcached(UNIT, "cpu", vmm, lambda: newest[0])
    newest[0] = Step(vmm.log, "step 1")
    backing.map(0, UNIT)
    backing.unmap(0, UNIT)
    newest[0] = Step(vmm.log, "step 2", done=True)
    backing.map(0, UNIT)
    newest[0] = Step(vmm.log, "step 3")
    backing.unmap(0, UNIT)
    newest[0] = Step(vmm.log, "step 4")
    backing.close()
    assert vmm.log == ["init", "map", "step 1", "unmap", "map", "step 3", "unmap", "step 4", "shutdown"]


def test_kvcached_maps_pieces_that_divide_an_extent() -> None:
    sizes = {2: 2, 64: 64, 66: 22, 128: 64, 306: 34, 2 * 37: 2}
    assert {extent: piece_bytes(extent * MIB) // MIB for extent in sizes} == sizes
    vmm = FakeVmm()
    backing = Kvcached(3 * 66 * MIB, "cpu", vmm, extent_bytes=66 * MIB)
    backing.map(66 * MIB, 66 * MIB)
    assert vmm.mapped == {66 * MIB, 88 * MIB, 110 * MIB}


class SlowVmm(FakeVmm):
    """A device that grants nothing on a thread until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def map_to_kv_tensors(self, offsets: list[int]) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait(10)
        return super().map_to_kv_tensors(offsets)


def test_kvcached_maps_ahead_on_a_thread() -> None:
    vmm = SlowVmm()
    backing = Kvcached(4 * UNIT, "cpu", vmm)
    backing.map_ahead(UNIT, UNIT)
    backing.map(0, UNIT)
    assert vmm.mapped == {0}, "the caller does not wait"
    vmm.gate.set()
    eventually(lambda: vmm.mapped == {0, UNIT})
    backing.memory[UNIT : 2 * UNIT] = 7
    backing.map(UNIT, UNIT)  # already there: its bytes stay
    assert bool((backing.memory[UNIT : 2 * UNIT] == 7).all())
    vmm.gate.clear()
    backing.map_ahead(2 * UNIT, UNIT)
    backing.map_ahead(3 * UNIT, UNIT)
    threading.Timer(0.05, vmm.gate.set).start()
    backing.unmap(3 * UNIT, UNIT)  # waits for the range before it
    assert vmm.mapped == {0, UNIT, 2 * UNIT}
    backing.close()
    assert vmm.memory is None


def test_kvcached_reports_a_refusal_when_the_range_is_needed() -> None:
    vmm = FakeVmm(physical_pages=2)
    backing = Kvcached(4 * UNIT, "cpu", vmm)
    backing.map_ahead(0, UNIT)
    backing.map_ahead(UNIT, UNIT)
    eventually(lambda: vmm.mapped == {0})
    backing.map(0, UNIT)
    with pytest.raises(OutOfMemory, match="lower the memory of this worker"):
        backing.map(UNIT, UNIT)


class Faulted:
    """A step that has broken the device."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_kvcached_close_frees_memory_after_a_failed_step() -> None:
    vmm = FakeVmm()
    newest: list[Event | None] = [None]
    backing = Kvcached(UNIT, "cpu", vmm, lambda: newest[0])
    backing.map(0, UNIT)
    newest[0] = Faulted()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        backing.unmap(0, UNIT)
    assert vmm.mapped == {0}
    with pytest.raises(RuntimeError, match="illegal memory access"):
        backing.close()
    assert vmm.memory is None


def test_kvcached_second_close_keeps_a_later_reservation() -> None:
    vmm = FakeVmm()
    first = Kvcached(UNIT, "cpu", vmm)
    first.close()
    second = Kvcached(UNIT, "cpu", vmm)
    second.map(0, UNIT)
    first.close()
    assert vmm.mapped == {0}
    with pytest.raises(AssertionError):
        first.map(0, UNIT)


def test_kvcached_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackingUnavailable, match="no CUDA device for cuda:0"):
        Kvcached(UNIT)
    monkeypatch.setitem(sys.modules, "kvcached", None)
    with pytest.raises(BackingUnavailable, match=r"pip install --no-build-isolation 'tidemill\[gpu\]'"):
        Kvcached(UNIT, "cpu")
