"""Choose the CPU threads of workers by the cores of the machine and the size of the model."""

from collections.abc import Collection, Sequence
from pathlib import Path

from tidemill.cluster.config.tree import GroupConfig, ModelConfig, RootConfig
from tidemill.cluster.settings import FleetSettings, WorkerSettings

SMALL_BYTES = 32 << 20
"""The size of a model below which one thread is the fastest: its parallel loops are shorter than the wait for
their threads."""

TOPOLOGY = Path("/sys/devices/system/cpu")
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def count_cores(allowed: Collection[int], topology: Path = TOPOLOGY, quota: Path = QUOTA) -> int:
    """Return the physical cores among the `allowed` CPUs, at most as many as the control group may use: two
    hardware threads of a core share the units that products run on."""
    cores = {_siblings(topology / f"cpu{cpu}/topology/thread_siblings_list", cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota(quota)))


def threads_of(config: RootConfig, model: ModelConfig, group: GroupConfig, folder: Path, cores: int) -> int:
    """Return the threads of each rank of a group, on a machine with this many cores and the model in
    `folder`."""
    if group.threads is not None:
        return group.threads
    if group.device != "cpu" or 0 < _weights_bytes(model, folder) < SMALL_BYTES:
        return 1
    if config.cluster.ray_address is not None:  # its nodes may have other cores
        return max(1, int(group.num_cpus))
    groups = [other for each in config.models for other in each.groups if other.device == "cpu"]
    ranks = sum(other.replicas * other.tensor_parallel_size for other in groups)
    return max(1, int(group.num_cpus) or cores // ranks)


def arrangement(fleets: Sequence[FleetSettings], cores: int) -> str:
    """Describe the workers and threads on the cores of this machine, with a warning if they do not fit."""
    workers = [worker for fleet in fleets for worker in fleet.workers]
    total = sum(
        worker.engine.tensor_parallel_size * worker.engine.threads
        for worker in workers
        if not worker.engine.on_cuda
    )
    text = "; ".join(f"{fleet.names[0]}: {_described(fleet.workers)}" for fleet in fleets)
    text = f"{text}; {cores} cores here"
    if total <= cores:
        return text
    return f"{text}, and {total} threads slow each other down: set fewer workers, or --threads 1 or auto"


def _described(workers: Sequence[WorkerSettings]) -> str:
    kinds = [(worker.role, worker.engine.tensor_parallel_size * worker.engine.threads) for worker in workers]
    return ", ".join(
        f"{kinds.count((role, threads))} {role} with {threads} thread{'s' * (threads > 1)}"
        for role, threads in dict.fromkeys(kinds)
    )


def _weights_bytes(model: ModelConfig, folder: Path) -> int:
    """Return the size of the weights; 0 if there are none to read."""
    if model.engine.load_format == "dummy":
        return 0
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _siblings(path: Path, cpu: int) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _quota(path: Path) -> int:
    """Return the whole cores that `cpu.max` grants, at least one; many where there is no limit."""
    try:
        most, period = path.read_text(encoding="ascii").split()
        return max(1, int(most) // int(period))
    except (OSError, ValueError):
        return 1 << 20
