"""`tidemill drain`, `tidemill role` and `tidemill scale`: orders to the workers of a running server."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, table
from tidemill.workers.messages import Role

ROLES = ("role", "workers", "starting", "leaving", "by load")


def drain(server: ServerAddress, worker: str, *, undo: bool, force: bool) -> dict[str, Any]:
    """Have a worker hand everything over, or take work again. Raises Unserved, or RequestError with what the
    server says against it."""
    body = {"drain": not undo, "force": force}
    return ask_server(server, "POST", _path(worker, "drain"), answer="worker", body=body)


def set_role(server: ServerAddress, worker: str, role: Role) -> dict[str, Any]:
    """Raises as `drain` does."""
    return ask_server(server, "POST", _path(worker, "role"), answer="worker", body={"role": role})


def fetch_roles(server: ServerAddress, model: str | None) -> dict[str, Any]:
    """How many workers of each role there are to be, of one model or of all. Raises as `drain` does."""
    query = "" if model is None else f"?{urlencode({'model': model})}"
    return ask_server(server, "GET", f"/cluster/scale{query}", answer="roles")


def scale(
    server: ServerAddress, workers: Mapping[Role, int], model: str | None, *, pending: bool
) -> dict[str, Any]:
    """Have so many workers of these roles; the answer is that of `fetch_roles`, with what the cluster lacks
    for them if they may wait for it. Raises as `drain` does."""
    body = {"workers": dict(workers), "model": model, "pending": pending}
    return ask_server(server, "POST", "/cluster/scale", answer="roles", body=body)


def is_settled(found: Mapping[str, Any]) -> bool:
    """Whether all workers that there are to be serve, and the others have gone."""
    return not any(one["starting"] or one["leaving"] for one in found["roles"])


def render_roles(found: Mapping[str, Any]) -> RenderableType:
    """A row for each role; fits 80 columns."""
    rows = found["roles"]
    has_models = len({one["model"] for one in rows}) > 1
    roles = table((*(("model",) if has_models else ()), *ROLES), num_left=1 + has_models)
    for one in rows:
        by_load = "-" if one["most"] is None else f"{one['least']} to {one['most']}"
        names = (", ".join(one[what]) or "-" for what in ("starting", "leaving"))
        cells = (one["role"], str(one["workers"]), *names, by_load)
        roles.add_row(*map(Text, ((one["model"], *cells) if has_models else cells)))  # as Text: no markup
    lacks = found.get("lacks")
    return roles if lacks is None else Group(roles, "", Text(f"waits for capacity: {lacks}", style="yellow"))


def _path(worker: str, order: str) -> str:
    return f"/cluster/workers/{quote(worker, safe='')}/{order}"
