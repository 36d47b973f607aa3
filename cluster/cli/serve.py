"""The options of `tidemill serve`, which set keys of its configuration."""

import argparse
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin

from tidemill.cluster.cli.arguments import UsageError
from tidemill.cluster.cli.security import KEY_VARIABLE, find_detached, security_of
from tidemill.cluster.config.flags import FLAGS, Flag
from tidemill.cluster.config.fleets import telemetry_of, with_visible_gpus
from tidemill.cluster.config.overrides import GivenFlag
from tidemill.cluster.config.paths import kind_of
from tidemill.cluster.config.reading import dump, load_config
from tidemill.cluster.config.tree import RootConfig
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.server.endpoint import Endpoint
from tidemill.cluster.settings import WORKER_ENVIRON, ray_environ
from tidemill.cluster.supervisor.store_plan import plan_store

TEXTS = {"TIME", "N|auto", "JSON"}
"""The metavars of flags whose values the configuration reads from text."""

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
    titles = {title: serve.add_argument_group(title) for title in dict.fromkeys(flag.title for flag in FLAGS)}
    for flag in FLAGS:
        names = [flag.option] if flag.short is None else [flag.option, flag.short]
        titles[flag.title].add_argument(*names, dest=MARK + flag.option, help=help_of(flag), **_shape(flag))
    titles["security"].add_argument(
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


def config_of_options(options: argparse.Namespace) -> RootConfig:
    """Return the configuration of the --config file, if there is one, and the flags, with a worker for each
    GPU of this machine where it has no number. Raises ConfigError."""
    values = [GivenFlag(flag, getattr(options, MARK + flag.option)) for flag in FLAGS]
    given = [value for value in values if value.value is not None]
    return with_visible_gpus(load_config(options.config, options.model, given), count_gpus)


def count_gpus() -> int:
    """Return the number of GPUs that this process sees."""
    from tidemill.workers.device import count_gpus  # noqa: PLC0415 - torch, for CUDA alone

    return count_gpus()


def help_of(flag: Flag) -> str:
    """Return the help of a flag, with its default if there is one that is not a switch."""
    if flag.text is not None:
        return flag.text
    default = cast("object", flag.field.default)
    if default is None or isinstance(default, bool):
        return flag.config_key.text
    shown = f"{default:g}" if isinstance(default, float) else default
    return f"{flag.config_key.text} ({shown})"


def _shape(flag: Flag) -> dict[str, Any]:
    """Return the arguments of `add_argument` for the value; the configuration checks bounds."""
    kind, is_list = kind_of(flag.field.annotation)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    kind = str if flag.metavar in TEXTS else kind
    shape: dict[str, Any] = {"type": kind, "metavar": flag.metavar}
    return {**shape, "nargs": "+"} if is_list else shape


def _detached_config(config: RootConfig, ray_address: str, store_url: str | None, port: int) -> str:
    """Return the text of the configuration for a server on this Ray."""
    store = config.store if store_url is None else config.store.model_copy(update={"url": store_url})
    parts = {
        "cluster": config.cluster.model_copy(update={"ray_address": ray_address}),
        "edge": config.edge.model_copy(update={"port": port}),
        "store": store,
    }
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
    plan = None if config.store.url is None else plan_store(config.store.url)
    if plan is not None and (plan.master is not None or plan.owner is not None):
        raise UsageError(
            f"--detach cannot run the processes of the store {config.store.url}: give file:///path, or "
            "mooncake://HOST:PORT of a master that runs by itself"
        )


def endpoint_of(config: RootConfig, api_keys: Sequence[str] | None, environ: Mapping[str, str]) -> Endpoint:
    """Return the endpoint of a configuration. Raises TidemillError."""
    edge = config.edge
    return Endpoint(
        host=edge.host,
        port=edge.port,
        grpc_port=edge.grpc_port,
        security=security_of(edge, api_keys, environ),
        telemetry=telemetry_of(config.telemetry),
        limits=EdgeLimits(send_s_max=edge.send_timeout, shutdown_s_max=edge.shutdown_timeout),
    )


def detach(
    config: RootConfig,
    api_keys: Sequence[str] | None,
    environ: Mapping[str, str],
    store_folders: Sequence[Path],
) -> int:
    """Start a server in the background and return when it serves; its own store is in the first of
    `store_folders` that exists. This process imports neither Ray nor torch."""
    from tidemill.cluster.server.detached import start_detached  # noqa: PLC0415 - psutil

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
    from tidemill.cluster.server.detached import stop_detached  # noqa: PLC0415 - psutil

    server = find_detached(options.url)
    if server is None:
        raise UsageError("no detached server runs here: `tidemill serve --detach` starts one")
    stop_detached(server)
    sys.stdout.write(f"{server.url} has ended\n")
    return 0
