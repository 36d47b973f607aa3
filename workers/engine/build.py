"""Build a worker's engine from its model, memory, store and runner."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
from time import time
from typing import cast

import torch
from torch import Tensor

from tidemill.kernels.dispatch import Operators, operators, rounding_states
from tidemill.kernels.shared.build import KernelUnavailable
from tidemill.kernels.shared.compute_dtype import BITS
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import LayerSpec, Layout, layout_of
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Backing
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.shards import Shards, Share, rank_layers, rank_share, shards_of
from tidemill.kvstore.stores.open_store import open_store
from tidemill.kvstore.stores.seal import Sealing
from tidemill.kvstore.stores.secret import read_secret
from tidemill.workers.contract.engine import Progress
from tidemill.workers.device import (
    check_nccl,
    check_ranks,
    device_of,
    granted,
    memory_in_use,
    memory_info,
    memory_name,
    numa_node_of,
    open_backing,
    reserved_peak,
    settle,
    total_memory,
)
from tidemill.workers.engine.engine import Engine, EngineHooks
from tidemill.workers.engine.kv_events import BatchQueue, EventForm, KvEvents
from tidemill.workers.engine.memory_plan import (
    DeviceMemory,
    Memory,
    arena_bytes,
    budget_of,
    checkpoint_pages,
    least_memory,
    memory_of,
)
from tidemill.workers.engine.runners import capture_graphs, open_runner, warm_up, with_device_memory
from tidemill.workers.execution.grammar import Grammars
from tidemill.workers.malloc import large_blocks_returned
from tidemill.workers.messages import EngineInfo
from tidemill.workers.models.architectures.registry import (
    LoadedModel,
    compute_dtype_of,
    describe,
    has_head,
    load,
    sizes_of,
)
from tidemill.workers.models.collectives import ALONE, LEADER, Sharing
from tidemill.workers.numa import keep_on
from tidemill.workers.parallel.exchange import Exchange
from tidemill.workers.parallel.group import RankGroup, open_group
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.settings import EngineSettings, KvEventSettings, SettingsError
from tidemill.workers.sources.download import download
from tidemill.workers.transfer.arena_io import ArenaIO, DirectIO
from tidemill.workers.transfer.staging import StagingRing
from tidemill.workers.transfer.transfer import IN_FLIGHT_BYTES_MAX, Transfer

AHEAD_BYTES = 64 << 20
"""The memory that is mapped ahead of need in each rank."""

AHEAD_EXTENTS_CUDA = 2
"""The extents of a device that are mapped ahead of need: mapping one takes milliseconds."""

PUBLISHER = "tidemill.workers.engine.zmq_publisher:ZmqPublisher"
"""The publisher of KV events, which is loaded on demand."""

OpenPublisher = Callable[[KvEventSettings, EventForm], BatchQueue]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine and its facts. Call `close` when `engine.run` has ended: it ends what the engine started."""

    engine: Engine
    info: EngineInfo  # its `device` is a name within the node
    grammars: Grammars
    group: RankGroup | None  # the other ranks
    close: Callable[[], None]


def check_settings(settings: EngineSettings, *, here: bool = False) -> None:
    """Raise the ModelError or SettingsError that `build_engine` would, as far as it can be known without
    reading weights. `here`: the worker will run on this machine; only then a CUDA device is looked at."""
    device = device_of(settings) if here or not settings.on_cuda else None
    settings, ranks = with_compute_dtype(settings), settings.tensor_parallel_size
    layers, max_length = describe(
        settings.model_folder,
        ranks,
        mtp=mtp_of(settings),
        load_format=settings.load_format,
        quantization=settings.quantization,
        purpose=settings.purpose,
        by_expert=settings.by_expert,
    )
    if not settings.on_cuda or settings.memory_bytes is not None:
        memory_of(settings, rank_layers(layers, ranks), max_length)
    elif device is None:
        least_memory(settings, rank_layers(layers, ranks), max_length)
    if settings.on_cuda and device is not None:
        check_ranks(settings)
        total = total_memory(device)
        check_device_memory(settings, device, total, total)


def check_device_memory(settings: EngineSettings, device: torch.device, free: int, total: int) -> None:
    """Check before anything loads that a device has memory for the weights and the smallest arena, or for the
    share of a rank. Raises SettingsError and ModelError."""
    layers, max_length = describe(
        settings.model_folder,
        mtp=mtp_of(settings),
        load_format=settings.load_format,
        quantization=settings.quantization,
        purpose=settings.purpose,
    )
    ranks = settings.tensor_parallel_size
    least = least_memory(settings, rank_layers(layers, ranks), max_length)
    weights = weight_bytes(settings) // ranks
    before = DeviceMemory(name=str(device), total=total, free=free - weights, weights=weights)
    arena_bytes(settings, before, least.reserved_bytes)


def weight_bytes(settings: EngineSettings) -> int:
    """Return the size of the weights on a device, of all ranks together. Raises ModelError."""
    return sizes_of(
        settings.model_folder,
        with_compute_dtype(settings).compute_dtype or "float32",
        mtp=mtp_of(settings),
        load_format=settings.load_format,
        quantization=settings.quantization,
        purpose=settings.purpose,
    ).weight_bytes


def build_engine(
    settings: EngineSettings, progress: Progress, start_ranks: StartRanks | None = None
) -> BuiltEngine:
    """Load the model and reserve the memory, on all ranks of a group. Raises ModelError, StoreError,
    OutOfMemory, SettingsError, OSError or GroupBroken, each with one line that names the fix."""
    settings = with_model_here(settings)
    device = device_of(settings)
    settings = with_compute_dtype(settings)
    ops = operators_of(settings)
    check_nccl(settings)
    if settings.on_cuda:
        check_device_memory(settings, device, *memory_info(device))
    if settings.tensor_parallel_size == 1:
        return _build(settings, progress, ops, device, None)
    if start_ranks is None:
        raise SettingsError(
            "--tensor-parallel-size above 1 needs a start for its ranks: LLM and serve have one"
        )
    with open_group(settings, start_ranks, device) as group:
        return _build(settings, progress, ops, device, group)


def with_model_here(settings: EngineSettings) -> EngineSettings:
    """Return the settings with the model's folder on this machine, downloaded if need be. Raises
    SourceError."""
    if settings.model_source is None or settings.model_folder.exists():
        return settings
    return replace(settings, model_folder=download(settings.model_source))


def _build(
    settings: EngineSettings,
    progress: Progress,
    ops: Operators,
    device: torch.device,
    group: RankGroup | None,
) -> BuiltEngine:
    bind(settings, LEADER, device)
    used = memory_in_use(device, shared=settings.device_share < 1) if settings.on_cuda else 0
    exchange = None if group is None else group.exchange
    loaded = load_model(settings, progress, ops, device, exchange)
    if settings.on_cuda:
        settings = with_device_memory(settings, loaded, device, used, exchange)
    shards = shards_of(loaded.layers, settings.group_sizes)
    memory = memory_of(settings, loaded.local_layers, loaded.max_length)
    namespace = namespace_of(settings, loaded.layers, shards)
    layout, ranks = memory.layout, settings.tensor_parallel_size
    with ExitStack() as opened:
        own = open_backing(settings, memory.reserved_bytes, layout.extent_bytes, lambda: runner.newest_step)
        backing = own if group is None else group.backing(own)
        if settings.on_cuda:  # on a host, memory that is still being stored must not be zeroed
            opened.callback(backing.close)
        grammars = Grammars(settings.model_folder, loaded.vocab_size, loaded.eos_ids, settings.threads)
        opened.callback(grammars.close)
        runner = open_runner(settings, loaded, memory, backing.memory, group)
        opened.callback(runner.close)
        warm_up(settings, memory, runner, device)
        capture_graphs(settings, memory, runner, device)
        if group is not None:
            group.wait_until_ready()  # to map on all ranks

        arena = open_arena(settings, memory, backing)
        arena_io = open_arena_io(settings, layout, backing.memory, rank_share(shards, 0, ranks))
        cache = Cache(layout, arena, PrefixIndex(layout, settings.eviction_policy, loaded.cost))
        ledger = Ledger(cache, settings.checkpoints_per_path)
        engine = Engine(
            ledger,
            Transfer(layout, arena_io, shards, () if group is None else group.mates()),
            runner,
            limits_of(settings, memory, loaded),
            partial(_root_of, loaded.fingerprint, namespace),
            grammars,
            EngineHooks(
                step_cpu_s=runner.cpu_s,
                expert_pairs=partial(_expert_pairs, loaded),
                publish_events=open_events(settings, ledger, opened),
                reserved_peak=partial(reserved_peak, device),
            ),
        )
        return BuiltEngine(
            engine=engine,
            info=_info(settings, loaded, memory, namespace, device),
            grammars=grammars,
            group=group,
            close=opened.pop_all().close,
        )


def bind(settings: EngineSettings, rank: int, device: torch.device) -> None:
    """Keep this process on the NUMA node of its rank, if that is wanted, before it takes memory."""
    if (node := numa_node_of(settings, rank, device)) is not None:
        keep_on(node)


def load_model(
    settings: EngineSettings,
    progress: Progress,
    ops: Operators,
    device: torch.device,
    exchange: Exchange | None,
) -> LoadedModel:
    """Load the model, or the part of a rank. Raises ModelError and OutOfMemory."""
    ranks = ALONE if exchange is None else exchange.model
    what = "the weights of the model: serve a smaller one, or stop what else uses it"
    with granted(device, what), large_blocks_returned():
        loaded = load(
            settings.model_folder,
            ops,
            progress,
            Sharing(ranks, settings.sums, settings.by_expert),
            device,
            mtp=mtp_of(settings),
            compute_dtype=settings.compute_dtype,
            load_format=settings.load_format,
            quantization=settings.quantization,
            purpose=settings.purpose,
            fixed_kv_scales=settings.page_dtype == "fp8",
        )
    settle(device)
    return loaded


def open_events(settings: EngineSettings, ledger: Ledger, opened: ExitStack) -> Callable[[], None]:
    """Return what publishes the latest KV events of the ledger's index, until `opened` closes. Raises
    SettingsError."""
    if settings.kv_events is None:
        return lambda: None
    try:
        open_publisher = cast("OpenPublisher", resolve_name(PUBLISHER))
    except ImportError as error:
        raise SettingsError(
            f"--kv-events-config needs pyzmq ({error}): pip install 'tidemill[events]'"
        ) from error
    publisher = open_publisher(settings.kv_events, EventForm.of(ledger.layout, on_cuda=settings.on_cuda))
    opened.callback(publisher.close)
    return KvEvents(ledger.index, publisher, ledger.counters, time).flush


def open_arena(settings: EngineSettings, memory: Memory, backing: Backing) -> Arena:
    """Return the arena over `backing`. With kvcached, the floor is mapped now. Raises OutOfMemory."""
    budget, ahead, kept = memory.floor if settings.memory_broker else memory.share, 0, 0
    if settings.backing_kind == "mmap":
        ahead = AHEAD_BYTES // memory.layout.extent_bytes
    if settings.backing_kind == "kvcached":
        ahead, kept = AHEAD_EXTENTS_CUDA, memory.floor
    return Arena(memory.layout, memory.reserved, backing, budget, ahead, kept)


def _info(
    settings: EngineSettings, loaded: LoadedModel, memory: Memory, namespace: str, device: torch.device
) -> EngineInfo:
    layout, ranks = memory.layout, settings.tensor_parallel_size
    return EngineInfo(
        tensor_parallel_size=ranks,
        fingerprint=loaded.fingerprint,
        layout=namespace,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes * ranks,
        state_bytes=layout.checkpoint_bytes * ranks,
        step_tokens_max=budget_of(settings, layout.page_tokens).tokens_max,
        itl_target_s=settings.step_target_s,
        max_model_len=memory.max_model_len,
        vocab_size=loaded.vocab_size,
        eos_token_ids=tuple(sorted(loaded.eos_ids)),
        pooling=loaded.pooling,
        device=memory_name(device),
        memory_bytes=memory.share * layout.extent_bytes * ranks,
        memory_floor_bytes=memory.floor * layout.extent_bytes * ranks,
        memory_max_bytes=memory.reserved * layout.extent_bytes * ranks,
    )


def _root_of(model: str, layout: str, salt: str) -> PageKey:
    return Namespace(model=model, layout=layout, salt=salt).root()


def _expert_pairs(loaded: LoadedModel) -> list[int]:
    return [] if loaded.expert_pairs_R is None else loaded.expert_pairs_R.cpu().numpy().tolist()


def with_compute_dtype(settings: EngineSettings) -> EngineSettings:
    """Return the settings with the type of products, by the weights where none is set. Raises ModelError."""
    if settings.compute_dtype is not None:
        return settings
    dtype = compute_dtype_of(settings.model_folder, settings.load_format, on_cuda=settings.on_cuda)
    return replace(settings, compute_dtype=dtype)


def operators_of(settings: EngineSettings) -> Operators:
    """Return the operators for the device. Raises SettingsError."""
    try:
        ops = operators(
            settings.variant,
            settings.cache_folder,
            settings.compute_dtype or "float32",
            batch_invariant=settings.batch_invariant,
            attention_backend=settings.attention_backend,
        )
    except KernelUnavailable as error:
        raise SettingsError(str(error)) from error
    return rounding_states(ops, settings.page_size) if settings.saved_dtype != settings.state_dtype else ops


def namespace_of(settings: EngineSettings, layers: Sequence[LayerSpec], shards: Shards) -> str:
    """Return the namespace of the store's objects, which determines the meaning of their bytes apart from the
    tokens. `layers` are those of the whole model. Raises StoreError."""
    forms = settings.page_dtype, settings.state_dtype, settings.saved_dtype, settings.page_slices
    layout = layout_of(layers, settings.page_size, *forms)
    products = BITS[settings.compute_dtype or "float32"]
    numbers = f"{products}{settings.sums_namespace}"
    numbers += "/batch-invariant" if settings.batch_invariant and settings.on_cuda else ""
    return f"{shards.describe(layout)}/{numbers}" + sealing_of(settings).describe()


def mtp_of(settings: EngineSettings) -> bool:
    """Return whether a prediction head of the model makes guesses. Raises ModelError."""
    if not settings.num_speculative_tokens or settings.speculative_method == "ngram":
        return False
    return settings.speculative_method == "mtp" or has_head(settings.model_folder, settings.load_format)


def limits_of(settings: EngineSettings, memory: Memory, loaded: LoadedModel) -> EngineLimits:
    page_tokens = memory.layout.page_tokens
    return EngineLimits(
        budget=budget_of(settings, page_tokens),
        capacity_tokens=memory.max_model_len,
        vocab_size=loaded.vocab_size,
        ranks=settings.tensor_parallel_size,
        extents_min=memory.floor,
        checkpoint_strategy=settings.checkpoint_strategy,
        checkpoint_interval=checkpoint_pages(settings, memory.layout),
        itl_target_s=settings.step_target_s,
        overlap=settings.overlap,
        drafts_max=settings.num_speculative_tokens,
        pools=loaded.pooling is not None,
        mtp=loaded.head is not None,
    )


def sealing_of(settings: EngineSettings) -> Sealing:
    """Return the checksums or the encryption of objects in the store. Raises StoreError."""
    return Sealing(None if settings.store_secret_file is None else read_secret(settings.store_secret_file))


def open_arena_io(settings: EngineSettings, layout: Layout, arena: Tensor, share: Share) -> ArenaIO:
    """Open the store of one rank, which has `share` of every page and state and keeps it in `arena`, uint8
    [bytes]. Raises StoreError."""
    store = open_store(settings.store_url, sealing_of(settings))
    if arena.device.type == "cpu":
        return DirectIO(store, arena.numpy().data)
    object_bytes_max = max(
        layout.page_bytes // max(1, len(share.pages)),
        layout.window_bytes // max(1, len(share.windows)),
        layout.saved_bytes // max(1, len(share.states)),
    )
    return StagingRing(store, arena, max(IN_FLIGHT_BYTES_MAX, object_bytes_max), object_bytes_max)
