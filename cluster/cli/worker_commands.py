"""Operators' commands about workers of a running server: memory budgets, drains, roles and their number."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, human_bytes, memory_table, table
from tidemill.workers.messages import Role

SIZES = {"budget_bytes": "budget", "set_bytes": "set to", "floor_bytes": "floor", "max_bytes": "max"}
ROLES = ("role", "workers", "starting", "leaving", "by load")


def drain(server: ServerAddress, worker: str, *, undo: bool, force: bool) -> dict[str, Any]:
    """Make a worker hand everything over, or take work again. Raises Unserved, or RequestError with the
    reason for which the server refuses."""
    body = {"drain": not undo, "force": force}
    return ask_server(server, "POST", _path(worker, "drain"), answer="worker", body=body)


def set_role(server: ServerAddress, worker: str, role: Role) -> dict[str, Any]:
    """Give a worker another role. Raises like `drain`."""
    return ask_server(server, "POST", _path(worker, "role"), answer="worker", body={"role": role})


def fetch_roles(server: ServerAddress, model: str | None) -> dict[str, Any]:
    """Return the intended number of workers per role, of one model or of all. Raises like `drain`."""
    query = "" if model is None else f"?{urlencode({'model': model})}"
    return ask_server(server, "GET", f"/cluster/scale{query}", answer="roles")


def scale(
    server: ServerAddress, workers: Mapping[Role, int], model: str | None, *, pending: bool
) -> dict[str, Any]:
    """Set the number of workers per role; return the answer of `fetch_roles`. With `pending` the answer also
    has the capacity that the cluster lacks. Raises like `drain`."""
    body = {"workers": dict(workers), "model": model, "pending": pending}
    return ask_server(server, "POST", "/cluster/scale", answer="roles", body=body)


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


def set_budget(server: ServerAddress, worker: str, budget: str | None) -> dict[str, Any]:
    """Give a worker a budget like `4GiB`; None leaves it to the broker. Return the memory of all workers.
    Raises Unserved, or RequestError with the reason for which the server refuses."""
    body = {"worker": worker, "budget": budget}
    return ask_server(server, "POST", "/cluster/memory", answer="workers", body=body)


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
