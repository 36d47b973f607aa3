"""The keys of the configuration file for logs, traces, metrics and KV events. Pure."""

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from tidemill.cluster.config.values import Count, Endpoint, Text, parse_object
from tidemill.cluster.observability.telemetry import LogLevel, MetricsAlias


class ConfigNode(BaseModel):
    """A mapping of the file; unknown keys are errors."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class KvEventsConfig(ConfigNode):
    """The KV events of every worker, for routers outside the cluster: docs/kv_events.md."""

    enable_kv_cache_events: bool = False
    """publish which pages and checkpoints each worker holds; needs the extra `events`"""
    publisher: Literal["null", "zmq"] = "zmq"
    """null publishes nothing"""
    endpoint: Endpoint = "tcp://127.0.0.1:5557"
    """address of the first worker: `tcp://*:5557` listens at all addresses of its machine, and the address of
    another machine is connected to"""
    replay_endpoint: Endpoint | None = None
    """address where the first worker listens for requests for past batches"""
    buffer_steps: Count = 10_000
    """maximum number of past batches that a worker keeps for replays"""
    hwm: Count = 100_000
    """maximum number of batches that wait for one slow subscriber"""
    max_queue_size: Count = 100_000
    """maximum number of batches that wait to be sent; when there are more, all are dropped, and the next one
    has everything that the worker holds"""
    topic: str = ""
    """topic of the messages"""


class TelemetryConfig(ConfigNode):
    """The logs, traces and metrics of all processes."""

    log_level: LogLevel = "info"
    """level of every process; info has a line for each request"""
    log_json: bool = False
    """write log lines as JSON objects"""
    otlp_traces_endpoint: Text | None = None
    """send a trace of each request to this collector: grpc://host:4317, or http://host:4318/v1/traces; needs
    the extra `otel`"""
    metrics_alias: MetricsAlias | None = None
    """add the core series of /metrics under this engine's names"""
    kv_events: Annotated[KvEventsConfig, BeforeValidator(parse_object)] = KvEventsConfig()
    """KV events of every worker; the flag takes the keys below as a JSON object"""
