"""What the processes of a server tell about themselves: plain settings that travel to the actors."""

from dataclasses import dataclass
from typing import Literal, get_args

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

MetricsAlias = Literal["vllm"]
METRICS_ALIASES: tuple[MetricsAlias, ...] = get_args(MetricsAlias)


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """`traces_url` is an OTLP collector's; None: nothing is traced, and nothing is imported for it.
    `metrics_alias` is the engine under whose names /metrics has the core series as well.
    """

    log_level: LogLevel = "warning"
    log_json: bool = False
    traces_url: str | None = None
    metrics_alias: MetricsAlias | None = None

    def environ(self) -> dict[str, str]:
        """What Ray must find in the environment when it starts: it writes lines of actors to the server's own
        stderr, with a prefix, and puts those together that look alike. Lines of JSON stay as they are."""
        if not self.log_json:
            return {}
        return {"RAY_DISABLE_WORKER_LOG_PREFIX": "1", "RAY_DEDUP_LOGS": "0"}


QUIET = Telemetry()
