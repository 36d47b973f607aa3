"""The options of `tidemill serve`, which set keys of its configuration, and those of `tidemill edge`."""

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import ValidationError

from tidemill.cluster.cli.joining import TOKEN_VARIABLE
from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.security import (
    KEY_VARIABLE,
    cluster_tls,
    endpoint_tls,
    find_detached,
    security_of,
)
from tidemill.cluster.config.flags import FLAGS, KeyFlag
from tidemill.cluster.config.fleets import telemetry_of, with_visible_gpus, with_workers_of_urls
from tidemill.cluster.config.overrides import GivenFlag
from tidemill.cluster.config.paths import kind_of
from tidemill.cluster.config.reading import dump, load_config
from tidemill.cluster.config.tree import ClusterConfig, EdgeConfig, RootConfig, TelemetryConfig
from tidemill.cluster.edge.records.database import DatabaseSettings, database_settings
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import Security
from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.processes.endpoint.endpoint import Endpoint
from tidemill.cluster.settings import WORKER_ENVIRON, ray_environ

DATABASE_VARIABLE = "TIDEMILL_DATABASE"
"""The URL of the database, which edge processes inherit; lists of processes show arguments."""

TEXTS = {"TIME", "N|auto", "JSON"}
"""The metavars of flags whose values the configuration reads from text."""

_EDGE_KEYS = {
    "edge": (
        *("host", "port", "grpc_port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
        *("database", "database_ttl"),
    ),
    "cluster": ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"),
    "telemetry": ("log_level", "log_json"),
}
EDGE_FLAGS = tuple(flag for flag in FLAGS if flag.key in _EDGE_KEYS.get(flag.scope, ()))
"""The flags of `tidemill serve` that an edge has, too."""

MARK = "flag "
"""The prefix of the names under which argparse stores the values of flags."""


def add_serving_options(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face folder, a repository of the hub (ORG/NAME), s3://, gs:// or https://, or a "
        "bundled model: keeper",
    )
    serve.add_argument(
        "--config",
        "--model-config",
        type=Path,
        metavar="FILE",
        help="a YAML file that describes the cluster, see docs/configuration.md; other flags override it",
    )
    sections = add_flags(serve, FLAGS)
    sections["security"].add_argument(
        "--api-key",  # not a configuration key, because no file has a key in clear
        action="append",
        metavar="KEY",
        help=f"require this API key, an operator's, of clients; can be repeated (${KEY_VARIABLE})",
    )
    serve.add_argument(
        "--detach",
        action="store_true",
        help="serve in the background until `tidemill down`; return when the server is ready",
    )
    serve.add_argument("--detached-folder", type=Path, help=argparse.SUPPRESS)  # of the endpoint's process


def add_edge_options(edge: argparse.ArgumentParser) -> None:
    edge.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT[,HOST:PORT]",
        help="addresses of the cluster's routers, see --router-port of `tidemill serve`; with --token the "
        "address that `tidemill join-token` printed",
    )
    edge.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"get a certificate of the cluster by this one-time token (${TOKEN_VARIABLE})",
    )
    add_flags(edge, EDGE_FLAGS)
    edge.add_argument("--inherited", help=argparse.SUPPRESS)  # of an edge process of a server


def joined_endpoint_of(
    options: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[Endpoint, MutualTls | None]:
    """Return the endpoint of an edge that joins, and its certificate of the cluster. All else comes from the
    cluster. Raises UsageError."""

    def given(scope: str) -> dict[str, object]:
        values = {
            flag.key: getattr(options, MARK + flag.option) for flag in EDGE_FLAGS if flag.scope == scope
        }
        return {key: value for key, value in values.items() if value is not None}

    try:
        edge = EdgeConfig.model_validate(given("edge"))
        cluster = ClusterConfig.model_validate(given("cluster"))
        telemetry = telemetry_of(TelemetryConfig.model_validate(given("telemetry")))
    except ValidationError as error:
        raise UsageError("; ".join(problem["msg"] for problem in error.errors())) from None
    security = Security(tls=endpoint_tls(edge))
    endpoint = Endpoint(
        host=edge.host,
        port=edge.port,
        grpc_port=edge.grpc_port,
        security=security,
        telemetry=telemetry,
        database=database_of(edge, environ),
    )
    return endpoint, cluster_tls(cluster)


def ready(text: str) -> Callable[[str], Coroutine[Any, Any, None]]:
    """Return the work of a server that serves until a signal. It prints one line, with `text`."""

    async def work(url: str) -> None:
        sys.stdout.write(f"ready: {url}/v1 {text}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()

    return work


def routers_of(text: str) -> tuple[str, ...]:
    """Return the addresses of --join. Raises UsageError."""
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"--join {text}: write addresses of routers, like 10.0.0.1:20000,10.0.0.1:20001")
    return addresses


def add_flags(command: argparse.ArgumentParser, flags: Sequence[KeyFlag]) -> dict[str, Any]:
    """Add the flags in groups by their sections, and return the groups."""
    sections: dict[str, Any] = {
        section: command.add_argument_group(section)
        for section in dict.fromkeys(flag.section for flag in flags)
    }
    for flag in flags:
        names = [flag.option] if flag.short is None else [flag.option, flag.short]
        sections[flag.section].add_argument(
            *names, dest=MARK + flag.option, help=help_of(flag), **_shape(flag)
        )
    return sections


def config_of_options(options: argparse.Namespace) -> RootConfig:
    """Return the configuration of the --config file, if there is one, and the flags, with a worker for each
    GPU of this machine where it has no number. Raises ConfigError."""
    values = [GivenFlag(flag, getattr(options, MARK + flag.option)) for flag in FLAGS]
    given = [value for value in values if value.value is not None]
    config = with_workers_of_urls(load_config(options.config, options.model, given))
    return with_visible_gpus(config, count_gpus)


def count_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    from tidemill.workers.device import count_gpus  # noqa: PLC0415 - torch, for CUDA alone

    return count_gpus()


def help_of(flag: KeyFlag) -> str:
    """Return the help of a flag, with its default if there is one that is not a switch."""
    if flag.text is not None:
        return flag.text
    default = cast("object", flag.field.default)
    default = " ".join(cast("tuple[str, ...]", default)) or None if isinstance(default, tuple) else default
    if default is None or isinstance(default, bool):
        return flag.config_key.text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{flag.config_key.text} ({shown})"


def _shape(flag: KeyFlag) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the value; the configuration checks bounds."""
    kind, is_list = kind_of(flag.field.annotation)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    kind = str if flag.metavar in TEXTS else kind
    shape: dict[str, Any] = {"type": kind, "metavar": flag.metavar}
    return {**shape, "nargs": "+"} if is_list else shape


def _detached_config(config: RootConfig, store_url: str | None, port: int) -> str:
    """Return the text of the configuration for the endpoint, which finds the address of its Ray itself."""
    store = config.store if store_url is None else config.store.model_copy(update={"url": store_url})
    parts = {"edge": config.edge.model_copy(update={"port": port}), "store": store}
    return dump(config.model_copy(update=parts))


def _check_detachable(config: RootConfig, api_keys: Sequence[str]) -> None:
    """Raise UsageError if the server needs what only a process in the foreground has."""
    if config.cluster.ray_address is not None:
        raise UsageError(
            "--detach starts a Ray of its own: leave out --ray-address, or submit the server as a Ray job"
        )
    if api_keys:
        raise UsageError(
            "--detach takes keys from --api-keys-file, which its processes read whenever they start"
        )


def endpoint_of(config: RootConfig, api_keys: Sequence[str] | None, environ: Mapping[str, str]) -> Endpoint:
    """Return the endpoint of a configuration. Raises TidemillError."""
    edge = config.edge
    return Endpoint(
        host=edge.host,
        port=edge.port,
        grpc_port=edge.grpc_port,
        frontends=edge.frontends,
        security=security_of(edge, api_keys, environ),
        telemetry=telemetry_of(config.telemetry),
        limits=EdgeLimits(
            send_s_max=edge.send_timeout,
            shutdown_s_max=edge.shutdown_timeout,
            allowed_origins=edge.allowed_origins,
            allowed_methods=edge.allowed_methods,
            allowed_headers=edge.allowed_headers,
            allow_credentials=edge.allow_credentials,
            hosted_tools=edge.hosted_tools,
        ),
        database=database_of(edge, environ),
    )


def database_of(edge: EdgeConfig, environ: Mapping[str, str]) -> DatabaseSettings | None:
    """Return the settings of the database, None without one. Raises TidemillError."""
    url = edge.database or environ.get(DATABASE_VARIABLE)
    return database_settings(url, edge.database_ttl) if url else None


def detach(
    config: RootConfig,
    api_keys: Sequence[str] | None,
    environ: Mapping[str, str],
    store_folders: Sequence[Path],
) -> int:
    """Start a server in the background and return when it serves; its own store is in the first of
    `store_folders` that exists. This process imports neither Ray nor torch."""
    from tidemill.cluster.processes.detached import start_detached  # noqa: PLC0415 - psutil

    keys = api_keys or [key for key in (environ.get(KEY_VARIABLE),) if key]
    _check_detachable(config, keys)
    temp_folder = Path(tempfile.gettempdir())
    stores = [folder for folder in (*store_folders, temp_folder) if folder.is_dir()]
    start_environ = {**WORKER_ENVIRON, **environ, **telemetry_of(config.telemetry).environ()}
    started = start_detached(
        endpoint_of(config, keys, environ),
        temp_folder,
        stores[0] if config.store.url is None else None,
        partial(_detached_config, config),
        start_environ | ray_environ(joins=False, token=secrets.token_hex(32)),
    )
    sys.stdout.write(f"{started.line}\n")
    sys.stdout.write(f"detached: pid {started.pid}, log {started.log}; `tidemill down` ends it\n")
    return 0


def stop(options: argparse.Namespace) -> int:
    """End a detached server."""
    from tidemill.cluster.processes.detached import stop_detached  # noqa: PLC0415 - psutil

    server = find_detached(options.url)
    if server is None:
        raise UsageError("no detached server runs here: `tidemill serve --detach` starts one")
    stop_detached(server)
    sys.stdout.write(f"{server.url} has ended\n")
    return 0
