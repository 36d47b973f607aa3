"""The NUMA node of a rank, by a made-up sysfs, and the CPUs of a process that keeps to one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.workers.test_device import settings_with
from tidemill.workers.device import numa_node_of
from tidemill.workers.numa import NumaNode, bits_of, cpus_of, keep_on, node_of_gpu, node_of_rank
from tidemill.workers.settings import SettingsError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
FIRST, SECOND = NumaNode(0, frozenset({0, 1, 8, 9})), NumaNode(1, frozenset({2, 3, 10, 11}))
GPUS = {"0000:3b:00.0": "0\n", "0001:af:00.0": "1\n", "0000:04:00.0": "-1\n"}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets, and memory without CPUs, as a Grace Hopper's GPU is."""
    for index, cpus in ((0, "0-1,8-9\n"), (1, "2-3,10-11\n"), (2, "\n")):
        folder = tmp_path / f"devices/system/node/node{index}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for address, node in GPUS.items():
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(node)
    return tmp_path


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        ("0000:3b:00.0", FIRST),
        ("0001:AF:00.0", SECOND),
        ("0000:04:00.0", None),  # the kernel knows no node
        ("0000:ff:00.0", None),  # the container hides it
    ],
)
def test_node_of_a_gpu(address: str, wanted: NumaNode | None, sysfs: Path) -> None:
    assert node_of_gpu(address, sysfs) == wanted


def test_machine_without_sysfs_has_no_nodes(tmp_path: Path) -> None:
    assert node_of_gpu("0000:3b:00.0", tmp_path) is None
    assert node_of_rank(0, 2, tmp_path) is None


def test_ranks_on_cpus_share_out_the_nodes(sysfs: Path) -> None:
    assert [node_of_rank(rank, 2, sysfs) for rank in range(2)] == [FIRST, SECOND]
    assert [node_of_rank(rank, 4, sysfs) for rank in range(4)] == [FIRST, FIRST, SECOND, SECOND]
    assert [node_of_rank(rank, 3, sysfs) for rank in range(3)] == [FIRST, FIRST, SECOND]


def test_node_of_a_worker_and_its_ranks(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {CUDA: gpu}.__getitem__)
    assert numa_node_of(settings_with(device="cuda"), 0, CUDA, sysfs) is None, "not wanted"
    assert numa_node_of(settings_with(device="cuda", numa_bind=True), 0, CUDA, sysfs) == SECOND
    group = settings_with(
        numa_bind=True,
        tensor_parallel_size=4,
        tensor_parallel_nodes=2,
        tensor_parallel_backend="gloo",
    )
    found = [numa_node_of(group, rank, CPU, sysfs) for rank in range(4)]
    assert found == [FIRST, SECOND] * 2, "ranks of each machine share out its own nodes"
    alone = settings_with(numa_bind=True, tensor_parallel_sizes=(1, 2))
    assert numa_node_of(alone, 0, CPU, sysfs) is None, "all workers would be on one node"


def test_workers_of_one_rank_on_cpus_are_not_bound() -> None:
    with pytest.raises(SettingsError, match=r"--numa-bind is for .* leave it out, or .* numactl"):
        settings_with(numa_bind=True)


def test_lists_of_cpus_and_masks_of_nodes() -> None:
    assert cpus_of("0-2,5\n") == {0, 1, 2, 5}
    assert cpus_of("\n") == set()
    assert bits_of([0, 3, 65])[:3] == [9, 2, 0]


def test_node_without_a_cpu_of_this_process_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    assert not keep_on(NumaNode(7, frozenset({max(before) + 1})))
    assert os.sched_getaffinity(0) == before


def test_all_threads_of_a_process_keep_to_the_node() -> None:
    """Threads from before, and those that start later. In a process of its own, which stays bound."""
    cpu = max(os.sched_getaffinity(0))
    program = f"""
import os, threading
from pathlib import Path
from tidemill.workers.numa import NumaNode, keep_on
known = threading.Event()
found = []
def early():
    known.wait()
    found.append(os.sched_getaffinity(0))
thread = threading.Thread(target=early)
thread.start()
assert keep_on(NumaNode(0, frozenset({{{cpu}}})))
known.set()
thread.join()
later = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
later.start()
later.join()
print(found, os.sched_getaffinity(0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[{{{cpu}}}, {{{cpu}}}] {{{cpu}}}"
