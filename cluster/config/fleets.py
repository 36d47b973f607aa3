"""Translate a configuration into the settings of the cluster that it describes. Pure."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from tidemill.cluster.config.flags import FLAGS, with_config_paths
from tidemill.cluster.config.paths import fields_of
from tidemill.cluster.config.problems import ConfigError
from tidemill.cluster.config.threads import threads_of
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
    OWN_ENGINE,
    ChatSettings,
    ClusterSettings,
    FleetSettings,
    RouterSettings,
    WorkerSettings,
    worker_name,
)
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role
from tidemill.workers.options import EngineConfig
from tidemill.workers.settings import (
    MEMORY_BYTES,
    EngineSettings,
    HostedSettings,
    KvEventSettings,
    SettingsError,
)
from tidemill.workers.sources.names import ModelSource, local_folder, source_of
from tidemill.workers.vllm.settings import VllmSettings

ROLES: tuple[Role, ...] = get_args(Role)
_ENGINE_FIELDS = {field.name for field in fields(EngineSettings)}


VLLM = {
    "build": "tidemill.workers.vllm.build:build_vllm",
    "check": "tidemill.workers.vllm.build:check_vllm",
}
"""The names of the Build and the Check of vLLM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The settings of engines that are not in the file: the running store, the folder of compiled kernels,
    the cores of this machine and the folders of downloaded models."""

    store_url: str
    cache_folder: Path
    cores: int = 1
    folders: Mapping[ModelSource, Path] = field(default_factory=dict[ModelSource, Path])


def source_of_model(model: ModelConfig) -> ModelSource | None:
    """Return the place to download the model from; None: its folder is here. Raises SourceError."""
    folder = None if model.download_dir is None else Path(model.download_dir)
    return source_of(model.model, model.revision, folder)


def folders_of(models: Sequence[ModelConfig], find: Callable[[ModelSource], Path]) -> dict[ModelSource, Path]:
    """Return the folders that `find` has for the models to download. Raises SourceError."""
    sources = {source for model in models if (source := source_of_model(model)) is not None}
    return {source: find(source) for source in sources}


def cluster_settings(config: RootConfig, surroundings: Surroundings, source: str = "") -> ClusterSettings:
    """Return the settings of the cluster; `source` is the path of the file, if there is one. Raises
    ConfigError, which names keys of the file, or SettingsError without a file."""
    fleets = [_fleet(config, index, surroundings, source) for index in range(len(config.models))]
    return ClusterSettings(
        fleets=tuple(_with_router_ports(_with_memory_router(fleets), config.cluster.router_port)),
        ray_address=config.cluster.ray_address,
        namespace=config.cluster.namespace,
    )


def summary(config: RootConfig) -> str:
    """Return the served models and their workers: `keeper with 1 prefill + 1 decode`."""
    return "; ".join(
        f"{', '.join(model.names)} with "
        + " + ".join(f"{count} {role}" for role, count in counts_of(model).items())
        for model in config.models
    )


def counts_of(model: ModelConfig) -> dict[Role, int]:
    """Return the initial number of workers per role."""
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
    config: RootConfig, model: ModelConfig, group: GroupConfig, surroundings: Surroundings
) -> EngineSettings:
    """Return the engine settings of the workers of a group. Raises SettingsError."""
    on_cuda = any(other.device != "cpu" for other in model.groups)
    if group.device not in {"cpu", "cuda"} and group.tensor_parallel_size > 1:
        raise SettingsError(
            f"--device {group.device} is one device: set it to cuda for the"
            f" {group.tensor_parallel_size} ranks of a worker"
        )
    _check_nodes(config, group)
    on_gpus = any(other.device != "cpu" and other.tensor_parallel_size > 1 for other in model.groups)
    source = source_of_model(model)
    folder = local_folder(model.model) if source is None else surroundings.folders[source]
    asked = model.engine.kv_cache_dtype
    made: dict[str, Any] = {
        "model_folder": folder,
        "model_source": None if source is None else source.pinned(folder),
        "cache_folder": surroundings.cache_folder,
        "store_url": surroundings.store_url,
        "store_secret_file": None if config.store.secret_file is None else Path(config.store.secret_file),
        "kv_cache_dtype": "bfloat16" if on_cuda and asked == "auto" else asked,
        "device_share": min(1.0, group.gpus or 1.0),
        "memory_bytes": memory_bytes_of(group),
        "memory_max_bytes": _memory_max_bytes(config, model, group),
        "memory_floor_bytes": None if group.memory_floor is None else parse_bytes(group.memory_floor),
        "threads": threads_of(config, model, group, folder, surroundings.cores),
        "tensor_parallel_sizes": tuple(sorted({other.tensor_parallel_size for other in model.groups})),
        "tensor_parallel_reduce": model.engine.tensor_parallel_reduce or ("fast" if on_gpus else "exact"),
    }
    return EngineSettings(**_by_name(model) | _by_name(model.engine) | _by_name(group) | made)


def hosted_settings(
    config: RootConfig, model: ModelConfig, group: GroupConfig, surroundings: Surroundings
) -> HostedSettings:
    """Return the settings of the workers of a group, whatever their engine. Raises SettingsError."""
    own = engine_settings(config, model, group, surroundings)
    return own if model.adapter.is_own else _vllm_settings(config, model, group, own)


def programs_of(model: ModelConfig) -> Mapping[str, str]:
    """Return the names of the Build and the Check of a model's engine."""
    return OWN_ENGINE if model.adapter.is_own else VLLM


def _vllm_settings(
    config: RootConfig, model: ModelConfig, group: GroupConfig, own: EngineSettings
) -> VllmSettings:
    """Return the settings of the workers of a group, from those that our own engine would have."""
    named = f"--engine {model.adapter.engine}"
    if config.telemetry.kv_events.enable_kv_cache_events:
        raise SettingsError(f"{named} sends its events to its worker: leave out --kv-events-config")
    usual = EngineConfig()
    options = {flag.key: flag.option for flag in FLAGS if flag.scope == "engine"}
    set_here = [
        option for key, option in options.items() if getattr(model.engine, key) != getattr(usual, key)
    ]
    set_here += ["--memory-floor"] * (group.memory_floor is not None)
    set_here += ["--tensor-parallel-nodes"] * (group.tensor_parallel_nodes > 1)
    if set_here:
        raise SettingsError(f"{', '.join(set_here)} is of our own engine: leave it out with {named}")
    hosted: dict[str, Any] = {field.name: getattr(own, field.name) for field in fields(HostedSettings)}
    hosted |= {"tensor_parallel_size": 1, "tensor_parallel_sizes": ()}  # of Ray's processes
    return VllmSettings(
        **hosted,
        ranks=group.tensor_parallel_size,
        python=Path(model.adapter.python or sys.executable),
        args=model.adapter.args,
        urls=model.adapter.urls,
        transfers=group.role != "mixed",
    )


def _by_name(node: ModelConfig | EngineConfig | GroupConfig) -> dict[str, Any]:
    """Return what the mapping sets of EngineSettings: the keys with the names of its fields."""
    return {name: getattr(node, name) for name in fields_of(type(node)) if name in _ENGINE_FIELDS}


def _check_nodes(config: RootConfig, group: GroupConfig) -> None:
    """Check that ranks on several nodes can reach each other. Raises SettingsError."""
    named = f"--tensor-parallel-nodes {group.tensor_parallel_nodes}"
    if group.tensor_parallel_nodes > 1 and config.cluster.ray_address is None:
        raise SettingsError(
            f"{named} needs a Ray cluster of several nodes: set --ray-address, or leave it out"
        )
    if group.tensor_parallel_nodes > 1 and config.cluster.host == "loopback":
        raise SettingsError(
            f"{named}: ranks reach a worker at the address of its node: set --cluster-host to node, with"
            " certificates, or to node-plain if no other machine can reach that network"
        )


def kv_events_of(config: RootConfig, index: int, role: Role) -> KvEventSettings | None:
    """Return the settings of KV events for the workers of a role of the model at `index`. The roles of all
    models take turns in the ranks, so that any number of workers of each has ranks of its own."""
    events = config.telemetry.kv_events
    if not events.enable_kv_cache_events or events.publisher == "null":
        return None
    roles = [(number, known) for number, model in enumerate(config.models) for known in counts_of(model)]
    return KvEventSettings(**asdict(events), rank=roles.index((index, role)), stride=len(roles))


def with_workers_of_urls(config: RootConfig) -> RootConfig:
    """Return the configuration with a worker for each server that others run. Raises ConfigError."""

    def with_workers(index: int, model: ModelConfig) -> ModelConfig:
        urls, (group, *others) = model.adapter.urls, model.groups
        if not urls:
            return model
        number = group.replicas if "replicas" in group.model_fields_set else len(urls)
        if others or number != len(urls) or group.replicas_max is not None:
            raise ConfigError(
                [f"models[{index}].adapter.engine (--engine) has {len(urls)} URLs: each is one mixed worker"]
            )
        group = group.model_copy(update={"replicas": number})
        return model.model_copy(update={"groups": (group,)})

    models = tuple(with_workers(*pair) for pair in enumerate(config.models))
    return config.model_copy(update={"models": models})


def with_visible_gpus(config: RootConfig, count_gpus: Callable[[], int]) -> RootConfig:
    """Return the configuration with as many workers as have GPUs on this machine, if it has a single group
    whose ranks have a GPU each, and no number of workers, in a Ray cluster of its own."""
    model, others = config.models[0], config.models[1:]
    group, *more = model.groups
    is_set = "replicas" in group.model_fields_set or group.replicas_max is not None
    is_set = is_set or group.device != "cuda" or group.gpus != 1
    if others or more or is_set or config.cluster.ray_address is not None:
        return config
    group = group.model_copy(update={"replicas": max(1, count_gpus() // group.tensor_parallel_size)})
    return config.model_copy(update={"models": (model.model_copy(update={"groups": (group,)}),)})


def memory_bytes_of(group: GroupConfig) -> int | None:
    """Return the memory of each worker; None: what its device has left."""
    if group.memory is not None:
        return parse_bytes(group.memory)
    return MEMORY_BYTES if group.device == "cpu" else None


def _memory_max_bytes(config: RootConfig, model: ModelConfig, group: GroupConfig) -> int | None:
    """Return the maximum budget of a worker. With the broker it is the memory of all workers, of any model,
    on the same kind of device, for they may share one. Without the broker an operator may set a budget up to
    twice the worker's own memory. None: the worker decides by its device."""
    if not model.engine.memory_broker:
        own_bytes = memory_bytes_of(group)
        return None if own_bytes is None else 2 * own_bytes
    device_type = _device_type(group.device)
    lenders = [lender for other in config.models if other.engine.memory_broker for lender in other.groups]
    total_bytes = 0
    for lender in lenders:
        if _device_type(lender.device) == device_type:
            lent_bytes = memory_bytes_of(lender)
            if lent_bytes is None:
                return None
            total_bytes += lender.replicas * lent_bytes
    return total_bytes


def _device_type(device: str) -> str:
    return device.partition(":")[0]


def _fleet(config: RootConfig, index: int, surroundings: Surroundings, source: str) -> FleetSettings:
    model, label = config.models[index], labels_of(config.models)[index]
    workers: list[WorkerSettings] = []
    for number, group in enumerate(model.groups):
        try:
            engine = hosted_settings(config, model, group, surroundings)
        except SettingsError as error:
            if not source:
                raise
            raise ConfigError([with_config_paths(str(error), index, number)], source) from error
        programs = programs_of(model)
        processes = 1 if model.adapter.is_own else group.tensor_parallel_size  # of one rank in Ray
        template = WorkerSettings(
            name="",
            role=group.role,
            engine=replace(engine, kv_events=kv_events_of(config, index, group.role)),
            build=programs["build"],
            check=programs["check"],
            num_cpus=group.num_cpus * processes,
            num_gpus=group.gpus * processes,
            resources={name: amount * processes for name, amount in group.resources.items()},
            labels=group.labels,
        )
        first = sum(worker.role == group.role for worker in workers)
        workers += [
            replace(template, name=worker_name(label, group.role, position))
            for position in range(first, first + group.replicas)
        ]
    scaling = model.autoscaling
    to_zero = scaling.downscale_to_zero_delay_s is not None
    return FleetSettings(
        label=label,
        names=model.names,
        workers=tuple(workers),
        router=RouterSettings(
            name=f"{label}-router" if label else "router",
            replicas=model.routers,
            broker=model.engine.memory_broker and model.adapter.is_own,
            expected=frozenset(worker.name for worker in workers),
            ttft_s_max=math.inf if model.ttft_max is None else model.ttft_max,
            cache_folder=surroundings.cache_folder,
            held_max=scaling.max_queued_requests if to_zero else math.inf,
        ),
        cold_start_s_max=scaling.cold_start_timeout_s if to_zero else None,
        bounds=_bounds(model.groups),
        hysteresis=_hysteresis(scaling),
        prefix_caching=model.enable_prefix_caching,
        chat=ChatSettings(
            template=model.chat_template,
            tool_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
            generation_config=model.generation_config,
        ),
    )


def _with_memory_router(fleets: Sequence[FleetSettings]) -> list[FleetSettings]:
    """Make one router the memory broker of all fleets that lend. Workers of any model may share a device, and
    its broker needs the heartbeats of all of them. The broker is the first router of the first fleet that
    lends."""
    lenders = [fleet.router for fleet in fleets if fleet.router.broker]
    if len(lenders) < 2:
        return list(fleets)
    expected = frozenset(name for router in lenders for name in router.expected)

    def with_memory_router(router: RouterSettings) -> RouterSettings:
        if not router.broker:
            return router
        if router is lenders[0]:
            return replace(router, expected=expected)
        return replace(router, memory_router=lenders[0].name)

    return [replace(fleet, router=with_memory_router(fleet.router)) for fleet in fleets]


def _with_router_ports(fleets: Sequence[FleetSettings], port: int) -> Iterator[FleetSettings]:
    """Yield the fleets with a port for each router, from `port` on; 0 leaves them free."""
    for fleet in fleets:
        ports = tuple(range(port, port + fleet.router.replicas)) if port else ()
        yield replace(fleet, router=replace(fleet.router, ports=ports))
        port += len(ports)


def _bounds(groups: Sequence[GroupConfig]) -> dict[Role, Bounds]:
    """Return the bounds of roles that scale; only the first group of a role grows."""
    bounds: dict[Role, Bounds] = {}
    for group in groups:
        if group.replicas_max is not None:
            least = sum(other.replicas for other in groups if other.role == group.role)
            bounds[group.role] = Bounds(least=least, most=least - group.replicas + group.replicas_max)
    return bounds


def _hysteresis(config: AutoscalingConfig) -> Hysteresis:
    return Hysteresis(
        look_s=config.metrics_interval_s,
        up_s=config.upscale_delay_s,
        down_s=config.downscale_delay_s,
        zero_s=math.inf if config.downscale_to_zero_delay_s is None else config.downscale_to_zero_delay_s,
    )
