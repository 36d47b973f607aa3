"""The options of `tidemill serve` that say what its processes tell about themselves."""

import argparse

from tidemill.cluster.telemetry import LOG_LEVELS, METRICS_ALIASES, Telemetry


def add_telemetry_options(serve: argparse.ArgumentParser) -> None:
    telemetry = serve.add_argument_group("telemetry")
    telemetry.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default="info",
        help="of every process; info has a line for each request (%(default)s)",
    )
    telemetry.add_argument("--log-json", action="store_true", help="a JSON object for each line")
    telemetry.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="send a trace of each request to this collector: grpc://host:4317, or "
        "http://host:4318/v1/traces; needs the extra `otel`",
    )
    telemetry.add_argument(
        "--metrics-alias",
        choices=METRICS_ALIASES,
        help="/metrics has the core series under this engine's names as well",
    )


def telemetry_of(options: argparse.Namespace) -> Telemetry:
    return Telemetry(
        log_level=options.log_level,
        log_json=options.log_json,
        traces_url=options.otlp_traces_endpoint,
        metrics_alias=options.metrics_alias,
    )
