"""Kvcached on a real device: memory that flows back, neighbours that stay, and no wait for other streams."""

from collections.abc import Generator
from importlib.util import find_spec

import pytest
import torch

from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.backing import Event, Kvcached

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("kvcached") is None, reason="needs a CUDA device and kvcached"
)

EXTENT_BYTES = 16 * Kvcached.GRANULE_BYTES
EXTENTS = 8
STEP_CYCLES = 200_000_000  # about 0.1 s
OTHER_CYCLES = 20_000_000_000  # about 10 s: longer than map and unmap by far, so still there after them


class Steps:
    """The newest step launched."""

    newest: Event | None = None


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def backing(steps: Steps) -> Generator[Kvcached, None, None]:
    backing = Kvcached(EXTENTS * EXTENT_BYTES, last_step=lambda: steps.newest)
    yield backing
    torch.cuda.synchronize()
    backing.close()


def free_bytes() -> int:
    return torch.cuda.mem_get_info(0)[0]


def extent(backing: Kvcached, index: int) -> torch.Tensor:
    return backing.memory[index * EXTENT_BYTES : (index + 1) * EXTENT_BYTES]


def test_memory_has_the_layout_of_the_arena(backing: Kvcached) -> None:
    memory = backing.memory
    assert (memory.dtype, memory.shape) == (torch.uint8, (EXTENTS * EXTENT_BYTES,))
    assert memory.device == torch.device("cuda:0")
    assert memory.is_contiguous()
    assert memory.storage_offset() == 0


def test_device_memory_follows_the_mapped_bytes(backing: Kvcached) -> None:
    before = free_bytes()
    backing.map(0, 3 * EXTENT_BYTES)
    assert before - free_bytes() == pytest.approx(3 * EXTENT_BYTES, abs=EXTENT_BYTES // 2)
    backing.unmap(EXTENT_BYTES, 2 * EXTENT_BYTES)
    assert before - free_bytes() == pytest.approx(EXTENT_BYTES, abs=EXTENT_BYTES // 2)
    backing.unmap(0, EXTENT_BYTES)
    assert before - free_bytes() == pytest.approx(0, abs=EXTENT_BYTES // 2)


def test_bytes_survive_changes_of_their_neighbours(backing: Kvcached) -> None:
    address = backing.memory.data_ptr()
    for index in range(3):
        backing.map(index * EXTENT_BYTES, EXTENT_BYTES)
        extent(backing, index).fill_(index + 1)
    torch.cuda.synchronize()
    backing.unmap(EXTENT_BYTES, EXTENT_BYTES)
    backing.map(3 * EXTENT_BYTES, EXTENT_BYTES)
    extent(backing, 3).fill_(4)
    for index in (0, 2, 3):
        assert bool((extent(backing, index) == index + 1).all())
    assert backing.memory.data_ptr() == address


def test_read_of_unmapped_memory_does_not_break_the_device(backing: Kvcached) -> None:
    backing.map(0, EXTENT_BYTES)
    backing.unmap(0, EXTENT_BYTES)
    torch.stack([extent(backing, 0), extent(backing, 1)]).sum().item()


def test_refused_map_leaves_nothing_half_mapped(backing: Kvcached) -> None:
    backing.map(0, EXTENT_BYTES)
    extent(backing, 0).fill_(7)
    torch.cuda.synchronize()
    taken = torch.empty(free_bytes() - 2 * EXTENT_BYTES, dtype=torch.uint8, device="cuda:0")
    before = free_bytes()
    with pytest.raises(OutOfMemory, match="lower the memory of this worker"):
        backing.map(EXTENT_BYTES, 7 * EXTENT_BYTES)
    assert free_bytes() == pytest.approx(before, abs=EXTENT_BYTES // 2)
    assert bool((extent(backing, 0) == 7).all())
    del taken
    torch.cuda.empty_cache()
    backing.map(EXTENT_BYTES, 7 * EXTENT_BYTES)
    assert bool((extent(backing, 0) == 7).all())


def test_close_gives_everything_back() -> None:
    Kvcached(EXTENTS * EXTENT_BYTES).close()  # what the driver keeps for itself is kept from here on
    before = free_bytes()
    backing = Kvcached(EXTENTS * EXTENT_BYTES)
    backing.map(0, EXTENTS * EXTENT_BYTES)
    backing.close()
    backing.close()
    assert free_bytes() == pytest.approx(before, abs=EXTENT_BYTES // 2)


def test_map_and_unmap_wait_for_the_step_and_not_for_the_device(backing: Kvcached, steps: Steps) -> None:
    backing.map(0, 2 * EXTENT_BYTES)
    step_stream, other_stream = torch.cuda.Stream(), torch.cuda.Stream()
    result = torch.zeros(1, dtype=torch.int64, device="cuda:0")
    # A kernel is loaded when it is launched first, which may wait for what runs.
    torch.cuda._sleep(1)
    torch.sum(extent(backing, 0).fill_(1), dim=0, keepdim=True, out=result)
    torch.cuda.synchronize()
    with torch.cuda.stream(other_stream):
        torch.cuda._sleep(OTHER_CYCLES)
        other = other_stream.record_event()
    with torch.cuda.stream(step_stream):
        torch.cuda._sleep(STEP_CYCLES)
        extent(backing, 0).fill_(5)
        torch.sum(extent(backing, 0), dim=0, keepdim=True, out=result)
        step = step_stream.record_event()
    steps.newest = step
    assert not step.query(), "the step ended before it was needed"
    backing.unmap(0, EXTENT_BYTES)
    assert step.query()
    backing.map(2 * EXTENT_BYTES, EXTENT_BYTES)
    assert not other.query(), "map or unmap waited for the whole device"
    torch.cuda.synchronize()
    assert result.item() == 5 * EXTENT_BYTES
