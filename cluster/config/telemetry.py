"""The keys of the configuration file for logs, traces, metrics and KV events. Pure."""

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from tidemill.cluster.config.values import parse_object
from tidemill.cluster.observability.telemetry import LogLevel, MetricsAlias
from tidemill.workers.options import Flag, KvEventsConfig, Text


class ConfigNode(BaseModel):
    """A mapping of the file; unknown keys are errors."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TelemetryConfig(ConfigNode):
    """The logs, traces and metrics of all processes."""

    log_level: Annotated[LogLevel, Flag("telemetry", "--log-level")] = "info"
    """level of every process; info has a line for each request"""
    log_json: Annotated[bool, Flag("telemetry", "--log-json")] = False
    """write log lines as JSON objects"""
    otlp_traces_endpoint: Annotated[Text | None, Flag("telemetry", "--otlp-traces-endpoint", "URL")] = None
    """send a trace of each request to this collector: grpc://host:4317, or http://host:4318/v1/traces; needs
    the extra `otel`"""
    metrics_alias: Annotated[MetricsAlias | None, Flag("telemetry", "--metrics-alias")] = None
    """add the core series of /metrics under this engine's names"""
    kv_events: Annotated[
        KvEventsConfig,
        BeforeValidator(parse_object),
        Flag(
            "telemetry",
            "--kv-events-config",
            "JSON",
            "publish KV events of every worker: a JSON object with the keys of telemetry.kv_events in "
            "docs/configuration.md, as vLLM has it (off)",
        ),
    ] = KvEventsConfig()
    """KV events of every worker; the flag takes the keys below as a JSON object"""
