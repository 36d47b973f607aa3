"""Find the device that an engine computes on, and the memory of its arena."""

import gc
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tidemill.kernels.shared.interpreter import interprets
from tidemill.kvstore.errors import OutOfMemory
from tidemill.kvstore.memory.backing import Backing, BackingUnavailable, Event, Fixed, Kvcached, Mmap
from tidemill.workers.malloc import return_freed_memory
from tidemill.workers.numa import SYSFS, NumaNode, node_of_gpu, node_of_rank
from tidemill.workers.settings import EngineSettings, SettingsError

HOST = torch.device("cpu")

CAPABILITIES = (8, 9, 10)
"""The compute capabilities of GPUs for whose shared memory and registers tiles are chosen, from 8.0 on."""


def device_of(settings: EngineSettings) -> torch.device:
    """Return the device with its index. Raises SettingsError when it is missing, or its operators do not run
    on it."""
    requested = torch.device(settings.device)
    if requested.type == "cpu":
        if settings.variant == "triton" and not interprets():
            raise SettingsError("--kernels triton computes in CUDA memory: use cpu, or add --device cuda")
        return requested
    if not torch.cuda.is_available():
        raise SettingsError(
            f"--device {settings.device}: torch sees no CUDA device here: use --device cpu, or install a CUDA"
            " build of torch and the driver"
        )
    device, count = torch.device("cuda", requested.index or 0), torch.cuda.device_count()
    if device.index >= count:
        raise SettingsError(f"--device {settings.device}: the last one here is cuda:{count - 1}")
    major, minor = torch.cuda.get_device_capability(device)
    if settings.variant == "triton" and major not in CAPABILITIES:
        raise SettingsError(
            f"--device {settings.device}: it has compute capability {major}.{minor}, and kernels need 8 to 10"
            " (A100, L40S, H100, H200, B200): use another GPU, or --device cpu"
        )
    return device


def check_ranks(settings: EngineSettings) -> None:
    """Raise SettingsError when this machine cannot run all ranks of a worker on its CUDA devices."""
    size = settings.tensor_parallel_size
    if size == 1 or not settings.on_cuda:
        return
    check_nccl(settings)
    count = count_gpus() - (torch.device(settings.device).index or 0)
    if count < size * settings.device_share:
        raise SettingsError(
            f"--tensor-parallel-size {size} is more than the {count} CUDA devices here from"
            f" --device {settings.device} on: set it to {max(1, count)} or less"
        )


def check_nccl(settings: EngineSettings) -> None:
    """Raise SettingsError when the ranks of a worker need NCCL, and torch has none here."""
    size = settings.tensor_parallel_size
    if size > 1 and settings.backend == "nccl" and not torch.distributed.is_nccl_available():
        raise SettingsError(
            f"--tensor-parallel-size {size}: this build of torch has no NCCL: install a CUDA build of torch"
        )


def device_of_rank(settings: EngineSettings, rank: int) -> str:
    """Return the device of a rank whose process sees all devices: each has the next one, or a part of it."""
    if not settings.on_cuda:
        return settings.device
    first = torch.device(settings.device).index or 0
    return f"cuda:{first + int(rank * settings.device_share)}"


def count_gpus() -> int:
    """Return the number of CUDA devices that this process sees."""
    return torch.cuda.device_count()


def numa_node_of(
    settings: EngineSettings, rank: int, device: torch.device, sysfs: Path = SYSFS
) -> NumaNode | None:
    """Return the NUMA node of a rank: that of its GPU, or on CPUs its part of the nodes. None: it is not
    bound, because that is not wanted or there is nothing to choose from."""
    if not settings.numa_bind:
        return None
    if device.type == "cuda":
        return node_of_gpu(pci_address(device), sysfs)
    ranks = settings.ranks_per_node
    return node_of_rank(rank % ranks, ranks, sysfs) if settings.tensor_parallel_size > 1 else None


def pci_address(device: torch.device) -> str:
    """Return the PCI address of a CUDA device, as sysfs names it."""
    found: Any = torch.cuda  # it leaves the type of properties open
    gpu = found.get_device_properties(device)
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


def memory_name(device: torch.device) -> str:
    """Return the name of the memory that a device computes in. Workers of one node with the same name share
    it. A number would not do: a process may see only some of the devices."""
    if device.type == "cpu":
        return "cpu"
    found: Any = torch.cuda  # it leaves the type of properties open
    return f"cuda-{found.get_device_properties(device).uuid}"


def memory_info(device: torch.device) -> tuple[int, int]:
    """Return the free and the total memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)


def total_memory(device: torch.device) -> int:
    """Return the memory of a CUDA device in bytes, of which the answer takes none."""
    found: Any = torch.cuda  # it leaves the type of properties open
    return found.get_device_properties(device).total_memory


def memory_in_use(device: torch.device, *, shared: bool) -> int:
    """Return the bytes in use on a device, those that torch keeps for later steps included. On a device that
    is `shared` they are those of this process: others start and grow meanwhile."""
    gc.collect()
    if shared:
        return torch.cuda.memory_reserved(device)
    free, total = memory_info(device)
    return total - free


def reserved_peak(device: torch.device) -> int:
    """Return the most bytes that torch has held of a device so far, used or not; 0 on a CPU. An arena of
    kvcached is not among them."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def open_backing(
    settings: EngineSettings,
    num_bytes: int,
    extent_bytes: int = Kvcached.GRANULE_BYTES,
    last_step: Callable[[], Event | None] = lambda: None,
) -> Backing:
    """Reserve the memory of one rank, which is mapped by extents. `last_step` returns the end of the newest
    step on a device. Raises OutOfMemory and SettingsError."""
    if not settings.on_cuda:
        return Mmap(num_bytes) if settings.backing_kind == "mmap" else Fixed(num_bytes)
    device = device_of(settings)
    with granted(device, f"an arena of {num_bytes:,} bytes: lower --memory, or stop what else uses it"):
        if settings.backing_kind == "fixed":
            return Fixed(num_bytes, str(device))
        try:
            return Kvcached(num_bytes, str(device), None, last_step, extent_bytes)
        except BackingUnavailable as error:
            raise SettingsError(f"{error}; or take all of it at the start with --backing fixed") from error


@contextmanager
def granted(device: torch.device, what: str) -> Generator[None]:
    """Raise OutOfMemory where torch gets no memory of the device; `what` has its purpose, and the fix."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"{device} has no memory left for {what}") from error


def settle(device: torch.device) -> None:
    """Wait for all work on the device, of every thread, and return what is held unused: by torch on a GPU, by
    malloc on a CPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        return_freed_memory()
