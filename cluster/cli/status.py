"""`tidemill status`: reads the fleet's state from a running server and draws it."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.workers.messages import RequestError, Unserved

TIMEOUT_S = 10
STATE_STYLES = {"ready": "green", "draining": "yellow", "silent": "red"}
WHO = {
    "name": "worker",
    "role": "role",
    "tensor_parallel_size": "ranks",
    "pid": "pid",
    "node": "node",
}
DOES = {
    "running_rows": "rows",
    "waiting_rows": "waiting",
    "queued_tokens": "tokens",
    "state_slots": "slots",
}
SIZES = {"wanted_bytes": "wanted", "budget_bytes": "budget"}
CLASSES = {
    "pages_live": "pages\nlive",
    "pages_cached": "\ncached",
    "states_live": "states\nlive",
    "states_cached": "\ncached",
    "windows_live": "windows\nlive",
    "windows_cached": "\ncached",
    "free": "\nfree",
    "empty": "\nempty",
    "unmapped": "\nunmapped",
}
OF_WINDOWS = {"windows_live", "windows_cached"}
STORE: dict[str, tuple[str, ...]] = {
    "stored": tuple(f"store_puts_as_{one.value}" for one in Put if one.is_there),
    "lost": tuple(f"store_puts_as_{one.value}" for one in Put if not one.is_there),
    "hits": (f"store_gets_as_{Got.HIT.value}",),
    "misses": (f"store_gets_as_{Got.MISS.value}",),
    "failed": tuple(f"store_gets_as_{one.value}" for one in Got if one not in {Got.HIT, Got.MISS}),
    "trips": ("store_trips",),
}
STORE_BYTES = {"store_put_bytes": "put", "store_get_bytes": "got"}


def fetch_status(server: ServerAddress) -> dict[str, Any]:
    """The answer of GET /cluster. Raises Unserved with one line that says what to do."""
    return ask_server(server, "GET", "/cluster", answer="workers")


def ask_server(
    server: ServerAddress, method: str, path: str, answer: str, body: object = None
) -> dict[str, Any]:
    """The JSON that a server answers, which holds `answer`. Raises Unserved with one line that says what to
    do, or RequestError with what the server says against the request."""
    response = _ask(server, method, path, body)
    found = _json(response)
    if response.is_error or not isinstance(found, dict) or answer not in found:
        raise _no_answer(server, response)
    return cast("dict[str, Any]", found)


def ask_text(server: ServerAddress, path: str) -> str:
    """What a server answers to GET, as it is. Raises as `ask_server` does."""
    response = _ask(server, "GET", path)
    if response.is_error:
        raise _no_answer(server, response)
    return response.text


def _ask(server: ServerAddress, method: str, path: str, body: object = None) -> httpx.Response:
    """Raises what the server says against the request; Unserved when there is none."""
    url = server.url
    headers = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        response = httpx.request(
            method, f"{url.rstrip('/')}{path}", json=body, headers=headers, timeout=TIMEOUT_S
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unserved(
            f"no server answers at {url} ({error}): start one with `tidemill serve`, or give its --url"
        ) from error
    match _json(response) if response.is_error else None:
        case {"error": {"message": str(message), "type": "invalid_request_error", "param": str()}}:
            raise RequestError(message)
        case {"error": {"message": str(message), "type": "authentication_error" | "permission_error"}}:
            raise RequestError(f"{message}; here: --api-key")
        case {"error": {"message": str(message), "code": "unserved"}}:
            raise Unserved(f"{url}: {message}")
        case _:
            return response


def _json(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return None


def _no_answer(server: ServerAddress, response: httpx.Response) -> Unserved:
    return Unserved(
        f"{server.url} is no Tidemill server that is ready (HTTP {response.status_code}): check --url"
    )


def render(status: dict[str, Any]) -> RenderableType:
    """A line about the server, its workers, and what each has to do and holds; fits 80 columns."""
    models = "; ".join(f"{one['id']}, up to {one['max_model_len']:,} tokens" for one in status["models"])
    title = Text(f"{models}, frontend pid {status['frontend']['pid']}")
    workers = sorted(status["workers"], key=lambda one: one["info"]["name"])
    if not workers:
        return Group(title, Text("no worker is alive", style="red"))
    who = table((*WHO.values(), "state"), num_left=len(WHO) + 1)
    work = table(("worker", *DOES.values(), *SIZES.values()), num_left=1)
    for worker in workers:
        info, load, state = worker["info"], worker["load"], worker["state"]
        shown = state if state == "ready" else f"{state} for {worker['heard_ago_s']:.1f} s"
        # as Text: a name in square brackets is no markup
        who.add_row(*(Text(str(info[name])) for name in WHO), Text(shown, style=STATE_STYLES.get(state, "")))
        numbers = [f"{load[name]:,}" for name in DOES] + [human_bytes(load[name]) for name in SIZES]
        work.add_row(Text(info["name"]), *numbers)
    held = memory_table((worker["info"]["name"], worker["load"]["memory"]) for worker in workers)
    stores = _stores((worker["info"]["name"], worker["load"]["counters"]) for worker in workers)
    return Group(title, "", who, "", work, "", held, "", stores)


def memory_table(workers: Iterable[tuple[str, dict[str, int]]]) -> Table:
    """The memory of workers, given by name, by what it holds; windows where a model has some."""
    rows = list(workers)
    classes = [one for one in CLASSES if one not in OF_WINDOWS or any(memory[one] for _, memory in rows)]
    held = table(("worker", *(CLASSES[one] for one in classes)), num_left=1)
    for name, memory in rows:
        held.add_row(Text(name), *(human_bytes(memory[one]) for one in classes))
    return held


def _stores(workers: Iterable[tuple[str, dict[str, float]]]) -> Table:
    """What became of the objects that workers, given by name, offered to the page store and wanted of it."""
    stores = table(("worker", "store", *STORE, *STORE_BYTES.values()), num_left=2)
    for name, counters in workers:
        state = Text("down", style="red") if counters.get("store_is_down") else Text("up", style="green")
        counts = [f"{sum(counters.get(one, 0) for one in parts):,.0f}" for parts in STORE.values()]
        stores.add_row(
            Text(name), state, *counts, *(human_bytes(counters.get(one, 0)) for one in STORE_BYTES)
        )
    return stores


def table(columns: Sequence[str], num_left: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        # a long name goes on below: half of it is no name
        table.add_column(column, justify="left" if index < num_left else "right", overflow="fold")
    return table


def human_bytes(num_bytes: float) -> str:
    """A size with three digits and a binary unit: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1000 or unit == "TiB":
            break
        num_bytes /= 1024
    digits = 0 if unit == "B" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {unit}"
