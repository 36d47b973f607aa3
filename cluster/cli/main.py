"""The `tidemill` command; only this file reads arguments, the environment and the clock.

Commands import modules when they run, because `tidemill status` must not wait for Ray and torch,
and Ray reads its environment when it is imported.
"""

# ruff: noqa: PLC0415 - see above

import argparse
import logging
import os
import secrets
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tidemill import __version__
from tidemill.cluster.cli.bench import add_bench_options
from tidemill.cluster.cli.config import add_config_commands, local_problems
from tidemill.cluster.cli.fleet import CommandContext, add_fleet_commands
from tidemill.cluster.cli.joining import TOKEN_VARIABLE, add_joining_commands, credentials_of
from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.options.plan import add_plan_options
from tidemill.cluster.cli.options.simulate import add_simulate_options
from tidemill.cluster.cli.security import KEY_VARIABLE, add_key_options, with_cluster_security
from tidemill.cluster.cli.serve import (
    DATABASE_VARIABLE,
    add_edge_options,
    add_serving_options,
    config_of_options,
    detach,
    endpoint_of,
    joined_endpoint_of,
    ready,
    routers_of,
    stop,
)
from tidemill.cluster.cli.store_commands import add_store_commands, sealing_of
from tidemill.cluster.config.fleets import (
    Surroundings,
    cluster_settings,
    folders_of,
    summary,
    telemetry_of,
)
from tidemill.cluster.config.threads import arrangement, count_cores
from tidemill.cluster.settings import WORKER_ENVIRON, ray_environ
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.sources.download import download
from tidemill.workers.sources.names import bundled

if TYPE_CHECKING:
    from tidemill.cluster.config.tree import RootConfig
    from tidemill.cluster.edge.requests.context import Sources
    from tidemill.cluster.processes.server import Work

EXIT_WRONG_ANSWER = 1
EXIT_REFUSED = 2
EXIT_LOST = os.EX_TEMPFAIL  # 75, of sysexits.h: try again
EXIT_INTERRUPTED = 130

STORE_FOLDERS = (Path("/dev/shm"),)  # noqa: S108 - the parent of a private folder, without --store


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. 0: done. 1: the demo had a wrong answer, or the store does
    not have the object. 2: refused, with one line that names the fix. 75: Ray has ended, and the server with
    it."""
    options = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is with nohup
        signal.signal(signal.SIGHUP, _interrupt)
    try:
        return options.run(options)
    except TidemillError as error:
        sys.stderr.write(f"tidemill: {error}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _interrupt(number: int, frame: object) -> None:
    """Make SIGTERM and SIGHUP unwind the stack like SIGINT, so that everything started is stopped."""
    del number, frame
    raise KeyboardInterrupt


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="tidemill", description="A serving cluster for hybrid language models, on Ray."
    )
    command.add_argument("--version", action="version", version=f"tidemill {__version__}")
    commands = command.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP")
    add_serving_options(serve)
    serve.set_defaults(run=_serve)

    edge = commands.add_parser("edge", help="join a running cluster and serve it, too")
    add_edge_options(edge)
    edge.set_defaults(run=_edge)

    add_config_commands(commands.add_parser("config", help="check or show a configuration file"))

    add_key_options(commands.add_parser("key", help="make an API key for `tidemill serve --api-keys-file`"))

    demo = commands.add_parser("demo", help="serve the bundled model, ask it questions, check the answers")
    demo.add_argument("--kill", action="store_true", help="kill -9 a worker in mid-answer, show the diff")
    demo.set_defaults(run=_demo)

    models = commands.add_parser("models", help="list the bundled models with the paths of their folders")
    models.set_defaults(run=_models)

    context = CommandContext(os.environ, time.monotonic, time.time, time.sleep)
    add_fleet_commands(commands.add_parser, context)
    add_joining_commands(commands.add_parser, context)
    add_bench_options(
        commands.add_parser("bench", help="measure an OpenAI-compatible server under load"),
        context.environ,
        time.perf_counter,
    )
    add_simulate_options(
        commands.add_parser("simulate", help="replay a request trace through a cluster in virtual time")
    )
    add_plan_options(
        commands.add_parser("plan", help="find the cheapest cluster for a model, a load and targets"),
        lambda: count_cores(os.sched_getaffinity(0)),
        lambda config, work: _run(config, None, work),
        lambda config: list(local_problems(config, offline=False)),
    )
    add_store_commands(
        commands.add_parser("store", help="inspect or benchmark a page store"), time.perf_counter, _new_rng
    )
    completion = commands.add_parser("completion", help="print the completions of a shell for `tidemill`")
    completion.add_argument("shell", choices=("bash", "zsh"))
    completion.set_defaults(run=_completion)

    down = commands.add_parser("down", help="end the server that `tidemill serve --detach` has started")
    down.add_argument("--url", help="its address, if there are several")
    down.set_defaults(run=stop)

    cleanup = commands.add_parser(
        "cleanup", help="remove what killed servers of this user have left: processes, folders, shared memory"
    )
    cleanup.add_argument("--dry-run", action="store_true", help="only list it")
    cleanup.set_defaults(run=_cleanup)
    return command


def _serve(options: argparse.Namespace) -> int:
    config = config_of_options(options)
    if options.detach:
        return detach(config, options.api_key, os.environ, STORE_FOLDERS)
    source = "" if options.config is None else str(options.config)
    return _run(config, options.api_key, ready(f"serves {summary(config)}"), source, options.detached_folder)


def _edge(options: argparse.Namespace) -> int:
    routers, (endpoint, tls) = routers_of(options.join), joined_endpoint_of(options, os.environ)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from tidemill.cluster.processes.joined_edge import Join, run_edge, run_frontend

    token = options.token or os.environ.pop(TOKEN_VARIABLE, None)
    credentials = None if token is None else credentials_of(routers, token, tls, _cache_folder(), time.time)
    join = Join(routers=routers, tls=tls, cache_folder=_cache_folder(), credentials=credentials)
    if options.inherited is not None:
        run_frontend(endpoint, join, _sources(), options.inherited)
        return 0
    run_edge(endpoint, join, _sources(), ready(f"is an edge of {', '.join(routers)}"))
    return 0


def _sources() -> "Sources":
    from tidemill.cluster.edge.requests.context import Sources

    return Sources(
        clock_s=time.monotonic,
        unix_time_s=time.time,
        new_id=lambda: uuid.uuid4().hex,
        rng=_new_rng(),
    )


def _new_rng() -> Random:
    return Random(secrets.randbits(64))  # noqa: S311 - of sampling and of temporary objects, no secrets


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill"


def _demo(options: argparse.Namespace) -> int:
    from tidemill.cluster.cli.demo import run_demo
    from tidemill.cluster.cli.demo_kill import run_kill

    sized = ["--prefill", "1", "--decode", "2" if options.kill else "1", "--memory", "64MiB"]
    arguments = ["serve", "keeper", "--port", "0", *sized, "--log-level", "warning"]
    config = config_of_options(parser().parse_args(arguments))
    is_right = False

    async def work(url: str) -> None:
        nonlocal is_right
        is_right = await (run_kill if options.kill else run_demo)(
            url, "keeper", bundled()["keeper"], Console()
        )

    status = _run(config, None, work)
    return status if is_right else EXIT_WRONG_ANSWER


def _models(options: argparse.Namespace) -> int:
    del options
    for name, folder in bundled().items():
        sys.stdout.write(f"{name}\t{folder}\n")
    return 0


def _completion(options: argparse.Namespace) -> int:
    import shtab

    sys.stdout.write(shtab.complete(parser(), options.shell))
    return 0


def _cleanup(options: argparse.Namespace) -> int:
    from tidemill.cluster.cli.status import human_bytes
    from tidemill.cluster.processes.system.private_folder import remove_abandoned

    verb = "would remove" if options.dry_run else "removed"
    for left in remove_abandoned(_folders(), dry_run=options.dry_run):
        processes = "".join(f", process {process.pid}" for process in left.processes)
        sys.stdout.write(f"{verb} {left.folder} ({human_bytes(left.num_bytes)}){processes}\n")
    return 0


def _run(
    config: "RootConfig",
    api_keys: Sequence[str] | None,
    work: "Work",
    source: str = "",
    detached_folder: Path | None = None,
) -> int:
    """Serve the cluster of `config` while `work` runs; return the exit status. `source` is the path of the
    file, if there is one. `detached_folder` is that of a detached server, whose endpoint this process
    becomes. Ray's environment is set before any module imports Ray."""
    telemetry, store = telemetry_of(config.telemetry), config.store
    if detached_folder is not None:
        config = _become_endpoint(config, detached_folder)
    joins = config.cluster.ray_address is not None
    os.environ.update(ray_environ(joins=joins, token=secrets.token_hex(32)))
    os.environ.update(telemetry.environ())
    for name, value in WORKER_ENVIRON.items():
        os.environ.setdefault(name, value)
    from tidemill.cluster.observability.logs import start_logs
    from tidemill.cluster.processes.detached import remove_detached
    from tidemill.cluster.processes.launch import RayEnded
    from tidemill.cluster.processes.server import serve, shared_store
    from tidemill.cluster.processes.system.private_folder import read_record
    from tidemill.cluster.processes.system.reaper import reaping

    endpoint = endpoint_of(config, api_keys, os.environ)
    os.environ.pop(KEY_VARIABLE, None)  # Ray's processes and the workers do not need it
    if endpoint.database is not None and endpoint.frontends > 1:
        os.environ[DATABASE_VARIABLE] = endpoint.database.url
    sealing_of(None if store.secret_file is None else Path(store.secret_file))  # reports errors early
    console = Console(stderr=True)
    with reaping(_folders()), shared_store(store.url, STORE_FOLDERS, detached_folder) as shared:
        store_url, programs = shared
        if store.url is not None and store_url != store.url:
            console.print(Text(f"store: {store_url}"))  # for `tidemill store`
        cores = count_cores(os.sched_getaffinity(0))
        folders = folders_of(config.models, download)
        surroundings = Surroundings(
            store_url=store_url, cache_folder=_cache_folder(), cores=cores, folders=folders
        )
        settings = cluster_settings(config, surroundings, source)
        settings = with_cluster_security(settings, config.cluster).with_telemetry(telemetry)
        settings = replace(settings, detached_folder=detached_folder, programs=programs)
        start_logs(telemetry)

        async def announced(url: str) -> None:
            if not joins:
                logging.getLogger(__name__).info(arrangement(settings.fleets, cores))
            await work(url)

        server = None if detached_folder is None else read_record(detached_folder)
        try:
            serve(endpoint, settings, _sources(), console, announced)
        except RayEnded as error:
            sys.stderr.write(f"tidemill: {error}\n")
            if server is not None and not Path(server.root).exists():
                remove_detached(server)  # no other process can find it
            return EXIT_LOST
    if detached_folder is not None and (server := read_record(detached_folder)) is not None:
        remove_detached(server)  # a signal has ended this process, and so the server
    return 0


def _become_endpoint(config: "RootConfig", folder: Path) -> "RootConfig":
    """Become the endpoint of a detached server, started by its command or by an actor of Ray, which has set
    variables for itself; return the configuration with the address of its Ray. Raises UsageError."""
    from tidemill.cluster.processes.system.children import RAY_ADDRESS, lock_endpoint

    if not lock_endpoint(folder):
        raise UsageError(f"the endpoint of {folder} runs already")
    ours = ray_environ(joins=False)
    for name in [name for name in os.environ if name.startswith("RAY_") and name not in ours]:
        del os.environ[name]
    joined = {"ray_address": (folder / RAY_ADDRESS).read_text().strip()}
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=joined)})


def _folders() -> list[Path]:
    """Return the folders below which servers make theirs."""
    return [Path(tempfile.gettempdir()), *STORE_FOLDERS]
