"""From the tree of a configuration to the settings of the cluster that it describes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from tidemill.cluster.config.flags import with_places
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.tree import (
    AutoscalingConfig,
    GroupConfig,
    ModelConfig,
    RootConfig,
    TelemetryConfig,
    labels_of,
)
from tidemill.cluster.messages import Bounds, Hysteresis
from tidemill.cluster.observability.telemetry import Telemetry
from tidemill.cluster.settings import (
    ChatSettings,
    ClusterSettings,
    FleetSettings,
    RouterSettings,
    WorkerSettings,
    worker_name,
)
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role
from tidemill.workers.models.bundled import bundled
from tidemill.workers.settings import EngineSettings, SettingsError, kv_dtype_of

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What engines need that no file says: the store that runs, and where compiled kernels are kept."""

    store_url: str
    cache_folder: Path


def cluster_settings(config: RootConfig, around: Surroundings, source: str = "") -> ClusterSettings:
    """`source` is the file of the configuration, if there is one: errors are told by its keys then. Raises
    SettingsError, or ConfigError."""
    fleets = [_fleet(config, index, around, source) for index in range(len(config.models))]
    return ClusterSettings(
        fleets=tuple(_lending(fleets)),
        ray_address=config.cluster.ray_address,
        namespace=config.cluster.namespace,
    )


def summary(config: RootConfig) -> str:
    """What is served: `keeper with 1 prefill + 1 decode`."""
    return "; ".join(
        f"{', '.join(model.names)} with "
        + " + ".join(f"{count} {role}" for role, count in counts_of(model).items())
        for model in config.models
    )


def counts_of(model: ModelConfig) -> dict[Role, int]:
    """Workers at the start."""
    counts: dict[Role, int] = {}
    for role in ROLES:
        if replicas := [group.replicas for group in model.groups if group.role == role]:
            counts[role] = sum(replicas)
    return counts


def telemetry_of(config: TelemetryConfig) -> Telemetry:
    return Telemetry(
        log_level=config.log_level,
        log_json=config.log_json,
        traces_url=config.otlp_traces_endpoint,
        metrics_alias=config.metrics_alias,
    )


def engine_settings(
    config: RootConfig, model: ModelConfig, group: GroupConfig, around: Surroundings
) -> EngineSettings:
    """Of the workers of a group. Raises SettingsError."""
    engine, secret_file, floor = model.engine, config.store.secret_file, group.memory_floor
    return EngineSettings(
        model_folder=bundled().get(model.model) or Path(model.model),
        memory_bytes=parse_bytes(group.memory),
        memory_max_bytes=_memory_max_bytes(config, model, group),
        memory_floor_bytes=None if floor is None else parse_bytes(floor),
        starts_at_floor=engine.memory_broker,
        eviction=engine.eviction_policy,
        checkpoints_per_path=engine.checkpoints_per_path,
        checkpoint_strategy=engine.checkpoint_strategy,
        checkpoint_interval=engine.checkpoint_interval,
        store_url=around.store_url,
        store_secret_file=None if secret_file is None else Path(secret_file),
        cache_folder=around.cache_folder,
        page_tokens=engine.page_size,
        kv_dtype=engine.kv_cache_dtype or kv_dtype_of(one.device for one in model.groups),
        device=group.device,
        kernels=engine.kernels,
        backing=engine.backing,
        enforce_eager=engine.enforce_eager,
        threads=group.threads,
        step_tokens_max=engine.max_num_batched_tokens,
        rows_max=engine.max_num_seqs,
        max_model_len=model.max_model_len,
        overlap=engine.overlap,
        drafts_max=engine.num_speculative_tokens,
        speculative_method=engine.speculative_method,
        tensor_parallel_size=group.tensor_parallel_size,
        tensor_parallel_sizes=tuple(sorted({one.tensor_parallel_size for one in model.groups})),
    )


def _memory_max_bytes(config: RootConfig, model: ModelConfig, group: GroupConfig) -> int:
    """What a worker may come to have: with the broker, all that workers of any model bring whose device is of
    its kind, for they may be on one. A budget by hand may be up to twice the share without it."""
    if not model.engine.memory_broker:
        return 2 * parse_bytes(group.memory)
    kind = _kind(group.device)
    lenders = [one for other in config.models if other.engine.memory_broker for one in other.groups]
    return sum(one.replicas * parse_bytes(one.memory) for one in lenders if _kind(one.device) == kind)


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _fleet(config: RootConfig, index: int, around: Surroundings, source: str) -> FleetSettings:
    model, label = config.models[index], labels_of(config.models)[index]
    workers: list[WorkerSettings] = []
    for number, group in enumerate(model.groups):
        try:
            engine = engine_settings(config, model, group, around)
        except SettingsError as error:
            if not source:
                raise
            raise ConfigError([with_places(str(error), index, number)], source) from error
        alike = WorkerSettings(
            name="",
            role=group.role,
            engine=engine,
            num_cpus=group.num_cpus,
            num_gpus=group.num_gpus,
            resources=group.resources,
            labels=group.labels,
        )
        first = sum(worker.role == group.role for worker in workers)
        workers += [
            replace(alike, name=worker_name(label, group.role, at))
            for at in range(first, first + group.replicas)
        ]
    return FleetSettings(
        label=label,
        names=model.names,
        workers=tuple(workers),
        router=RouterSettings(
            name=f"{label}-router" if label else "router",
            replicas=model.routers,
            broker=model.engine.memory_broker,
            expected=frozenset(worker.name for worker in workers),
            ttft_s_max=model.ttft_max,
        ),
        bounds=_bounds(model.groups),
        hysteresis=_hysteresis(model.autoscaling),
        chat=ChatSettings(
            template=model.chat_template,
            tool_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
        ),
    )


def _lending(fleets: Sequence[FleetSettings]) -> list[FleetSettings]:
    """Workers of any model may share a device, and a broker has to hear all that do: the first router of the
    first fleet that lends is the broker of all of them."""
    lenders = [fleet.router for fleet in fleets if fleet.router.broker]
    if len(lenders) < 2:  # nobody to lend to
        return list(fleets)
    expected = frozenset(name for router in lenders for name in router.expected)

    def lending(router: RouterSettings) -> RouterSettings:
        if not router.broker:
            return router
        if router is lenders[0]:
            return replace(router, expected=expected)
        return replace(router, memory_router=lenders[0].name)

    return [replace(fleet, router=lending(fleet.router)) for fleet in fleets]


def _bounds(groups: Sequence[GroupConfig]) -> dict[Role, Bounds]:
    """New workers are like the first of their role, so the first group alone grows."""
    bounds: dict[Role, Bounds] = {}
    for group in groups:
        if group.replicas_max is not None:
            least = sum(one.replicas for one in groups if one.role == group.role)
            bounds[group.role] = Bounds(least=least, most=least - group.replicas + group.replicas_max)
    return bounds


def _hysteresis(config: AutoscalingConfig) -> Hysteresis:
    return Hysteresis(
        look_s=config.metrics_interval_s, up_s=config.upscale_delay_s, down_s=config.downscale_delay_s
    )
