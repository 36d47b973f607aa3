"""Weights share chunks of memory, each of which ends with its last tensor."""

import mmap
import weakref
from typing import Self

import pytest
import torch

from tidemill.kernels.shared import huge_pages
from tidemill.kernels.shared.huge_pages import HUGE_BYTES, LINE_BYTES, HugePages


def test_tensors_begin_at_lines_and_do_not_overlap() -> None:
    memory = HugePages()
    tensors = [memory.empty(3, n, dtype=torch.bfloat16).fill_(n) for n in range(1, 40)]
    for n, tensor in enumerate(tensors, 1):
        assert tensor.data_ptr() % LINE_BYTES == 0
        assert tensor.shape == (3, n)
        assert tensor.eq(n).all()


def test_small_tensors_share_a_chunk_that_begins_at_a_huge_page() -> None:
    memory = HugePages()
    first, second = (memory.empty(100, dtype=torch.float32) for _ in range(2))
    assert first.data_ptr() % HUGE_BYTES == 0
    assert second.data_ptr() - first.data_ptr() == 448  # whole lines


def test_tensor_may_be_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", HUGE_BYTES)
    memory = HugePages()
    small = memory.empty(8, dtype=torch.uint8).fill_(1)
    large = memory.empty(3 * HUGE_BYTES, dtype=torch.uint8).fill_(7)
    assert small.eq(1).all()
    assert large.eq(7).all()


def test_chunk_is_freed_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []

    class Watched(mmap.mmap):
        def __new__(cls, fileno: int, length: int, flags: int) -> Self:
            made = super().__new__(cls, fileno, length, flags)
            weakref.finalize(made, freed.append, length)
            return made

    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", HUGE_BYTES)
    monkeypatch.setattr(mmap, "mmap", Watched)
    memory = HugePages()
    tensors = [memory.empty(HUGE_BYTES // 2, dtype=torch.uint8) for _ in range(3)]
    del tensors[2], memory
    assert len(freed) == 1
    tensors.clear()
    assert len(freed) == 2
