"""`tidemill memory`: show and set the memory budgets of a running server's workers."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, human_bytes, memory_table, table

SIZES = {"budget_bytes": "budget", "set_bytes": "set to", "floor_bytes": "floor", "max_bytes": "max"}


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
