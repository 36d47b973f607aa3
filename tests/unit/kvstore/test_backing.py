"""Backings: one address for life, and memory that really goes back to the system."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tidemill.kvstore.backing import PAGE_BYTES, Backing, Fixed, Mmap
from tidemill.kvstore.errors import OutOfMemory

MIB = 1 << 20
NOISE_BYTES = 8 * MIB

BACKINGS: dict[str, Callable[[int], Backing]] = {"fixed": Fixed, "mmap": Mmap}


@pytest.fixture(params=BACKINGS)
def backing(request: pytest.FixtureRequest) -> Backing:
    return BACKINGS[request.param](4 * MIB)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")


def test_memory_is_what_the_arena_expects(backing: Backing) -> None:
    memory = backing.memory
    assert (memory.dtype, memory.shape) == (torch.uint8, (4 * MIB,))
    assert memory.is_contiguous()
    assert memory.storage_offset() == 0  # as_strided of the caches counts from the start of the storage
    assert memory.data_ptr() % PAGE_BYTES == 0


def test_mapped_ranges_keep_their_bytes_and_their_address(backing: Backing) -> None:
    address = backing.memory.data_ptr()
    backing.map(0, 3 * MIB)
    backing.memory[: 3 * MIB] = 7
    backing.map(0, MIB)
    backing.unmap(MIB, MIB)
    backing.map(3 * MIB, MIB)
    assert backing.memory.data_ptr() == address
    assert bool((backing.memory[:MIB] == 7).all())
    assert bool((backing.memory[2 * MIB : 3 * MIB] == 7).all())


def test_close_may_come_twice(backing: Backing) -> None:
    backing.map(0, MIB)
    backing.close()
    backing.close()


def test_reserving_is_free_and_unmapping_returns_memory() -> None:
    before = resident_bytes()
    backing = Mmap(1 << 40)
    assert resident_bytes() - before < NOISE_BYTES
    backing.map(512 << 30, 96 * MIB)
    backing.memory[512 << 30 : (512 << 30) + 96 * MIB] = 7
    assert resident_bytes() - before > 96 * MIB - NOISE_BYTES
    backing.unmap((512 << 30) + 32 * MIB, 64 * MIB)
    assert abs(resident_bytes() - before - 32 * MIB) < NOISE_BYTES
    assert bool((backing.memory[512 << 30 : (512 << 30) + 32 * MIB] == 7).all())
    backing.close()
    assert resident_bytes() - before < NOISE_BYTES


def test_mapping_makes_memory_resident_before_it_is_used() -> None:
    backing = Mmap(64 * MIB)
    before = resident_bytes()
    backing.map(0, 64 * MIB)
    assert resident_bytes() - before > 64 * MIB - NOISE_BYTES


def test_views_outlive_the_backing() -> None:
    view = Mmap(MIB).memory[PAGE_BYTES:]
    view.fill_(3)
    assert int(view.to(torch.int64).sum()) == 3 * (MIB - PAGE_BYTES)


@pytest.mark.parametrize(
    ("offset", "size"), [(1, PAGE_BYTES), (0, 1), (0, 0), (MIB, PAGE_BYTES), (-4096, 4096)]
)
def test_ranges_outside_or_across_pages_are_bugs(offset: int, size: int) -> None:
    backing = Mmap(MIB)
    with pytest.raises(AssertionError):
        backing.map(offset, size)
    with pytest.raises(AssertionError):
        backing.unmap(offset, size)


@pytest.mark.parametrize("make", BACKINGS.values(), ids=BACKINGS.keys())
def test_more_than_the_address_space_is_out_of_memory(make: Callable[[int], Backing]) -> None:
    with pytest.raises(OutOfMemory, match="ask for less memory"):
        make(1 << 60)
