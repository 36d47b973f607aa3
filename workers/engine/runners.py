"""Open the runner of a worker, and find what it leaves of the memory of a device."""

import logging
import os
from dataclasses import replace
from itertools import pairwise

import torch

from tidemill.kernels.shared.build import KernelUnavailable
from tidemill.kvstore.layout import Layout
from tidemill.workers.device import granted, memory_in_use, memory_info, settle
from tidemill.workers.engine.memory_plan import DeviceMemory, Memory, arena_bytes, budget_of, least_memory
from tidemill.workers.execution.cuda_graphs import graph_shapes
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.mtp_drafter import MtpDrafter
from tidemill.workers.execution.overlapped_runner import CudaStream, OverlappedRunner
from tidemill.workers.execution.step_tensors import PageTables
from tidemill.workers.models.architectures.registry import LoadedModel
from tidemill.workers.models.inputs import Caches, caches_of
from tidemill.workers.parallel.exchange import Exchange
from tidemill.workers.parallel.group import GroupRunner, RankGroup
from tidemill.workers.parallel.overlapped_group import OverlappedGroupRunner, OverlappedRankRunner
from tidemill.workers.parallel.rank_runner import RankRunner
from tidemill.workers.settings import EngineSettings, SettingsError

log = logging.getLogger(__name__)


def guesser_of(
    settings: EngineSettings, loaded: LoadedModel, layout: Layout, caches: Caches
) -> MtpDrafter | None:
    if loaded.head is None:
        return None
    return MtpDrafter(
        loaded.head, loaded.model.logits, caches, layout.page_tokens, settings.num_speculative_tokens
    )


def open_runner(
    settings: EngineSettings,
    loaded: LoadedModel,
    memory: Memory,
    arena: torch.Tensor,
    group: RankGroup | Exchange | None,
) -> TorchRunner:
    """Open the runner of a worker, of the leader of a group, or of another rank, which has an exchange."""
    layout, caches = memory.layout, caches_of(memory.layout, arena, loaded.kv_scales)
    running = (loaded.model, caches, layout.page_tokens, settings.threads)
    guesser = guesser_of(settings, loaded, layout, caches)
    if settings.async_scheduling:
        rows_max = budget_of(settings, layout.page_tokens).rows_max
        tables = PageTables(rows_max, table_width_of(memory), windows=layout.has_windows)
        ahead = CudaStream(torch.cuda.Stream(arena.device)), guesser, tables
        if isinstance(group, RankGroup):
            return OverlappedGroupRunner(group, loaded.vocab_size, *running, *ahead)
        if group is not None:
            return OverlappedRankRunner(group, *running, *ahead)
        return OverlappedRunner(*running, *ahead)
    if isinstance(group, RankGroup):
        return GroupRunner(group, loaded.vocab_size, *running, arena.device, guesser)
    if group is not None:
        return RankRunner(group, *running, arena.device, guesser)
    runner = TorchRunner(*running, arena.device, guesser)
    if settings.variant == "cpu" and not settings.enforce_eager:
        budget = budget_of(settings, layout.page_tokens)
        runner.record_steps(budget.tokens_max, budget.rows_max, table_width_of(memory))
    return runner


def warm_up(settings: EngineSettings, memory: Memory, runner: TorchRunner, device: torch.device) -> None:
    """On a device, compile the kernels and run the largest steps. Raises OutOfMemory, and SettingsError for a
    model whose tiles the GPU cannot hold."""
    if settings.on_cuda and settings.variant == "triton":
        budget, width = budget_of(settings, memory.layout.page_tokens), table_width_of(memory)
        sizes = budget.rows_max, budget.tokens_max, width, settings.num_speculative_tokens
        with granted(device, "the largest step: lower --memory or --max-num-batched-tokens"):
            try:
                runner.compile_ahead(len(os.sched_getaffinity(0)) // settings.ranks_per_node, *sizes)
                runner.warm_up(*sizes)
            except KernelUnavailable as error:  # for this model
                raise SettingsError(str(error)) from error
            except Exception as error:
                if type(error).__name__ != "OutOfResources":  # Triton's, which is not on every machine
                    raise
                fix = "use a GPU with more shared memory, or --device cpu"
                raise SettingsError(
                    f"{settings.model_folder} does not fit {device}: {error}: {fix}"
                ) from error


def capture_graphs(
    settings: EngineSettings, memory: Memory, runner: TorchRunner, device: torch.device
) -> None:
    """On a device, capture the graphs of steps. Raises OutOfMemory."""
    if settings.on_cuda and settings.variant == "triton" and not settings.enforce_eager:
        budget = budget_of(settings, memory.layout.page_tokens)
        with granted(device, "CUDA graphs: lower --memory or --max-num-seqs, or pass --enforce-eager"):
            graphs = graph_shapes(budget.rows_max, budget.tokens_max, settings.num_speculative_tokens)
            runner.use_graphs(graphs, table_width_of(memory))


def table_width_of(memory: Memory) -> int:
    """Return the pages of the longest sequence."""
    return -(-memory.max_model_len // memory.layout.page_tokens)


def with_device_memory(
    settings: EngineSettings,
    loaded: LoadedModel,
    device: torch.device,
    used_before: int,
    exchange: Exchange | None = None,
) -> EngineSettings:
    """Return the settings with the size of the arena, from what the device has left beside the weights, the
    largest step and the graphs. These run in the smallest arena first, since the arena has to be there before
    them. `used_before` is the memory in use before the weights. Raises OutOfMemory and SettingsError.

    The ranks of a group do this together, because a forward pass needs all of them. Their arenas are as large
    as the smallest of them can be.
    """
    if exchange is not None:
        exchange.least(0)  # all have loaded their weights
    is_shared = settings.device_share < 1
    least = least_memory(settings, loaded.local_layers, loaded.max_length)
    weights = memory_in_use(device, shared=is_shared) - used_before
    with granted(device, "one request: serve a smaller model, or stop what else uses the device"):
        arena = torch.empty(least.reserved_bytes, dtype=torch.uint8, device=device)
    runner = open_runner(settings, loaded, least, arena, None)
    used = [memory_in_use(device, shared=is_shared)]
    try:
        warm_up(settings, least, runner, device)
        used.append(memory_in_use(device, shared=is_shared))  # with all that torch keeps for steps
        settle(device)  # a capture would return that too
        used.append(memory_in_use(device, shared=is_shared))
        capture_graphs(settings, least, runner, device)
        used.append(memory_in_use(device, shared=is_shared))
        free, total = memory_info(device)
    finally:
        runner.close()
    steps, returned, graphs = (after - before for before, after in pairwise(used))
    found = DeviceMemory(
        name=str(device),
        total=total,
        free=free + returned + arena.nbytes,
        weights=weights,
        steps=steps,
        graphs=graphs,
    )
    num_bytes, ranks = arena_bytes(settings, found, least.reserved_bytes), settings.tensor_parallel_size
    if exchange is not None:
        num_bytes = exchange.least(num_bytes)
    log.info("%s: %s for pages and states", found, f"{num_bytes:,}")
    del runner, arena
    settle(device)  # the runner's graphs and steps: those of the worker take their memory
    max_bytes = int(total * settings.gpu_memory_utilization) * ranks if is_shared else None
    return replace(
        settings, memory_bytes=num_bytes * ranks, memory_max_bytes=settings.memory_max_bytes or max_bytes
    )
