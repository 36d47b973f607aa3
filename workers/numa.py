"""Keep a rank on one NUMA node: that of its GPU, or one of those that ranks on CPUs share out."""

import ctypes
import logging
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""The number of the system call, by machine type. No library that is always there has it."""

_MPOL_PREFERRED = 1
_MASK_BITS = 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A node of memory with its CPUs, as the kernel counts both."""

    index: int
    cpus: frozenset[int]


def node_of_gpu(address: str, sysfs: Path = SYSFS) -> NumaNode | None:
    """Return the node to which the PCI device with the address `0000:3b:00.0` is attached; None: the kernel
    names none, as in most virtual machines."""
    try:
        index = int((sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return next((node for node in nodes_of(sysfs) if node.index == index), None)


def node_of_rank(rank: int, ranks: int, sysfs: Path = SYSFS) -> NumaNode | None:
    """Return the node of one of `ranks` on the CPUs of this machine: equal parts of them, in order, have a
    node each. None: there is one node."""
    nodes = nodes_of(sysfs)
    return nodes[rank * len(nodes) // ranks] if len(nodes) > 1 else None


def nodes_of(sysfs: Path) -> list[NumaNode]:
    """Return the nodes that have CPUs, in order."""
    found: list[NumaNode] = []
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            cpus = cpus_of((folder / "cpulist").read_text())
            if cpus:
                found.append(NumaNode(int(folder.name.removeprefix("node")), cpus))
    return sorted(found, key=lambda node: node.index)


def cpus_of(text: str) -> frozenset[int]:
    """Return the CPUs of a list like `0-3,8`."""
    spans = [part.partition("-")[::2] for part in text.strip().split(",") if part]
    return frozenset(cpu for first, last in spans for cpu in range(int(first), int(last or first) + 1))


def keep_on(node: NumaNode) -> bool:
    """Let all threads of this process run on the node's CPUs alone, and prefer its memory for what this
    thread and those that it starts allocate. Return False where no CPU of the node is allowed to it."""
    cpus = node.cpus & os.sched_getaffinity(0)
    if not cpus:
        log.warning("NUMA node %d has no CPU that this process may use: it stays where it is", node.index)
        return False
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)
    if not _prefer_memory(node.index):
        log.info("no memory policy can be set: memory comes from the node of the thread that writes it first")
    log.info("on NUMA node %d, %d CPUs", node.index, len(cpus))
    return True


def bits_of(nodes: Sequence[int]) -> list[int]:
    """Return a mask of nodes as the kernel takes it: words of 64 bits, the lowest first."""
    return [sum(1 << node % 64 for node in nodes if node // 64 == word) for word in range(_MASK_BITS // 64)]


def _prefer_memory(index: int) -> bool:
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    words = bits_of([index])
    mask = (ctypes.c_uint64 * len(words))(*words)
    return ctypes.CDLL(None).syscall(number, _MPOL_PREFERRED, mask, _MASK_BITS) == 0
