"""Plan the memory of a worker: what a device has left for its arena, and the arena in extents. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.kvstore.layout import PAGES, WINDOWS, LayerSpec, Layout, layout_of
from tidemill.kvstore.memory.backing import Kvcached
from tidemill.workers.models.errors import ModelError
from tidemill.workers.scheduling.admission import states_of_request
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.settings import MEMORY_BYTES, STEP, STEP_CUDA, EngineSettings, SettingsError


@dataclass(frozen=True, slots=True)
class Memory:
    """The division of a rank's memory in extents, and the longest sequence that the smallest budget
    serves."""

    layout: Layout
    share: int
    floor: int
    reserved: int
    max_model_len: int

    @property
    def reserved_bytes(self) -> int:
        return self.reserved * self.layout.extent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """The memory of a device, and what a worker takes of it beside its arena, in bytes. `free` is what is
    left of the device when the worker has taken that."""

    name: str
    total: int
    free: int
    weights: int
    steps: int = 0  # of the largest step
    graphs: int = 0  # of all CUDA graphs


def arena_bytes(settings: EngineSettings, device: DeviceMemory, least_bytes: int) -> int:
    """Return the size of the arena of a worker, or of one of its ranks, on a device: that of the settings, or
    all that is left. It is at least `least_bytes`. Raises SettingsError, with one line that names what takes
    the memory, when that is more than is left.

    What is free on a shared device does not count: other workers may have borrowed it, and give it back.
    """
    granted = int(device.total * settings.gpu_memory_utilization * settings.device_share)
    left = granted - device.weights - device.steps - device.graphs
    if settings.device_share == 1:
        left = min(left, int(device.free * settings.gpu_memory_utilization))
    asked = None if settings.memory_bytes is None else settings.memory_bytes // settings.tensor_parallel_size
    if max(least_bytes, asked or 0) <= left:
        return left if asked is None else asked
    sizes = {"weights take": device.weights, "steps": device.steps, "CUDA graphs": device.graphs}
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items() if size)
    taken = f"{device.name} grants {_gib(granted)} of {_gib(device.total)}: {listed}, and"
    if asked is not None and least_bytes <= left:
        most = left * settings.tensor_parallel_size >> 20
        raise SettingsError(f"{taken} --memory {_gib(asked)}: set it to {most}MiB or less")
    raise SettingsError(
        f"{taken} the pages and states of one request {_gib(least_bytes)}, with {_gib(max(0, left))} left:"
        " stop what else uses the device, raise --gpu-memory-utilization, lower --max-num-batched-tokens,"
        " or serve a smaller model"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def budget_of(settings: EngineSettings, page_tokens: int) -> Budget:
    default_tokens, default_rows = STEP_CUDA if settings.on_cuda else STEP
    rows_max = settings.max_num_seqs or default_rows
    return Budget(
        tokens_max=max(settings.max_num_batched_tokens or default_tokens, rows_max + page_tokens),
        rows_max=rows_max,
        page_tokens=page_tokens,
    )


def checkpoint_pages(settings: EngineSettings, layout: Layout) -> int:
    """Return the pages between checkpoints while decoding. By default on CUDA these pages take as much memory
    as a checkpoint, elsewhere it is one page."""
    if settings.checkpoint_interval is not None:
        return settings.checkpoint_interval // layout.page_tokens
    return max(1, -(-layout.checkpoint_bytes // layout.page_bytes)) if settings.on_cuda else 1


def capacity_tokens(layout: Layout, num_extents: int, in_flight_tokens: int | None = None) -> int:
    """Return the longest sequence that an arena of `num_extents` can hold when nothing else runs and steps
    run at most `in_flight_tokens` of it (None: all); 0 if none fits."""
    size = layout.page_tokens
    pages = bisect_right(
        range(max(0, num_extents) * layout.pages_per_extent + 1),
        num_extents,
        key=lambda pages: extents_for(layout, pages * size, in_flight_tokens),
    )
    return max(0, pages - 1) * size


def extents_for(layout: Layout, num_tokens: int, in_flight_tokens: int | None = None) -> int:
    """Return the smallest arena, in extents, whose `capacity_tokens` are at least `num_tokens`."""
    in_flight = num_tokens if in_flight_tokens is None else in_flight_tokens
    return layout.extents_for(
        {
            PAGES: -(-num_tokens // layout.page_tokens),
            **states_of_request(layout),
            WINDOWS: layout.peak_windows(num_tokens, in_flight),
        }
    )


def least_memory(settings: EngineSettings, layers: Sequence[LayerSpec], max_length: int) -> Memory:
    """Return the smallest division of the memory with which a worker starts. `layers` are those of one rank.
    Raises ModelError."""
    granules = {"granule_bytes": Kvcached.GRANULE_BYTES} if settings.backing_kind == "kvcached" else {}
    try:
        forms = settings.page_dtype, settings.state_dtype, settings.saved_dtype, settings.page_slices
        layout = layout_of(layers, settings.page_size, *forms, **granules)
    except ValueError as error:
        raise ModelError(f"{settings.model_folder}: {error}") from error
    wanted = min(settings.max_model_len or max_length, max_length)
    num_tokens = min(wanted, layout.page_tokens + 1)
    num_extents = max(
        extents_for(layout, num_tokens, _in_flight_tokens(settings)),
        -(-(settings.memory_floor_bytes or 0) // (layout.extent_bytes * settings.tensor_parallel_size)),
    )
    return Memory(layout, num_extents, num_extents, num_extents, wanted)


def memory_of(settings: EngineSettings, layers: Sequence[LayerSpec], max_length: int) -> Memory:
    """Return the division of the memory. `layers` are those of one rank. Raises ModelError and
    SettingsError."""
    least, ranks = least_memory(settings, layers, max_length), settings.tensor_parallel_size
    layout, wanted = least.layout, least.max_model_len
    memory_bytes = MEMORY_BYTES if settings.memory_bytes is None else settings.memory_bytes
    num_extents = memory_bytes // (layout.extent_bytes * ranks)
    in_flight = _in_flight_tokens(settings)
    max_model_len = min(wanted, capacity_tokens(layout, num_extents, in_flight))
    if max_model_len <= layout.page_tokens and max_model_len < wanted:
        num_extents = extents_for(layout, layout.page_tokens + 1, in_flight)
        raise ModelError(
            f"{memory_bytes:,} bytes of memory cannot hold one request of this model: "
            f"set --memory to {-(-num_extents * layout.extent_bytes * ranks // (1 << 20))}MiB or more"
        )
    floor = max(extents_for(layout, max_model_len, in_flight), least.floor)
    if floor > num_extents:
        raise SettingsError(
            f"--memory-floor is {settings.memory_floor_bytes:,} bytes: set it to --memory or less"
        )
    if settings.on_cuda and settings.backing_kind == "fixed":  # all of it is allocated at the start
        return Memory(layout, num_extents, floor, num_extents, max_model_len)
    reserved = max(num_extents, (settings.memory_max_bytes or 0) // (layout.extent_bytes * ranks))
    return Memory(layout, num_extents, floor, reserved, max_model_len)


def _in_flight_tokens(settings: EngineSettings) -> int:
    return budget_of(settings, settings.page_size).tokens_max * (2 if settings.overlap else 1)
