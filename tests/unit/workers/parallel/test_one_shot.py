"""Sums in one launch over memory that GPUs map from each other: which sums go this way, and their order."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import HashStore, distributed_c10d

from tests.support.waits import WAIT_S_MAX
from tests.unit.workers.test_device import settings_with
from tidemill.workers.parallel import one_shot
from tidemill.workers.parallel.distributed import SAME_INDEX, Distributed, folder_store, named_group
from tidemill.workers.parallel.one_shot import NAME, OneShot
from tidemill.workers.settings import SettingsError

CPU = torch.device("cpu")
SIZE, BYTES_MAX = 3, 96


class FakeSymmetricMemory:
    """Ranks on threads that read each other's tensors, as the kernel of torch does."""

    def __init__(self) -> None:
        self.buffers: dict[int, torch.Tensor] = {}
        self.calls: list[tuple[int, ...]] = []
        self._ranks: dict[int, int] = {}
        self._barrier = Barrier(SIZE)

    def rank(self, index: int) -> SimpleNamespace:
        """Return the class as one rank sees it."""

        def rendezvous(buffer: torch.Tensor, name: str) -> None:
            torch_groups: Any = distributed_c10d
            group = torch_groups._resolve_process_group(name)
            assert (group.rank(), group.size()) == (index, SIZE)
            assert os.environ[SAME_INDEX] == "1"
            self.buffers[index] = buffer
            self._ranks[buffer.data_ptr()] = index

        return SimpleNamespace(
            set_group_info=lambda name, rank, size, store: store.set(name, f"{rank} of {size}"),
            empty_strided_p2p=lambda size, stride, dtype, device: torch.empty_strided(
                size, stride, dtype=dtype, device=device
            ),
            rendezvous=rendezvous,
        )

    def one_shot_all_reduce_copy(
        self, own: torch.Tensor, terms: torch.Tensor, kind: str, name: str
    ) -> torch.Tensor:
        assert (kind, name, own.shape, own.dtype) == ("sum", NAME, terms.shape, terms.dtype)
        own.copy_(terms)
        self._barrier.wait()
        found = torch.zeros_like(terms)
        for index in range(SIZE):
            found += self.buffers[index][: own.nbytes].view(own.dtype)
        self._barrier.wait()
        if self._ranks[own.data_ptr()] == 0:
            self.calls.append(tuple(terms.shape))
        return found


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeSymmetricMemory:
    fake = FakeSymmetricMemory()
    monkeypatch.setenv(SAME_INDEX, "0")
    monkeypatch.setattr(torch.ops, "symm_mem", fake, raising=False)
    return fake


def opened_by(index: int, size: int) -> OneShot:
    store = HashStore()
    return OneShot(store, named_group(NAME, store, index, size), CPU, BYTES_MAX)


def sums(
    memory: FakeSymmetricMemory,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    terms: list[list[torch.Tensor]],
) -> list[list[torch.Tensor]]:
    """Return the sums of each rank, of its terms."""
    opened = []
    for index in range(SIZE):
        monkeypatch.setattr(one_shot, "_symmetric_memory", lambda index=index: memory.rank(index))
        opened.append(opened_by(index, SIZE))

    def run(index: int) -> list[torch.Tensor]:
        store = folder_store(folder, SIZE)
        ranks = Distributed(store, index, SIZE, "gloo", WAIT_S_MAX, None, opened[index])
        with closing(ranks):
            return [ranks.reduce(term) for term in terms[index]]

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(run, range(SIZE)))


def test_small_sums_of_floats_go_through_mapped_memory_and_all_others_do_not(
    memory: FakeSymmetricMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways add in the order of the ranks: the terms have other bits in every order."""
    shapes: list[tuple[tuple[int, ...], Any]] = [
        ((3, 8), torch.float32),  # exactly the maximum
        ((4, 8), torch.float32),  # beyond it
        ((6, 8), torch.bfloat16),
        ((1, 1), torch.float32),  # of no whole load
        ((2, 2), torch.float64),  # of another type
        ((2, 2), torch.float32),
        ((2, 6), torch.float32),  # turned, so that it does not lie in one run
    ]
    draw = torch.Generator().manual_seed(1)
    terms = [
        [torch.randn(shape, generator=draw).exp().to(dtype) for shape, dtype in shapes] for _ in range(SIZE)
    ]
    for own in terms:
        own[-1] = own[-1].T
    found = sums(memory, tmp_path, monkeypatch, terms)
    assert memory.calls == [(24,), (48,), (4,), (12,)]
    for every in found:
        for total, (first, second, third) in zip(every, zip(*terms, strict=True), strict=True):
            assert torch.equal(total, first + second + third)


def test_gpus_that_cannot_map_each_other_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("peer access is not supported\nC++ stack")

    fake = SimpleNamespace(set_group_info=refuse)
    monkeypatch.setenv(SAME_INDEX, "0")
    monkeypatch.setattr(one_shot, "_symmetric_memory", lambda: fake)
    with pytest.raises(SettingsError, match=r"map each other's memory \(peer access .* leave it out$"):
        opened_by(0, 2)


def test_nccl_sums_on_the_stream_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a sum returns nothing to wait for."""
    group = Mock()
    group.allreduce.return_value = None
    monkeypatch.setattr("tidemill.workers.parallel.distributed._group", Mock(return_value=group))
    x_TN = torch.ones(2, 2)
    assert Distributed(Mock(), 0, 2, "nccl", WAIT_S_MAX).reduce(x_TN) is x_TN
    (_, options), _ = group.allreduce.call_args
    assert not options.asyncOp


def test_where_it_cannot_work_it_is_refused() -> None:
    group: dict[str, Any] = {"device": "cuda", "tensor_parallel_size": 2}
    group["tensor_parallel_one_shot"] = "256KiB"
    assert settings_with(**group).one_shot_bytes == 1 << 18
    for changes in (
        {"tensor_parallel_reduce": "exact"},
        {"tensor_parallel_backend": "gloo", "enforce_eager": True},
        {"tensor_parallel_nodes": 2},
        {"tensor_parallel_size": 1},
        {"device": "cpu", "tensor_parallel_reduce": "fast"},
    ):
        with pytest.raises(SettingsError, match=r"^--tensor-parallel-one-shot is for .*: leave it out$"):
            settings_with(**dict[str, Any](group, **changes))
