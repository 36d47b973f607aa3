"""The commands that show or change a running server.

They import modules when they run, because `tidemill status` must not wait for Ray and torch.
"""

# ruff: noqa: PLC0415 - see above

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, TypeVar, get_args

from rich.console import Console

from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.security import add_server_options, server_address
from tidemill.workers.messages import Role, Unserved

if TYPE_CHECKING:
    from rich.console import RenderableType

_View = TypeVar("_View")

EXIT_NOT_ALL = 1

PERIOD_S = 2.0
PERIOD_S_MIN = 0.1
WAIT_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class CommandContext:
    """The clocks and the environment of a command; the environment may have the API key."""

    environ: Mapping[str, str]
    clock_s: Callable[[], float]  # monotonic
    unix_time_s: Callable[[], float]
    sleep: Callable[[float], None]


Run = Callable[[argparse.Namespace, ServerAddress, CommandContext], int]


def add_server_command(
    add_parser: Callable[..., argparse.ArgumentParser],
    context: CommandContext,
    name: str,
    run: Run,
    text: str,
    *,
    as_json: bool = True,
) -> argparse.ArgumentParser:
    """Add a command that calls a running server."""

    def run_command(options: argparse.Namespace) -> int:
        return run(options, server_address(options, context.environ), context)

    command = add_parser(name, help=text)
    add_server_options(command)
    if as_json:
        command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run_command)
    return command


def add_fleet_commands(add_parser: Callable[..., argparse.ArgumentParser], context: CommandContext) -> None:
    add = partial(add_server_command, add_parser, context)

    _add_status_options(add("status", _status, "show the workers of a running server"))
    _add_top_options(add("top", _top, "show the current load of a running server, the busiest workers first"))
    memory = "show the memory of a running server's workers, or set the memory budget of one"
    _add_memory_options(add("memory", _of_module("worker_commands:memory"), memory))
    scale = "set the number of workers of a role, or show the intended numbers"
    _add_scale_options(add("scale", _of_module("worker_commands:scale"), scale))
    _add_drain_options(
        add("drain", _of_module("worker_commands:drain"), "make a worker hand its work over and take no more")
    )
    _add_role_options(
        add("role", _of_module("worker_commands:role"), "give a worker of a running server another role")
    )
    why = "send requests of a file one after another, and explain why the last one was not cached"
    _add_why_options(add("why", _of_module("why:why"), why))
    bundle = "collect diagnostics of a running server in an archive, without keys and prompts"
    _add_bundle_options(add("support-bundle", _of_module("support_bundle:bundle"), bundle, as_json=False))


def _of_module(name: str) -> Run:
    """Return a command of another module, which is imported when it runs."""

    def run(options: argparse.Namespace, server: ServerAddress, context: CommandContext) -> int:
        return resolve_name(f"tidemill.cluster.cli.{name}")(options, server, context)

    return run


def show(options: argparse.Namespace, value: object, rendered: "RenderableType") -> None:
    """Print `value` as JSON with --json, else `rendered`."""
    if options.json:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    else:
        Console().print(rendered)


def _add_status_options(status: argparse.ArgumentParser) -> None:
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=PERIOD_S,
        metavar="SECONDS",
        help=f"repeat until Ctrl-C, with this period ({PERIOD_S:g} s)",
    )


def _add_top_options(top: argparse.ArgumentParser) -> None:
    top.add_argument(
        "--interval",
        type=_seconds,
        default=PERIOD_S,
        metavar="SECONDS",
        help="the interval over which rates are measured (%(default)g s)",
    )
    top.add_argument("--once", action="store_true", help="show one interval, then exit")


def _add_memory_options(memory: argparse.ArgumentParser) -> None:
    memory.add_argument("--worker", metavar="NAME", help="the worker whose budget to set")
    memory.add_argument(
        "--budget", metavar="SIZE", help="its new memory budget, like 4GiB; auto leaves it to the broker"
    )


def _add_why_options(why: argparse.ArgumentParser) -> None:
    bodies = "JSON Lines with two or more prompts: texts, or bodies of chats, completions or responses"
    why.add_argument("file", type=Path, metavar="FILE", help=bodies)
    why.add_argument("--endpoint", metavar="PATH", help="path of all requests, like /v1/messages")


def _add_scale_options(scale: argparse.ArgumentParser) -> None:
    scale.add_argument(
        "counts",
        nargs="*",
        metavar="ROLE=N",
        help="the number of prefill, decode or mixed workers; without it, show the current numbers",
    )
    scale.add_argument("--model", metavar="NAME", help="the model to scale, if the server has several")
    scale.add_argument(
        "--pending",
        action="store_true",
        help="accept workers that the Ray cluster cannot schedule yet; they wait for capacity",
    )
    scale.add_argument(
        "--wait",
        nargs="?",
        type=_seconds,
        const=WAIT_S_MAX,
        metavar="SECONDS",
        help=f"wait until new workers serve and others are gone, at most this long ({WAIT_S_MAX:g} s)",
    )


def _add_drain_options(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", metavar="WORKER", help="its name, as `tidemill status` shows it")
    drain.add_argument("--undo", action="store_true", help="make the worker take work again")
    drain.add_argument("--force", action="store_true", help="drain it even if no other worker does its work")


def _add_role_options(role: argparse.ArgumentParser) -> None:
    role.add_argument("worker", metavar="WORKER", help="its name, as `tidemill status` shows it")
    role.add_argument("role", metavar="ROLE", choices=get_args(Role), help="prefill, decode or mixed")


def _add_bundle_options(bundle: argparse.ArgumentParser) -> None:
    bundle.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.tar.gz", help="the archive to write"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not PERIOD_S_MIN <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time: give {PERIOD_S_MIN:g} seconds or more")
    return seconds


def _status(options: argparse.Namespace, server: ServerAddress, context: CommandContext) -> int:
    from tidemill.cluster.cli.status import fetch_status, render
    from tidemill.cluster.cli.top import poll

    if options.watch is None:
        status = fetch_status(server)
        show(options, status, render(status))
        return 0
    views = poll(lambda: fetch_status(server), lambda: context.sleep(options.watch))
    _show_repeatedly(options, views, lambda status: status, render)
    return 0


def _top(options: argparse.Namespace, server: ServerAddress, context: CommandContext) -> int:
    from tidemill.cluster.cli.top import Snapshot, TopRows, compare, poll, render_top, take_snapshot

    last: Snapshot | None = None

    def measure() -> TopRows:
        nonlocal last
        if last is None:
            last = take_snapshot(server, context.clock_s())
            context.sleep(options.interval)
        before, last = last, take_snapshot(server, context.clock_s())
        return compare(before, last)

    if options.once:
        rows = measure()
        show(options, rows.json(), render_top(rows))
        return 0
    views = poll(measure, lambda: context.sleep(options.interval))
    _show_repeatedly(options, views, TopRows.json, render_top)
    return 0


def _show_repeatedly(
    options: argparse.Namespace,
    views: "Iterable[_View | Unserved]",
    to_json: "Callable[[_View], object]",
    draw: "Callable[[_View], RenderableType]",
) -> None:
    """Show each view until Ctrl-C; with --json, write each one as a line."""
    from tidemill.cluster.cli.top import show_live

    if not options.json:
        show_live(views, draw, Console())
        return
    try:
        for view in views:
            if isinstance(view, Unserved):
                sys.stderr.write(f"tidemill: {view}. Trying again.\n")
                continue
            sys.stdout.write(json.dumps(to_json(view)) + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return
