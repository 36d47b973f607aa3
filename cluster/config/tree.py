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
from tidemill.cluster.config.values import DEVICE, Amount, Names, Port, Seconds, TextList, Threads
from tidemill.cluster.settings import GenerationConfig, HostedTools, ReasoningParser, ToolParser
from tidemill.workers.messages import Role
from tidemill.workers.options import AdapterConfig, Count, EngineConfig, Flag, Size, Text

MODELS_MAX = 64

ClusterHost = Literal["loopback", "node", "node-plain"]


def _of_role(role: Role, option: str, text: str) -> Flag:
    return Flag("workers", option, "N", text, role=role)


class GroupConfig(ConfigNode):
    """A group of workers with equal settings."""

    role: Role
    """the role of its workers: prefill computes prompts, decode generates, mixed does both"""
    replicas: Annotated[
        Count,
        _of_role("prefill", "--prefill", "number of workers that compute prompts, beside decode workers"),
        _of_role("decode", "--decode", "number of workers that generate, beside prefill workers"),
        _of_role(
            "mixed",
            "--mixed",
            "number of workers that do both, instead of prefill and decode workers (1; on CUDA one for each "
            "GPU of this machine)",
        ),
    ] = 1
    """number of workers (1; of a single group with device cuda, as many as this machine has GPUs for)"""
    replicas_max: Annotated[
        Count | None,
        _of_role("prefill", "--prefill-max", "maximum number of prefill workers under load"),
        _of_role("decode", "--decode-max", "maximum number of decode workers under load"),
        _of_role("mixed", "--mixed-max", "maximum number of mixed workers under load"),
    ] = None
    """maximum number of workers under load; only in the first group of a role"""
    tensor_parallel_size: Annotated[
        Count,
        Flag("workers", "--tensor-parallel-size", "N", short="-tp"),
        _of_role("prefill", "--prefill-tensor-parallel-size", "number of ranks of a prefill worker"),
        _of_role("decode", "--decode-tensor-parallel-size", "number of ranks of a decode worker"),
    ] = 1
    """number of ranks of a worker: its processes, on one node"""
    tensor_parallel_nodes: Annotated[Count, Flag("workers", "--tensor-parallel-nodes", "N")] = 1
    """number of equal parts of these ranks, each on one node, so the maximum number of nodes of a worker"""
    memory: Annotated[Size | None, Flag("memory", "--memory", "SIZE")] = None
    """memory of each worker for pages and states (1GiB; on CUDA what weights, steps and graphs leave)"""
    memory_floor: Annotated[Size | None, Flag("memory", "--memory-floor", "SIZE")] = None
    """minimum memory of each worker, never lent (the need of one request of max_model_len tokens)"""
    device: Annotated[str, Field(pattern=DEVICE), Flag("device", "--device", "NAME")] = "cpu"
    """device of the workers: cpu, cuda, cuda:1"""
    threads: Annotated[Threads, Flag("workers", "--threads", "N|auto")] = None
    """CPU threads of each rank; auto is num_cpus, or the cores of the server's machine divided by all ranks
    (1 in a joined Ray cluster); 1 for a model of less than 32 MiB (auto)"""
    num_cpus: Amount = 0.0
    """CPUs that Ray reserves for each rank"""
    num_gpus: Annotated[Amount | None, Flag("device", "--num-gpus", "N")] = None
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
    downscale_to_zero_delay_s: Annotated[
        Seconds | None, Flag("workers", "--downscale-to-zero-delay", "SECONDS")
    ] = None
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


class ModelConfig(ConfigNode):
    """A served model with its own workers and routers."""

    model: Text
    """a folder, a repository of the hub (ORG/NAME), s3://, gs:// or https://, or a bundled model: keeper"""
    served_model_name: Annotated[Names | None, Flag("model", "--served-model-name", "NAME")] = None
    """names of the model in requests; replies and metrics have the first one (the value of `model`)"""
    revision: Annotated[Text | None, Flag("model", "--revision", "REVISION")] = None
    """branch, tag or commit of a repository of the hub (its main branch)"""
    download_dir: Annotated[Text | None, Flag("model", "--download-dir", "FOLDER")] = None
    """folder for downloaded models (the cache of the hub)"""
    max_model_len: Annotated[Count | None, Flag("model", "--max-model-len", "TOKENS")] = None
    """maximum tokens of prompt and output together (as many as the model and the memory allow)"""
    chat_template: Annotated[Text | None, Flag("model", "--chat-template", "FILE")] = None
    """a file with a Jinja template, or its text (the model's own)"""
    tool_call_parser: Annotated[ToolParser, Flag("model", "--tool-call-parser")] = "auto"
    """format of the model's tool calls; auto decides by its template and architecture"""
    reasoning_parser: Annotated[ReasoningParser, Flag("model", "--reasoning-parser")] = "auto"
    """format of the model's reasoning; auto decides likewise"""
    generation_config: Annotated[GenerationConfig, Flag("model", "--generation-config")] = "auto"
    """defaults of temperature, top_p, top_k, min_p and repetition_penalty: auto takes those of the model's
    generation_config.json, vllm takes none"""
    ttft_max: Annotated[Seconds | None, Flag("model", "--ttft-max", "SECONDS")] = None
    """refuse a request immediately (429) if it would wait longer than this many seconds for others before its
    first token (no limit)"""
    enable_prefix_caching: Annotated[bool, Flag("model", "--enable-prefix-caching")] = True
    """let requests use the pages of earlier ones; without it each request has keys of its own, so that only
    its own workers find its pages"""
    routers: Annotated[Count, Flag("model", "--routers", "N")] = 1
    """number of routers; requests continue when one is lost"""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False, min_length=1)] = (
        GroupConfig(role="mixed"),
    )
    """groups of workers (one that computes prompts and generates)"""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    """delays of scaling, for groups with replicas_max, and of ending all workers of an idle model"""
    engine: EngineConfig = EngineConfig()
    """settings of all its workers"""
    adapter: AdapterConfig = AdapterConfig()
    """engine of all its workers, if it is not our own"""

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

    url: Annotated[Text | None, Flag("cluster", "--store", "URL")] = None
    """the page store: file:///path?size=8GiB, mooncake?size=8GiB (started here), mooncake://host:port, or
    several tiers separated by commas, the nearest first (a temporary folder)"""
    secret_file: Annotated[Text | None, Flag("cluster", "--store-secret-file", "PATH")] = None
    """file with 32 secret bytes, in hex, base64 or binary, that seal stored objects"""


class EdgeConfig(ConfigNode):
    """The endpoint for clients and its security."""

    host: Annotated[Text, Flag("endpoint", "--host", "ADDRESS")] = "127.0.0.1"
    """address to listen on"""
    port: Annotated[Port, Flag("endpoint", "--port", "PORT")] = 8000
    """port of HTTP; 0 is any free port"""
    grpc_port: Annotated[Port | None, Flag("endpoint", "--grpc-port", "PORT")] = None
    """port of gRPC, served only if set; 0 is any free port"""
    frontends: Annotated[int, Field(ge=1, le=64), Flag("endpoint", "--frontends", "N")] = 1
    """number of processes that answer clients at these ports; one is the server itself"""
    send_timeout: Annotated[Seconds, Flag("endpoint", "--send-timeout", "SECONDS")] = 30.0
    """end a stream if the client reads nothing for this many seconds"""
    shutdown_timeout: Annotated[Seconds, Flag("endpoint", "--shutdown-timeout", "SECONDS")] = 5.0
    """on a stop signal, let open requests continue for this many seconds"""
    database: Annotated[Text | None, Flag("endpoint", "--database", "URL")] = None
    """store responses and conversations in a file, for the frontends of one machine, or in a Postgres for all
    edges: postgresql://USER@HOST/NAME, with the extra `postgres`; also $TIDEMILL_DATABASE (nothing is
    stored)"""
    database_ttl: Annotated[Seconds, Flag("endpoint", "--database-ttl", "SECONDS")] = 2_592_000.0
    """seconds between the last response of a conversation, or of a chain, and its removal"""
    hosted_tools: Annotated[HostedTools, Flag("endpoint", "--hosted-tools")] = "ignore"
    """tools that OpenAI or Anthropic would run themselves, like web_search: ignore leaves them out of the
    prompt and names them in x-tidemill-ignored, refuse answers 400"""
    api_keys_file: Annotated[Text | None, Flag("security", "--api-keys-file", "PATH")] = None
    """YAML with digests of keys, their tenants and rates: `tidemill key TENANT` makes an entry"""
    ssl_certfile: Annotated[Text | None, Flag("security", "--ssl-certfile", "PATH")] = None
    """certificate of the server, for HTTPS and gRPC"""
    ssl_keyfile: Annotated[Text | None, Flag("security", "--ssl-keyfile", "PATH")] = None
    """private key of the certificate"""
    ssl_ca_certs: Annotated[Text | None, Flag("security", "--ssl-ca-certs", "PATH")] = None
    """require client certificates signed by these authorities"""

    allowed_origins: Annotated[TextList, Flag("security", "--allowed-origins", "ORIGIN")] = ()
    """sites whose pages may call this server from a browser, also as a JSON list; * is all"""
    allowed_methods: Annotated[TextList, Flag("security", "--allowed-methods", "METHOD")] = ("*",)
    """methods that those pages may use"""
    allowed_headers: Annotated[TextList, Flag("security", "--allowed-headers", "HEADER")] = ("*",)
    """headers that those pages may send"""
    allow_credentials: Annotated[bool, Flag("security", "--allow-credentials")] = False
    """let the browser send cookies and certificates for those pages"""

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        has_both = self.ssl_certfile is not None and self.ssl_keyfile is not None
        if not has_both and (self.ssl_certfile or self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("HTTPS takes --ssl-certfile and --ssl-keyfile together")
        return self


class ClusterConfig(ConfigNode):
    """The Ray cluster, and the connections between its processes."""

    ray_address: Annotated[Text | None, Flag("cluster", "--ray-address", "ADDRESS")] = None
    """join this Ray cluster instead of starting one"""
    namespace: Text = "tidemill"
    """Ray namespace of the actors"""
    router_port: Annotated[Port, Flag("cluster", "--router-port", "PORT")] = 0
    """port of the first router, which edges join; others take the next ones. 0 is free ports"""
    host: Annotated[ClusterHost, Flag("security between the cluster's processes", "--cluster-host")] = (
        "loopback"
    )
    """address of routers and workers: loopback, the node's with certificates, or the node's in plain text"""
    ssl_certfile: Annotated[
        Text | None, Flag("security between the cluster's processes", "--cluster-ssl-certfile", "PATH")
    ] = None
    """certificate of every process on every node, for the DNS name tidemill"""
    ssl_keyfile: Annotated[
        Text | None, Flag("security between the cluster's processes", "--cluster-ssl-keyfile", "PATH")
    ] = None
    """private key of the certificate"""
    ssl_ca_certs: Annotated[
        Text | None, Flag("security between the cluster's processes", "--cluster-ssl-ca-certs", "PATH")
    ] = None
    """authorities that sign the certificates of the cluster's processes"""
    ssl_ca_keyfile: Annotated[
        Text | None, Flag("security between the cluster's processes", "--cluster-ssl-ca-keyfile", "PATH")
    ] = None
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
