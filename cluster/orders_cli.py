"""`tidemill drain` and `tidemill role`: orders to the workers of a running server."""

from typing import Any
from urllib.parse import quote

from tidemill.cluster.security import Server
from tidemill.cluster.status import ask_server
from tidemill.workers.messages import Role


def drain(server: Server, worker: str, *, undo: bool, force: bool) -> dict[str, Any]:
    """Have a worker hand everything over, or take work again. Raises Unserved, or RequestError with what the
    server says against it."""
    body = {"drain": not undo, "force": force}
    return ask_server(server, "POST", _path(worker, "drain"), answer="worker", body=body)


def set_role(server: Server, worker: str, role: Role) -> dict[str, Any]:
    """Raises as `drain` does."""
    return ask_server(server, "POST", _path(worker, "role"), answer="worker", body={"role": role})


def _path(worker: str, order: str) -> str:
    return f"/cluster/workers/{quote(worker, safe='')}/{order}"
