"""From the tree of a configuration to the settings of the cluster that it describes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from tidemill.cluster.autoscale import Bounds, Hysteresis
from tidemill.cluster.config.tree import (
    AutoscalingConfig,
    Config,
    GroupConfig,
    ModelConfig,
    TelemetryConfig,
    labels_of,
)
from tidemill.cluster.settings import (
    ClusterSettings,
    FleetSettings,
    RouterSettings,
    WorkerSettings,
    worker_name,
)
from tidemill.cluster.telemetry import Telemetry
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role
from tidemill.workers.models.bundled import bundled
from tidemill.workers.settings import EngineSettings

ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What engines need that no file says: the store that runs, and where compiled kernels are kept."""

    store_url: str
    cache_folder: Path


def cluster_settings(config: Config, around: Surroundings) -> ClusterSettings:
    """Raises SettingsError."""
    return ClusterSettings(
        fleets=tuple(
            _fleet(config, model, label, around)
            for model, label in zip(config.models, labels_of(config.models), strict=True)
        ),
        ray_address=config.cluster.ray_address,
        namespace=config.cluster.namespace,
    )


def summary(config: Config) -> str:
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
    config: Config, model: ModelConfig, group: GroupConfig, around: Surroundings
) -> EngineSettings:
    """Of the workers of a group. Raises SettingsError."""
    engine, secret_file, floor = model.engine, config.store.secret_file, group.memory_floor
    return EngineSettings(
        model_folder=bundled().get(model.model) or Path(model.model),
        memory_bytes=parse_bytes(group.memory),
        memory_max_bytes=_memory_max_bytes(model, group),
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
        kv_dtype=engine.kv_cache_dtype,
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
        tensor_parallel_size=group.tensor_parallel_size,
        tensor_parallel_sizes=tuple(sorted({one.tensor_parallel_size for one in model.groups})),
    )


def _memory_max_bytes(model: ModelConfig, group: GroupConfig) -> int:
    """What a worker may come to have: with the broker, all that the workers of its kind of device bring, who
    may be on one. A budget by hand may be up to twice the share without it."""
    if not model.engine.memory_broker:
        return 2 * parse_bytes(group.memory)
    kind = _kind(group.device)
    return sum(one.replicas * parse_bytes(one.memory) for one in model.groups if _kind(one.device) == kind)


def _kind(device: str) -> str:
    return device.partition(":")[0]


def _fleet(config: Config, model: ModelConfig, label: str, around: Surroundings) -> FleetSettings:
    workers: list[WorkerSettings] = []
    for group in model.groups:
        alike = WorkerSettings(
            name="",
            role=group.role,
            engine=engine_settings(config, model, group, around),
            num_cpus=group.num_cpus,
            num_gpus=group.num_gpus,
            resources=group.resources,
            labels=group.labels,
        )
        first = sum(worker.role == group.role for worker in workers)
        workers += [
            replace(alike, name=worker_name(label, group.role, index))
            for index in range(first, first + group.replicas)
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
    )


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
