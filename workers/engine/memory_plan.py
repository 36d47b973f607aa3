"""Divide the memory of a rank into extents, by what requests need and what a device has. Pure."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.kvstore.layout import LayerSpec, Layout, layout_of
from tidemill.kvstore.memory.backing import Kvcached
from tidemill.workers.models.errors import ModelError
from tidemill.workers.scheduling.admission import STATES_PER_REQUEST_MAX
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.settings import EngineSettings, SettingsError


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


def budget_of(settings: EngineSettings, page_tokens: int) -> Budget:
    return Budget(
        tokens_max=max(settings.step_tokens_max, settings.rows_max + page_tokens),
        rows_max=settings.rows_max,
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
    extents = -(-num_tokens // (layout.pages_per_extent * layout.page_tokens))
    if layout.has_states:
        extents += -(-STATES_PER_REQUEST_MAX // layout.states_per_extent)
    if layout.has_windows:
        extents += -(-layout.peak_windows(num_tokens, in_flight) // layout.windows_per_extent)
    return extents


def memory_of(settings: EngineSettings, layers: Sequence[LayerSpec], max_length: int) -> Memory:
    """Return the division of the memory. `layers` are those of one rank. Raises ModelError and
    SettingsError."""
    ranks = settings.tensor_parallel_size
    granules = {"granule_bytes": Kvcached.GRANULE_BYTES} if settings.backing_kind == "kvcached" else {}
    try:
        dtypes = settings.page_dtype, settings.state_dtype
        layout = layout_of(layers, settings.page_tokens, *dtypes, **granules)
    except ValueError as error:
        raise ModelError(f"{settings.model_folder}: {error}") from error
    num_extents = settings.memory_bytes // (layout.extent_bytes * ranks)
    wanted = min(settings.max_model_len or max_length, max_length)
    in_flight = budget_of(settings, layout.page_tokens).tokens_max * (2 if settings.overlap else 1)
    max_model_len = min(wanted, capacity_tokens(layout, num_extents, in_flight))
    if max_model_len <= layout.page_tokens and max_model_len < wanted:
        num_extents = extents_for(layout, layout.page_tokens + 1, in_flight)
        raise ModelError(
            f"{settings.memory_bytes:,} bytes of memory cannot hold one request of this model: "
            f"set --memory to {-(-num_extents * layout.extent_bytes * ranks // (1 << 20))}MiB or more"
        )
    floor = max(
        extents_for(layout, max_model_len, in_flight),
        -(-(settings.memory_floor_bytes or 0) // (layout.extent_bytes * ranks)),
    )
    if floor > num_extents:
        raise SettingsError(
            f"--memory-floor is {settings.memory_floor_bytes:,} bytes: set it to --memory or less"
        )
    if settings.on_cuda and settings.backing_kind == "fixed":  # all of it is allocated at the start
        return Memory(layout, num_extents, floor, num_extents, max_model_len)
    reserved = max(num_extents, (settings.memory_max_bytes or 0) // (layout.extent_bytes * ranks))
    return Memory(layout, num_extents, floor, reserved, max_model_len)
