"""Every key of the configuration file with its bounds, its default and its meaning. Pure.

The text below a key appears in the schema, in docs/configuration.md and in `tidemill serve --help`.
"""

import re
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tidemill.cluster.config.telemetry import ConfigNode, TelemetryConfig
from tidemill.cluster.config.values import (
    DEVICE,
    Amount,
    Count,
    Duration,
    Names,
    Port,
    Seconds,
    Size,
    Text,
    Threads,
)
from tidemill.cluster.settings import ReasoningParser, ToolParser
from tidemill.kvstore.layout import KvDtype
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.messages import Role
from tidemill.workers.settings import (
    DRAFTS_MAX,
    Backend,
    CheckpointStrategy,
    ComputeDtype,
    LoadFormat,
    Reduce,
    SpeculativeMethod,
)

MODELS_MAX = 64

ClusterHost = Literal["loopback", "node", "node-plain"]


class GroupConfig(ConfigNode):
    """A group of workers with equal settings."""

    role: Role
    """the role of its workers: prefill computes prompts, decode generates, mixed does both"""
    replicas: Count = 1
    """number of workers (1; of a single group with device cuda, as many as this machine has GPUs for)"""
    replicas_max: Count | None = None
    """maximum number of workers under load; only in the first group of a role"""
    tensor_parallel_size: Count = 1
    """number of ranks of a worker: its processes, on one node"""
    tensor_parallel_nodes: Count = 1
    """number of equal parts of these ranks, each on one node, so the maximum number of nodes of a worker"""
    memory: Size | None = None
    """memory of each worker for pages and states (1GiB; on CUDA what weights, steps and graphs leave)"""
    memory_floor: Size | None = None
    """minimum memory of each worker, never lent (the need of one request of max_model_len tokens)"""
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"
    """device of the workers: cpu, cuda, cuda:1"""
    threads: Threads = None
    """CPU threads of each rank; auto is num_cpus, or the cores of the server's machine divided by all ranks
    (1 in a joined Ray cluster); 1 for a model of less than 32 MiB (auto)"""
    num_cpus: Amount = 0.0
    """CPUs that Ray reserves for each rank"""
    num_gpus: Amount | None = None
    """GPUs that Ray reserves for each rank; below 1, workers share one and its memory (1 on CUDA, else 0)"""
    resources: dict[Text, Amount] = {}  # noqa: RUF012 - pydantic copies it
    """custom resources that Ray reserves for each rank, by name"""
    labels: dict[Text, Text] = {}  # noqa: RUF012 - pydantic copies it
    """labels in Ray that a worker's node must have, by name: `value`, `!value`, `in(a,b)` or `!in(a,b)`"""

    @property
    def gpus(self) -> float:
        """The GPUs that Ray reserves for each rank. It hides all others, so `cuda:1` has none."""
        return float(self.device == "cuda") if self.num_gpus is None else self.num_gpus

    @field_validator("replicas_max")
    @classmethod
    def _check_maximum(cls, most: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("replicas", 1)
        if most is not None and most < least:
            raise ValueError(f"is {most}: set it to replicas, {least}, or more")
        return most


class AutoscalingConfig(ConfigNode):
    """The delays before workers of a model are added or removed, and the way to no worker and back."""

    metrics_interval_s: Seconds = 2.0
    """seconds between two samples of the load"""
    upscale_delay_s: Seconds = 30.0
    """seconds of high load before workers are added"""
    downscale_delay_s: Seconds = 300.0
    """seconds of low load before workers are removed"""
    downscale_to_zero_delay_s: Seconds | None = None
    """seconds without requests before all workers of the model end; the next request starts as many as at the
    beginning (never)"""
    cold_start_timeout_s: Seconds = 300.0
    """with downscale_to_zero_delay_s: the longest time that a request waits for workers to start; then 503"""
    max_queued_requests: Count = 256
    """with downscale_to_zero_delay_s: maximum number of requests that wait for workers; more get 503"""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if not self.metrics_interval_s <= self.upscale_delay_s <= self.downscale_delay_s:
            raise ValueError(
                "set metrics_interval_s to upscale_delay_s or less, and that to downscale_delay_s or less"
            )
        return self


class EngineConfig(ConfigNode):
    """The settings of all workers of a model."""

    load_format: LoadFormat = "auto"
    """weights: auto reads them; dummy draws random ones for the config.json, to test speed and memory"""
    page_size: Count = 64
    """tokens per page"""
    compute_dtype: ComputeDtype | None = None
    """data type of factors; sums are float32 (float32 for weights in float32 or float16, else bfloat16)"""
    kv_cache_dtype: KvDtype | None = None
    """data type of pages (that of products; bfloat16 if workers of the model have a CUDA device)"""
    state_dtype: KvDtype = "float32"
    """data type of recurrent states of linear attention; bfloat16 halves them, in steps and checkpoints, and
    rounds a state after each token"""
    max_num_seqs: Count | None = None
    """maximum number of rows in a step (128; on CUDA 256)"""
    max_num_batched_tokens: Count | None = None
    """maximum number of tokens in a step (512; on CUDA 8192)"""
    itl_target: Duration | None = None
    """target for the time of a step with prompts beside streams, for example 50ms; at least twice a step
    without prompts; 0 for no limit (100ms; on CUDA 50ms)"""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=DRAFTS_MAX)] = 0
    """draft tokens per row and step; they are verified, so the answers stay the same (on CUDA but for the
    rounding of sums: docs/operations.md)"""
    speculative_method: SpeculativeMethod = "auto"
    """source of draft tokens: ngram searches the text, mtp is the model's head, auto is mtp if it has one"""
    tensor_parallel_reduce: Reduce | None = None
    """exchange between the ranks of a worker: exact gathers columns and has the bits of one rank; fast has
    two all-reduces a layer, and its last bits depend on the number of ranks (exact; on CUDA fast)"""
    tensor_parallel_backend: Backend | None = None
    """library of this exchange; gloo goes through the host (shared-memory; over nodes gloo; on CUDA nccl)"""
    tensor_parallel_one_shot: Size | None = None
    """with fast, over NCCL on one node: sums of up to this size are one launch over memory that the GPUs map
    from each other, for example 256KiB; no device has run it yet (0)"""
    tensor_parallel_interface: Text | None = None
    """network interface of this exchange between nodes (that of the node's address in Ray)"""
    allow_inexact_groups: bool = False
    """with fast: workers of different numbers of ranks read each other's pages, and round differently"""
    enable_expert_parallel: bool = False
    """with fast: each rank has some experts whole, instead of columns of every expert"""
    overlap: bool = True
    """launch the next step before the tokens of the current one are read"""
    kernels: Literal["cpu", "triton", "reference"] | None = None
    """variants of the operators (cpu; on CUDA triton)"""
    backing: Literal["fixed", "mmap", "kvcached"] | None = None
    """allocation of pages and states: fixed at the start, the others on demand (mmap; on CUDA kvcached)"""
    enforce_eager: bool = False
    """launch decode steps without CUDA graphs; on CPU call their operators one by one"""
    async_scheduling: bool = False
    """on CUDA: make the inputs of the next step while the current one runs; no device has run it yet"""
    numa_bind: bool = False
    """keep each rank on the NUMA node of its GPU, threads and memory; the ranks of a worker on CPUs share out
    the nodes; no device has run it yet"""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """on CUDA: part of the device's memory, or of the worker's share of it, that a worker may take for
    weights, steps, CUDA graphs, pages and states"""
    memory_broker: bool = True
    """let workers on one device lend each other unused memory, also between models, instead of keeping it"""
    checkpoint_strategy: CheckpointStrategy = "lazy"
    """checkpoints during decoding: none, double (two more states per row), or lazy (one, at a checkpoint)"""
    checkpoint_interval: Count | None = None
    """tokens between checkpoints during decoding, a multiple of the page size (the page size; on CUDA the
    tokens whose pages are as large as a checkpoint)"""
    checkpoints_per_path: Count = 16
    """maximum number of checkpoints kept along one prefix"""
    eviction_policy: Policy = "value"
    """evict first: the least recently used entry, or the one that saves the least compute per byte"""


class ModelConfig(ConfigNode):
    """A served model with its own workers and routers."""

    model: Text
    """a folder, a repository of the hub (ORG/NAME), s3://, gs:// or https://, or a bundled model: keeper"""
    served_model_name: Names | None = None
    """names of the model in requests; replies and metrics have the first one (the value of `model`)"""
    revision: Text | None = None
    """branch, tag or commit of a repository of the hub (its main branch)"""
    download_dir: Text | None = None
    """folder for downloaded models (the cache of the hub)"""
    max_model_len: Count | None = None
    """maximum tokens of prompt and output together (as many as the model and the memory allow)"""
    chat_template: Text | None = None
    """a file with a Jinja template, or its text (the model's own)"""
    tool_call_parser: ToolParser = "auto"
    """format of the model's tool calls; auto decides by its template and architecture"""
    reasoning_parser: ReasoningParser = "auto"
    """format of the model's reasoning; auto decides likewise"""
    ttft_max: Seconds | None = None
    """refuse a request immediately (429) if it would wait longer than this many seconds for others before its
    first token (no limit)"""
    enable_prefix_caching: bool = True
    """let requests use the pages of earlier ones; without it each request has keys of its own, so that only
    its own workers find its pages"""
    routers: Count = 1
    """number of routers; requests continue when one is lost"""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False, min_length=1)] = (
        GroupConfig(role="mixed"),
    )
    """groups of workers (one that computes prompts and generates)"""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    """delays of scaling, for groups with replicas_max, and of ending all workers of an idle model"""
    engine: EngineConfig = EngineConfig()
    """settings of all its workers"""

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: tuple[GroupConfig, ...]) -> tuple[GroupConfig, ...]:
        roles = [group.role for group in groups]
        if "mixed" in roles and set(roles) != {"mixed"}:
            raise ValueError("mixed workers (--mixed N) do both roles: leave out prefill and decode workers")
        for role in () if "mixed" in roles else ("prefill", "decode"):
            if role not in roles:
                raise ValueError(f"there is no {role} worker: add a {role} group, or use mixed workers only")
        for index, group in enumerate(groups):
            if group.replicas_max is not None and group.role in roles[:index]:
                raise ValueError(f"only the first {group.role} group can grow: move replicas_max there")
        return groups

    @field_validator("groups")
    @classmethod
    def _check_devices(cls, groups: tuple[GroupConfig, ...]) -> tuple[GroupConfig, ...]:
        """Refuse workers on one device that do not ask for a part of it."""
        counts = Counter[str]()
        for group in groups:
            if group.device != "cpu" and not group.gpus:
                device = "cuda:0" if group.device == "cuda" else group.device
                counts[device] += group.replicas_max or group.replicas
        for device, count in counts.items():
            if count > 1:
                raise ValueError(
                    f"{count} workers would share {device}, each with its own weights: run one, or set "
                    "device to cuda and num_gpus to 1, or to 0.5 for two workers on a GPU"
                )
        return groups

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


class StoreConfig(ConfigNode):
    """The page store through which workers exchange pages."""

    url: Text | None = None
    """the page store: file:///path?size=8GiB, mooncake?size=8GiB (started here), mooncake://host:port, or
    several tiers separated by commas, the nearest first (a temporary folder)"""
    secret_file: Text | None = None
    """file with 32 secret bytes, in hex, base64 or binary, that seal stored objects"""


class EdgeConfig(ConfigNode):
    """The endpoint for clients and its security."""

    host: Text = "127.0.0.1"
    """address to listen on"""
    port: Port = 8000
    """port of HTTP; 0 is any free port"""
    grpc_port: Port | None = None
    """port of gRPC, served only if set; 0 is any free port"""
    frontends: Annotated[int, Field(ge=1, le=64)] = 1
    """number of processes that answer clients at these ports; one is the server itself"""
    send_timeout: Seconds = 30.0
    """end a stream if the client reads nothing for this many seconds"""
    shutdown_timeout: Seconds = 5.0
    """on a stop signal, let open requests continue for this many seconds"""
    api_keys_file: Text | None = None
    """YAML with digests of keys, their tenants and rates: `tidemill key TENANT` makes an entry"""
    ssl_certfile: Text | None = None
    """certificate of the server, for HTTPS and gRPC"""
    ssl_keyfile: Text | None = None
    """private key of the certificate"""
    ssl_ca_certs: Text | None = None
    """require client certificates signed by these authorities"""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        has_both = self.ssl_certfile is not None and self.ssl_keyfile is not None
        if not has_both and (self.ssl_certfile or self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("HTTPS takes --ssl-certfile and --ssl-keyfile together")
        return self


class ClusterConfig(ConfigNode):
    """The Ray cluster, and the connections between its processes."""

    ray_address: Text | None = None
    """join this Ray cluster instead of starting one"""
    namespace: Text = "tidemill"
    """Ray namespace of the actors"""
    router_port: Port = 0
    """port of the first router, which edges join; others take the next ones. 0 is free ports"""
    host: ClusterHost = "loopback"
    """address of routers and workers: loopback, the node's with certificates, or the node's in plain text"""
    ssl_certfile: Text | None = None
    """certificate of every process on every node, for the DNS name tidemill"""
    ssl_keyfile: Text | None = None
    """private key of the certificate"""
    ssl_ca_certs: Text | None = None
    """authorities that sign the certificates of the cluster's processes"""
    ssl_ca_keyfile: Text | None = None
    """private key of the authority, with which `tidemill join-token` admits edges"""

    @model_validator(mode="after")
    def _check_certificates(self) -> Self:
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        missing = [name for name in names if getattr(self, name) is None]
        if missing and len(missing) < len(names):
            raise ValueError(f"{missing[0]} is missing: processes take all three of {', '.join(names)}")
        if missing and self.ssl_ca_keyfile is not None:
            raise ValueError(
                f"ssl_ca_keyfile signs for processes with certificates: give {', '.join(names)}, too"
            )
        if missing and self.host == "node":
            raise ValueError(
                "host node lets other machines reach routers and workers: give certificates with "
                "--cluster-ssl-certfile, --cluster-ssl-keyfile and --cluster-ssl-ca-certs, or set node-plain "
                "if no other machine can reach that network"
            )
        return self


class RootConfig(ConfigNode):
    """The root of the file."""

    models: Annotated[tuple[ModelConfig, ...], Field(strict=False, min_length=1, max_length=MODELS_MAX)]
    """models behind one endpoint"""
    store: StoreConfig = StoreConfig()
    """the page store through which workers exchange pages"""
    edge: EdgeConfig = EdgeConfig()
    """the endpoint for clients and its security"""
    cluster: ClusterConfig = ClusterConfig()
    """the Ray cluster, and the connections between its processes"""
    telemetry: TelemetryConfig = TelemetryConfig()
    """logs, traces and metrics of all processes"""

    @field_validator("models")
    @classmethod
    def _check_names(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        for names in (labels_of(models), [name for model in models for name in model.names]):
            if duplicates := {name for name in names if names.count(name) > 1}:
                raise ValueError(
                    f"two models are called {min(duplicates)}: give each a served_model_name of its own"
                )
        return models


def labels_of(models: tuple[ModelConfig, ...]) -> list[str]:
    """Return the prefix of each model's worker names: `qwen-qwen3-next` for Qwen/Qwen3-Next. The prefix of a
    single model is empty."""
    if len(models) == 1:
        return [""]
    return [re.sub(r"[^a-z0-9.]+", "-", model.names[0].lower()).strip("-.") for model in models]
