"""Every key of the configuration file: its bounds, its default, and what it means. Pure.

The text below a key is what the schema, docs/configuration.md and `tidemill serve --help` say of it.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from tidemill.cluster.observability.telemetry import LogLevel, MetricsAlias
from tidemill.cluster.settings import ReasoningParser, ToolParser
from tidemill.kvstore.layout import KvDtype
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.messages import Role
from tidemill.workers.settings import DRAFTS_MAX, CheckpointStrategy, SpeculativeMethod

MODELS_MAX = 64
PORT_MAX = 65535

DEVICE = r"^(cpu|cuda(:[0-9]+)?)$"
SIZE = r"^\s*[0-9]+(\.[0-9]+)?\s*([kmgtKMGT]([iI]?[bB]?)|[bB])?\s*$"
NAME = {"type": "string", "minLength": 1}

ClusterHost = Literal["loopback", "node", "node-plain"]


def _size(value: object) -> object:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(text, str):
        parse_bytes(text)  # raises ValueError
    return text


def _names(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _part_or_whole(count: float) -> float:
    if count > 1 and not count.is_integer():
        raise ValueError(f"is {count:g}: Ray reserves a part of one, or whole ones")
    return float(count)


Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0), AfterValidator(_part_or_whole)]
Port = Annotated[int, Field(ge=0, le=PORT_MAX)]
Size = Annotated[
    str,
    BeforeValidator(_size),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": SIZE}, {"type": "integer", "minimum": 0}]}),
]
Names = Annotated[
    tuple[Text, ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [NAME, {"type": "array", "items": NAME, "minItems": 1}]}),
]


class ConfigNode(BaseModel):
    """A mapping of the file. Keys that it has not are errors."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class GroupConfig(ConfigNode):
    """Workers that are alike."""

    role: Role
    """what its workers do: prefill computes prompts, decode generates, mixed does both"""
    replicas: Count = 1
    """workers"""
    replicas_max: Count | None = None
    """more are started under load, up to so many in all; stands in the first group of a role"""
    tensor_parallel_size: Count = 1
    """processes that a worker consists of: its ranks, on one node"""
    memory: Size = "1GiB"
    """each worker's share, for pages and states"""
    memory_floor: Size | None = None
    """a worker never has less (what one request of max_model_len tokens needs)"""
    device: Annotated[str, Field(pattern=DEVICE)] = "cpu"
    """what workers compute on: cpu, cuda, cuda:1"""
    threads: Count = 1
    """CPU threads of each rank"""
    num_cpus: Amount = 0.0
    """CPUs that Ray reserves for each rank"""
    num_gpus: Amount = 0.0
    """GPUs that Ray reserves for each rank"""
    resources: dict[Text, Amount] = {}
    """custom resources that Ray reserves for each rank, by name"""
    labels: dict[Text, Text] = {}
    """labels in Ray that a worker's node must have, by name: `value`, `!value`, `in(a,b)` or `!in(a,b)`"""

    @field_validator("replicas_max")
    @classmethod
    def _grow(cls, most: int | None, info: ValidationInfo) -> int | None:
        least = info.data.get("replicas", 1)
        if most is not None and most < least:
            raise ValueError(f"is {most}: set it to replicas, {least}, or more")
        return most


class AutoscalingConfig(ConfigNode):
    """How long a model is watched before its workers come and go."""

    metrics_interval_s: Seconds = 2.0
    """between two looks at the load"""
    upscale_delay_s: Seconds = 30.0
    """of load, before there are more workers"""
    downscale_delay_s: Seconds = 300.0
    """of calm, before there are fewer"""

    @model_validator(mode="after")
    def _rise(self) -> Self:
        if not self.metrics_interval_s <= self.upscale_delay_s <= self.downscale_delay_s:
            raise ValueError(
                "set metrics_interval_s to upscale_delay_s or less, and that to downscale_delay_s or less"
            )
        return self


class EngineConfig(ConfigNode):
    """What all workers of a model have in common."""

    page_size: Count = 64
    """tokens in a page"""
    kv_cache_dtype: KvDtype | None = None
    """of pages (float32; bfloat16 where workers of the model have a CUDA device)"""
    max_num_seqs: Count = 64
    """rows of a step"""
    max_num_batched_tokens: Count = 512
    """token budget of a step"""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=DRAFTS_MAX)] = 0
    """tokens of a row that are guessed and verified; the answers stay the same"""
    speculative_method: SpeculativeMethod = "auto"
    """who guesses: ngram looks back in the text, mtp is the model's own prediction head, auto the head if the
    model has one"""
    overlap: bool = True
    """launch the next step before the tokens of this one are read"""
    kernels: Literal["cpu", "triton", "reference"] | None = None
    """operator variants (cpu; on CUDA triton)"""
    backing: Literal["fixed", "mmap", "kvcached"] | None = None
    """whose memory holds pages and states: fixed takes all of it at once, the others what is used (mmap; on
    CUDA kvcached)"""
    enforce_eager: bool = False
    """on CUDA: launch decode steps without CUDA graphs"""
    memory_broker: bool = True
    """workers of one device lend each other what they do not need, also between models; without, each keeps
    its share"""
    checkpoint_strategy: CheckpointStrategy = "lazy"
    """while generating: none, two more states per row, or one more at a checkpoint only"""
    checkpoint_interval: Count | None = None
    """tokens between checkpoints while generating, a multiple of the page size (the page size)"""
    checkpoints_per_path: Count = 16
    """kept at most on the way to one prefix"""
    eviction_policy: Policy = "value"
    """what goes first: used least recently, or least compute saved per byte"""


class ModelConfig(ConfigNode):
    """A model that is served, with workers and routers of its own."""

    model: Text
    """a Hugging Face folder, or a bundled model: keeper"""
    served_model_name: Names | None = None
    """what clients call the model; of several names replies and metrics carry the first (as `model`)"""
    max_model_len: Count | None = None
    """limit of prompt and output together, in tokens (what the model and its memory allow)"""
    chat_template: Text | None = None
    """a file with a Jinja template, or its text (the model's own)"""
    tool_call_parser: ToolParser = "auto"
    """how the model writes calls of tools; by its template and its architecture"""
    reasoning_parser: ReasoningParser = "auto"
    """how it writes what it reasons, likewise"""
    ttft_max: Seconds = 60.0
    """refuse at once (429) what would wait longer than this for its first token, in seconds"""
    routers: Count = 1
    """routers; requests go on when one is lost"""
    groups: Annotated[tuple[GroupConfig, ...], Field(strict=False, min_length=1)] = (
        GroupConfig(role="prefill"),
        GroupConfig(role="decode"),
    )
    """its workers (one for prefill, one for decode)"""
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    """when workers come and go, of groups with replicas_max"""
    engine: EngineConfig = EngineConfig()
    """what all its workers have in common"""

    @field_validator("groups")
    @classmethod
    def _serve(cls, groups: tuple[GroupConfig, ...]) -> tuple[GroupConfig, ...]:
        roles = [group.role for group in groups]
        if "mixed" in roles and set(roles) != {"mixed"}:
            raise ValueError("mixed workers (--mixed N) do both, and stand alone: without prefill and decode")
        for role in () if "mixed" in roles else ("prefill", "decode"):
            if role not in roles:
                raise ValueError(f"there is no {role} worker: give it a group, or have mixed ones alone")
        for index, group in enumerate(groups):
            if group.replicas_max is not None and group.role in roles[:index]:
                raise ValueError(f"replicas_max stands in the first {group.role} group: no other one grows")
        return groups

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


class StoreConfig(ConfigNode):
    """Where workers exchange pages."""

    url: Text | None = None
    """where workers exchange pages: file:///path?size=8GiB, mooncake?size=8GiB (started here),
    mooncake://host:port, or several tiers with commas between them, the nearest first (a folder of its own,
    removed at the end)"""
    secret_file: Text | None = None
    """holds 32 secret bytes, in hex, base64 or as they are, that seal what is stored"""


class EdgeConfig(ConfigNode):
    """Where clients ask, and who may."""

    host: Text = "127.0.0.1"
    """address to listen on"""
    port: Port = 8000
    """0 takes a free one"""
    grpc_port: Port | None = None
    """serve gRPC as well, on this port; 0 takes a free one"""
    send_timeout: Seconds = 30.0
    """end an answer of which the client takes nothing for so many seconds"""
    shutdown_timeout: Seconds = 5.0
    """when told to stop, let open answers go on for so many seconds"""
    api_keys_file: Text | None = None
    """YAML with digests of keys, their tenants and rates: `tidemill key TENANT` makes an entry"""
    ssl_certfile: Text | None = None
    """serve HTTPS with this certificate, and gRPC"""
    ssl_keyfile: Text | None = None
    """its private key"""
    ssl_ca_certs: Text | None = None
    """clients must show a certificate signed by these"""

    @model_validator(mode="after")
    def _pair(self) -> Self:
        has_both = self.ssl_certfile is not None and self.ssl_keyfile is not None
        if not has_both and (self.ssl_certfile or self.ssl_keyfile or self.ssl_ca_certs):
            raise ValueError("HTTPS takes --ssl-certfile and --ssl-keyfile together")
        return self


class ClusterConfig(ConfigNode):
    """The Ray cluster, and who may talk to its routers and workers."""

    ray_address: Text | None = None
    """join this Ray cluster; without, start one"""
    namespace: Text = "tidemill"
    """of the names of its actors in Ray"""
    host: ClusterHost = "loopback"
    """where routers and workers listen: inside their machine; at their node's address, with the certificates
    below; or there in plain, for networks that nobody else can reach"""
    ssl_certfile: Text | None = None
    """of every process, on every node; it names tidemill"""
    ssl_keyfile: Text | None = None
    """its private key"""
    ssl_ca_certs: Text | None = None
    """who has a certificate signed by these is of the cluster"""

    @model_validator(mode="after")
    def _guard(self) -> Self:
        files = {one: getattr(self, one) for one in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise ValueError(
                f"{missing[0]} is missing: certificates between processes take all three of ssl_certfile, "
                "ssl_keyfile and ssl_ca_certs"
            )
        if missing and self.host == "node":
            raise ValueError(
                "host node lets other machines reach routers and workers: give certificates with "
                "--cluster-ssl-certfile, --cluster-ssl-keyfile and --cluster-ssl-ca-certs, or say node-plain "
                "if nobody else can reach that network"
            )
        return self


class TelemetryConfig(ConfigNode):
    """What processes tell about themselves."""

    log_level: LogLevel = "info"
    """of every process; info has a line for each request"""
    log_json: bool = False
    """a JSON object for each line"""
    otlp_traces_endpoint: Text | None = None
    """send a trace of each request to this collector: grpc://host:4317, or http://host:4318/v1/traces; needs
    the extra `otel`"""
    metrics_alias: MetricsAlias | None = None
    """/metrics has the core series under this engine's names as well"""


class RootConfig(ConfigNode):
    """The whole file."""

    models: Annotated[tuple[ModelConfig, ...], Field(strict=False, min_length=1, max_length=MODELS_MAX)]
    """what is served, behind one endpoint"""
    store: StoreConfig = StoreConfig()
    """where workers exchange pages"""
    edge: EdgeConfig = EdgeConfig()
    """where clients ask, and who may"""
    cluster: ClusterConfig = ClusterConfig()
    """the Ray cluster, and who may talk to its routers and workers"""
    telemetry: TelemetryConfig = TelemetryConfig()
    """what processes tell about themselves"""

    @field_validator("models")
    @classmethod
    def _told_apart(cls, models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
        for what in (labels_of(models), [name for model in models for name in model.names]):
            if twice := {one for one in what if what.count(one) > 1}:
                raise ValueError(
                    f"two models are called {min(twice)}: give each a served_model_name of its own"
                )
        return models


def labels_of(models: tuple[ModelConfig, ...]) -> list[str]:
    """What names of each model's workers start with: `qwen-qwen3-next` of Qwen/Qwen3-Next; empty where there
    is one model."""
    if len(models) == 1:
        return [""]
    return [re.sub(r"[^a-z0-9.]+", "-", model.names[0].lower()).strip("-.") for model in models]
