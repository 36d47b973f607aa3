"""`tidemill drain`, `tidemill role` and `tidemill scale`: change the workers of a running server."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, table
from tidemill.workers.messages import Role

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
