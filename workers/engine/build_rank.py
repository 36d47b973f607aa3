"""Build one of the other ranks of a group: its weights, its memory, its part of each step."""

from tidemill.kvstore.shards import rank_share, shards_of
from tidemill.workers.device import device_of, memory_in_use, open_backing
from tidemill.workers.engine.build import (
    bind,
    load_model,
    open_arena_io,
    operators_of,
    with_compute_dtype,
    with_model_here,
)
from tidemill.workers.engine.memory_plan import memory_of
from tidemill.workers.engine.runners import capture_graphs, open_runner, warm_up, with_device_memory
from tidemill.workers.execution.step import Step
from tidemill.workers.models.architectures.registry import no_progress
from tidemill.workers.parallel.exchange import open_exchange
from tidemill.workers.parallel.network import Meeting, Network
from tidemill.workers.parallel.rank import RankParts
from tidemill.workers.settings import EngineSettings
from tidemill.workers.transfer.transfer import RankTransfer


def build_rank(
    settings: EngineSettings, index: int, meeting: Meeting, network: Network | None = None
) -> RankParts:
    """Meet the other ranks, then load this rank's weights and reserve its memory, in the order of
    `build_engine`: the exchanges of ranks meet in it. `network` is that of this rank, in a group over several
    nodes. Raises the errors of `build_engine`."""
    settings = with_model_here(settings)
    device, settings = device_of(settings), with_compute_dtype(settings)
    bind(settings, index, device)
    exchange = open_exchange(settings, meeting, index, device, network)
    used = memory_in_use(device, shared=settings.device_share < 1) if settings.on_cuda else 0
    loaded = load_model(settings, no_progress, operators_of(settings), device, exchange)
    if settings.on_cuda:
        settings = with_device_memory(settings, loaded, device, used, exchange)
    memory = memory_of(settings, loaded.local_layers, loaded.max_length)
    layout = memory.layout
    backing = open_backing(settings, memory.reserved_bytes, layout.extent_bytes, lambda: runner.newest_step)
    runner = open_runner(settings, loaded, memory, backing.memory, exchange)
    warm_up(settings, memory, runner, device)
    capture_graphs(settings, memory, runner, device)
    share = rank_share(shards_of(loaded.layers, settings.group_sizes), index, settings.tensor_parallel_size)
    transfer = RankTransfer(layout, open_arena_io(settings, layout, backing.memory, share), share)

    def run(step: Step) -> None:
        runner.run_now(step)

    return RankParts(backing, transfer, run, settings.threads)
