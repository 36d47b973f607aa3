"""`tidemill memory`: reads and sets the budgets of a running server's workers, and draws them."""

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, human_bytes, memory_table, table

SIZES = {"budget_bytes": "budget", "set_bytes": "set to", "floor_bytes": "floor", "max_bytes": "max"}


def fetch_memory(server: ServerAddress) -> dict[str, Any]:
    """The answer of GET /cluster/memory. Raises Unserved with one line that says what to do."""
    return ask_server(server, "GET", "/cluster/memory", answer="workers")


def set_budget(server: ServerAddress, worker: str, budget: str | None) -> dict[str, Any]:
    """Give a worker this budget, a size; None leaves it to the broker. The answer is the memory of all
    workers. Raises Unserved, or RequestError with what the server says against it."""
    body = {"worker": worker, "budget": budget}
    return ask_server(server, "POST", "/cluster/memory", answer="workers", body=body)


def render_memory(memory: dict[str, Any]) -> RenderableType:
    """Each worker's budget, who set it, and what it holds; fits 80 columns."""
    workers = sorted(memory["workers"], key=lambda one: one["name"])
    if not workers:
        return Text("no worker is alive", style="red")
    budgets = table(("worker", "role", "set by", *SIZES.values()), num_left=3)
    for one in workers:
        who = (Text(str(one[name])) for name in ("name", "role", "set_by"))  # as Text: no markup
        budgets.add_row(*who, *(human_bytes(one[name]) for name in SIZES))
    return Group(budgets, "", memory_table((one["name"], one["memory"]) for one in workers))
