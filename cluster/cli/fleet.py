"""The commands that look at a running server and give it orders.

They import what they need when they run: `tidemill status` must not wait for Ray and torch.
"""

# ruff: noqa: PLC0415 - see above

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast, get_args

from rich.console import Console
from rich.text import Text

from tidemill.cluster.cli.arguments import UsageError, bytes_of
from tidemill.cluster.cli.security import add_server_options, server_of
from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.workers.messages import Role, Unserved

if TYPE_CHECKING:
    from rich.console import RenderableType

_Found = TypeVar("_Found")

EXIT_NOT_ALL = 1

PERIOD_S = 2.0
PERIOD_S_MIN = 0.1
WAIT_S_MAX = 600.0
WAIT_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class Outside:
    """What commands take from outside: time, and the environment, which may hold the key to ask with."""

    environ: Mapping[str, str]
    clock_s: Callable[[], float]  # monotonic
    unix_time_s: Callable[[], float]
    sleep: Callable[[float], None]


Run = Callable[[argparse.Namespace, ServerAddress, Outside], int]


def add_fleet_commands(add_parser: Callable[..., argparse.ArgumentParser], outside: Outside) -> None:
    def add(name: str, run: Run, text: str, *, as_json: bool = True) -> argparse.ArgumentParser:
        def asks(options: argparse.Namespace) -> int:
            return run(options, server_of(options, outside.environ), outside)

        command = add_parser(name, help=text)
        add_server_options(command)
        if as_json:
            command.add_argument("--json", action="store_true", help="as JSON")
        command.set_defaults(run=asks)
        return command

    _add_status_options(add("status", _status, "show the workers of a running server"))
    _add_top_options(add("top", _top, "show what a running server does now, the busiest workers first"))
    memory = "show the memory of a running server's workers, or give one of them another budget"
    _add_memory_options(add("memory", _memory, memory))
    scale = "have more or fewer workers of a role, or show how many there are to be"
    _add_scale_options(add("scale", _scale, scale))
    _add_drain_options(add("drain", _drain, "have a worker hand its work over and take no more"))
    _add_role_options(add("role", _role, "give a worker of a running server another role"))
    bundle = "collect what others need to find out what is wrong with a server, without keys and prompts"
    _add_bundle_options(add("support-bundle", _bundle, bundle, as_json=False))


def show(options: argparse.Namespace, found: object, drawn: "RenderableType") -> None:
    """On standard output, as JSON if they say so."""
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        Console().print(drawn)


def _add_status_options(status: argparse.ArgumentParser) -> None:
    status.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=PERIOD_S,
        metavar="SECONDS",
        help=f"again and again until Ctrl-C, every {PERIOD_S:g} s or as often as said",
    )


def _add_top_options(top: argparse.ArgumentParser) -> None:
    top.add_argument(
        "--interval",
        type=_seconds,
        default=PERIOD_S,
        metavar="SECONDS",
        help="between two looks; rates are of the time between them (%(default)g)",
    )
    top.add_argument("--once", action="store_true", help="show one interval, then end")


def _add_memory_options(memory: argparse.ArgumentParser) -> None:
    memory.add_argument("--worker", metavar="NAME", help="whose budget to set")
    memory.add_argument(
        "--budget", metavar="SIZE", help="what it may take from now on; auto leaves it to the broker"
    )


def _add_scale_options(scale: argparse.ArgumentParser) -> None:
    scale.add_argument(
        "counts",
        nargs="*",
        metavar="ROLE=N",
        help="how many prefill, decode or mixed workers there shall be; without, show how many there are",
    )
    scale.add_argument("--model", metavar="NAME", help="whose workers, where several models are served")
    scale.add_argument(
        "--pending",
        action="store_true",
        help="start workers for which the Ray cluster has no place now, too: they wait for one",
    )
    scale.add_argument(
        "--wait",
        nargs="?",
        type=_seconds,
        const=WAIT_S_MAX,
        metavar="SECONDS",
        help=f"until new workers serve and others have gone, at most so long ({WAIT_S_MAX:g})",
    )


def _add_drain_options(drain: argparse.ArgumentParser) -> None:
    drain.add_argument("worker", metavar="WORKER", help="its name, as `tidemill status` shows it")
    drain.add_argument("--undo", action="store_true", help="let it take work again")
    drain.add_argument("--force", action="store_true", help="also when no other worker does its work")


def _add_role_options(role: argparse.ArgumentParser) -> None:
    role.add_argument("worker", metavar="WORKER", help="its name, as `tidemill status` shows it")
    role.add_argument("role", metavar="ROLE", choices=get_args(Role), help="prefill, decode or mixed")


def _add_bundle_options(bundle: argparse.ArgumentParser) -> None:
    bundle.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE.tar.gz", help="to write it to"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not PERIOD_S_MIN <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds from {PERIOD_S_MIN:g} on")
    return seconds


def _status(options: argparse.Namespace, server: ServerAddress, outside: Outside) -> int:
    from tidemill.cluster.cli.status import fetch_status, render
    from tidemill.cluster.cli.watch_screen import poll

    if options.watch is None:
        status = fetch_status(server)
        show(options, status, render(status))
        return 0
    found = poll(lambda: fetch_status(server), lambda: outside.sleep(options.watch))
    _show_again(options, found, lambda status: status, render)
    return 0


def _top(options: argparse.Namespace, server: ServerAddress, outside: Outside) -> int:
    from tidemill.cluster.cli.top import Snapshot, TopRows, render_top, rows, take
    from tidemill.cluster.cli.watch_screen import poll

    if options.once:
        before = take(server, outside.clock_s())
        outside.sleep(options.interval)
        found = rows(before, take(server, outside.clock_s()))
        show(options, found.json(), render_top(found))
        return 0
    last: list[Snapshot] = []

    def look() -> TopRows:
        if not last:
            last.append(take(server, outside.clock_s()))
            outside.sleep(options.interval)
        now = take(server, outside.clock_s())
        found = rows(last[0], now)
        last[0] = now
        return found

    found = poll(look, lambda: outside.sleep(options.interval))
    _show_again(options, found, TopRows.json, render_top)
    return 0


def _show_again(
    options: argparse.Namespace,
    found: "Iterable[_Found | Unserved]",
    plain: "Callable[[_Found], object]",
    draw: "Callable[[_Found], RenderableType]",
) -> None:
    """Until Ctrl-C; as JSON, a line for each look."""
    from tidemill.cluster.cli.watch_screen import show_live

    if not options.json:
        show_live(found, draw, Console())
        return
    try:
        for one in found:
            if isinstance(one, Unserved):
                sys.stderr.write(f"tidemill: {one}. Trying again.\n")
                continue
            sys.stdout.write(json.dumps(plain(one)) + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def _memory(options: argparse.Namespace, server: ServerAddress, _: Outside) -> int:
    from tidemill.cluster.cli.memory import fetch_memory, render_memory, set_budget

    if (options.worker is None) != (options.budget is None):
        raise UsageError("--worker and --budget go together: name a worker and what it shall have")
    if options.worker is None:
        memory = fetch_memory(server)
    else:
        budget = None if options.budget == "auto" else str(bytes_of(options.budget, "--budget"))
        memory = set_budget(server, options.worker, budget)
    show(options, memory, render_memory(memory))
    return 0


def _scale(options: argparse.Namespace, server: ServerAddress, outside: Outside) -> int:
    from tidemill.cluster.cli.worker_commands import fetch_roles, is_settled, render_roles, scale

    counts = _counts(options.counts)
    if counts:
        found = scale(server, counts, options.model, pending=options.pending)
    else:
        found = fetch_roles(server, options.model)
    if options.wait is not None:
        give_up_s = outside.clock_s() + options.wait
        while not is_settled(found) and outside.clock_s() < give_up_s:
            outside.sleep(WAIT_LOOK_S)
            found = {**found, **fetch_roles(server, options.model)}
    show(options, found, render_roles(found))
    return EXIT_NOT_ALL if options.wait is not None and not is_settled(found) else 0


def _counts(texts: Iterable[str]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for text in texts:
        role, _, number = text.partition("=")
        if role not in get_args(Role) or not (number.isascii() and number.isdecimal()):
            raise UsageError(f"{text}: say a role and how many, like decode=4; roles are {_roles()}")
        if role in counts:
            raise UsageError(f"{text}: {role} was said before")
        counts[cast("Role", role)] = int(number)
    return counts


def _roles() -> str:
    return ", ".join(get_args(Role))


def _drain(options: argparse.Namespace, server: ServerAddress, _: Outside) -> int:
    from tidemill.cluster.cli.worker_commands import drain

    told = drain(server, options.worker, undo=options.undo, force=options.force)
    does = "takes work again" if options.undo else "hands its work over: see `tidemill status`"
    show(options, told, Text(f"{options.worker} {does}"))
    return 0


def _role(options: argparse.Namespace, server: ServerAddress, _: Outside) -> int:
    from tidemill.cluster.cli.worker_commands import set_role

    told = set_role(server, options.worker, options.role)
    show(options, told, Text(f"{options.worker} becomes {options.role}"))
    return 0


def _bundle(options: argparse.Namespace, server: ServerAddress, outside: Outside) -> int:
    from tidemill.cluster.cli.support_bundle import collect, write_bundle

    parts = collect(server)
    try:
        write_bundle(options.output, parts, outside.unix_time_s(), server)
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from error
    for part in parts:
        if part.error:
            sys.stderr.write(f"tidemill: without {part.name}: {part.error}\n")
    missing = sum(bool(part.error) for part in parts)
    sys.stdout.write(f"{options.output}: {len(parts) - missing} of {len(parts)} parts, see index.json\n")
    return EXIT_NOT_ALL if missing else 0
