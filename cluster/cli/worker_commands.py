"""Operators' commands about workers of a running server: memory budgets, drains, roles and their number."""

import argparse
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast, get_args
from urllib.parse import quote, urlencode

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.fleet import EXIT_NOT_ALL, CommandContext, show
from tidemill.cluster.cli.options.arguments import UsageError, bytes_of
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, human_bytes, memory_table, table
from tidemill.workers.messages import Role

SIZES = {"budget_bytes": "budget", "set_bytes": "set to", "floor_bytes": "floor", "max_bytes": "max"}
WAIT_POLL_S = 0.5
ROLES = ("role", "workers", "starting", "leaving", "by load")


def drain(options: argparse.Namespace, server: ServerAddress, _: CommandContext) -> int:
    """Make a worker hand everything over, or take work again."""
    body = {"drain": not options.undo, "force": options.force}
    worker = ask_server(server, "POST", _path(options.worker, "drain"), answer="worker", body=body)
    does = "takes work again" if options.undo else "hands its work over: see `tidemill status`"
    show(options, worker, Text(f"{options.worker} {does}"))
    return 0


def role(options: argparse.Namespace, server: ServerAddress, _: CommandContext) -> int:
    """Give a worker another role."""
    body = {"role": options.role}
    worker = ask_server(server, "POST", _path(options.worker, "role"), answer="worker", body=body)
    show(options, worker, Text(f"{options.worker} becomes {options.role}"))
    return 0


def scale(options: argparse.Namespace, server: ServerAddress, context: CommandContext) -> int:
    """Set or show the intended number of workers per role, of one model or of all. The answer to --pending
    also has the capacity that the cluster lacks."""
    query = "" if options.model is None else f"?{urlencode({'model': options.model})}"
    fetch = partial(ask_server, server, "GET", f"/cluster/scale{query}", answer="roles")
    counts = _counts(options.counts)
    if counts:
        body = {"workers": counts, "model": options.model, "pending": options.pending}
        roles = ask_server(server, "POST", "/cluster/scale", answer="roles", body=body)
    else:
        roles = fetch()
    if options.wait is not None:
        deadline_s = context.clock_s() + options.wait
        while not is_settled(roles) and context.clock_s() < deadline_s:
            context.sleep(WAIT_POLL_S)
            roles = {**roles, **fetch()}
    show(options, roles, render_roles(roles))
    return EXIT_NOT_ALL if options.wait is not None and not is_settled(roles) else 0


def _counts(texts: Iterable[str]) -> dict[Role, int]:
    counts: dict[Role, int] = {}
    for text in texts:
        role, _, number = text.partition("=")
        if role not in get_args(Role) or not (number.isascii() and number.isdecimal()):
            roles: str = ", ".join(get_args(Role))
            raise UsageError(f"{text}: write a role and a number, like decode=4; roles are {roles}")
        if role in counts:
            raise UsageError(f"{text}: {role} is given twice")
        counts[cast("Role", role)] = int(number)
    return counts


def is_settled(answer: Mapping[str, Any]) -> bool:
    """Return whether no worker starts or leaves."""
    return not any(role["starting"] or role["leaving"] for role in answer["roles"])


def render_roles(answer: Mapping[str, Any]) -> RenderableType:
    """Render a row for each role within 80 columns."""
    rows = answer["roles"]
    has_models = len({row["model"] for row in rows}) > 1
    roles = table((*(("model",) if has_models else ()), *ROLES), num_left=1 + has_models)
    for row in rows:
        by_load = "-" if row["most"] is None else f"{row['least']} to {row['most']}"
        names = (", ".join(row[key]) or "-" for key in ("starting", "leaving"))
        cells = (row["role"], str(row["workers"]), *names, by_load)
        roles.add_row(*map(Text, ((row["model"], *cells) if has_models else cells)))  # Text has no markup
    lacks = answer.get("lacks")
    return roles if lacks is None else Group(roles, "", Text(f"waits for capacity: {lacks}", style="yellow"))


def _path(worker: str, command: str) -> str:
    return f"/cluster/workers/{quote(worker, safe='')}/{command}"


def fetch_memory(server: ServerAddress) -> dict[str, Any]:
    """Return the answer of GET /cluster/memory. Raises Unserved with one line that names the fix."""
    return ask_server(server, "GET", "/cluster/memory", answer="workers")


def memory(options: argparse.Namespace, server: ServerAddress, _: CommandContext) -> int:
    """Show the memory of all workers, after giving one a budget, or leaving that to the broker again."""
    if (options.worker is None) != (options.budget is None):
        raise UsageError("--worker and --budget go together: give a worker and its new budget")
    if options.worker is None:
        found = fetch_memory(server)
    else:
        budget = None if options.budget == "auto" else str(bytes_of(options.budget, "--budget"))
        body = {"worker": options.worker, "budget": budget}
        found = ask_server(server, "POST", "/cluster/memory", answer="workers", body=body)
    show(options, found, render_memory(found))
    return 0


def render_memory(memory: dict[str, Any]) -> RenderableType:
    """Render each worker's budget, its origin and the memory in use within 80 columns."""
    workers = sorted(memory["workers"], key=lambda worker: worker["name"])
    if not workers:
        return Text("no worker is alive", style="red")
    budgets = table(("worker", "role", "set by", *SIZES.values()), num_left=3)
    for worker in workers:
        cells = (Text(str(worker[name])) for name in ("name", "role", "set_by"))  # Text has no markup
        budgets.add_row(*cells, *(human_bytes(worker[name]) for name in SIZES))
    return Group(budgets, "", memory_table((worker["name"], worker["memory"]) for worker in workers))
