"""The settings of logs, traces and metrics: plain data that is sent to the actors."""

from dataclasses import dataclass
from typing import Literal, get_args

from tidemill.workers.pickled_by_name import PickledByName

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

MetricsAlias = Literal["vllm"]
METRICS_ALIASES: tuple[MetricsAlias, ...] = get_args(MetricsAlias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry(PickledByName):
    """The settings. `traces_url` is that of an OTLP collector; None: nothing is traced, and nothing is
    imported for it. `metrics_alias` is the engine whose names /metrics has in addition for the core
    series."""

    log_level: LogLevel = "warning"
    log_json: bool = False
    traces_url: str | None = None
    metrics_alias: MetricsAlias | None = None

    def environ(self) -> dict[str, str]:
        """Return the environment for Ray's start. Ray writes lines of actors to the server's stderr, with a
        prefix, and merges those that look alike. With it, lines of JSON stay as they are."""
        if not self.log_json:
            return {}
        return {"RAY_DISABLE_WORKER_LOG_PREFIX": "1", "RAY_DEDUP_LOGS": "0"}


QUIET = Telemetry()
