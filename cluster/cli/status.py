"""`tidemill status`: show the state of a running server's workers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.workers.messages import RequestError, Unserved

TIMEOUT_S = 10
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
STATE_STYLES = {"ready": "green", "draining": "yellow", "silent": "red"}
IDENTITY = {
    "name": "worker",
    "role": "role",
    "tensor_parallel_size": "ranks",
    "pid": "pid",
    "node": "node",
}
LOAD = {
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
    "checkpoints_live": "checkpoints\nlive",
    "checkpoints_cached": "\ncached",
    "free": "\nfree",
    "empty": "\nempty",
    "unmapped": "\nunmapped",
}
RARE_CLASSES = {"windows_live", "windows_cached", "checkpoints_live", "checkpoints_cached"}
STORE: dict[str, tuple[str, ...]] = {
    "stored": tuple(f"store_puts_as_{put.value}" for put in Put if put.is_there),
    "lost": tuple(f"store_puts_as_{put.value}" for put in Put if not put.is_there),
    "hits": (f"store_gets_as_{Got.HIT.value}",),
    "misses": (f"store_gets_as_{Got.MISS.value}",),
    "failed": tuple(f"store_gets_as_{got.value}" for got in Got if got not in {Got.HIT, Got.MISS}),
    "trips": ("store_trips",),
}
STORE_BYTES = {"store_put_bytes": "put", "store_get_bytes": "got"}


def fetch_status(server: ServerAddress) -> dict[str, Any]:
    """Return the answer of GET /cluster. Raises Unserved with one line that names the fix."""
    return ask_server(server, "GET", "/cluster", answer="workers")


def ask_server(
    server: ServerAddress,
    method: str,
    path: str,
    answer: str,
    body: object = None,
    *,
    headers: Mapping[str, str] = NO_HEADERS,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the JSON object that a server answers; it must have the key `answer`. Raises Unserved with one
    line that names the fix, or RequestError with the reason for which the server refuses."""
    response = _request(server, method, path, body, headers, timeout_s)
    value = _json(response)
    if response.is_error or not isinstance(value, dict) or answer not in value:
        raise _not_ready(server, response)
    return cast("dict[str, Any]", value)


def ask_text(server: ServerAddress, path: str) -> str:
    """Return the text that a server answers to GET. Raises like `ask_server`."""
    response = _request(server, "GET", path)
    if response.is_error:
        raise _not_ready(server, response)
    return response.text


def _request(
    server: ServerAddress,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] = NO_HEADERS,
    timeout_s: float = TIMEOUT_S,
) -> httpx.Response:
    """Send a request. Raises RequestError if the server refuses it, Unserved if none answers."""
    url = server.url
    key = {"authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        response = httpx.request(
            method, f"{url.rstrip('/')}{path}", json=body, headers={**key, **headers}, timeout=timeout_s
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unserved(
            f"no server answers at {url} ({error}): start one with `tidemill serve`, or give its --url"
        ) from error
    match _json(response) if response.is_error else None:
        case {"error": {"message": str(message), "type": "invalid_request_error", "param": str()}}:
            raise RequestError(message)
        case {"error": {"message": str(message), "type": "authentication_error" | "permission_error"}}:
            raise RequestError(f"{message}; this command takes it as --api-key")
        case {"error": {"message": str(message), "code": "unserved"}}:
            raise Unserved(f"{url}: {message}")
        case _:
            return response


def _json(response: httpx.Response) -> Any:  # noqa: ANN401 - JSON
    try:
        return response.json()
    except ValueError:
        return None


def _not_ready(server: ServerAddress, response: httpx.Response) -> Unserved:
    return Unserved(
        f"{server.url} is no Tidemill server that is ready (HTTP {response.status_code}): check --url"
    )


def render(status: dict[str, Any]) -> RenderableType:
    """Render the server, and the state, load, memory and store counters of its workers within 80 columns."""
    models = "; ".join(
        f"{model['id']}, up to {model['max_model_len']:,} tokens" for model in status["models"]
    )
    title = Text(f"{models}, frontend pid {status['frontend']['pid']}")
    workers = sorted(status["workers"], key=lambda worker: worker["info"]["name"])
    if not workers:
        return Group(title, Text("no worker is alive", style="red"))
    states = table((*IDENTITY.values(), "state"), num_left=len(IDENTITY) + 1)
    loads = table(("worker", *LOAD.values(), *SIZES.values()), num_left=1)
    for worker in workers:
        info, load, state = worker["info"], worker["load"], worker["state"]
        shown = state if state == "ready" else f"{state} for {worker['heard_ago_s']:.1f} s"
        # Text, because a name in square brackets is not markup.
        cells = (Text(str(info[name])) for name in IDENTITY)
        states.add_row(*cells, Text(shown, style=STATE_STYLES.get(state, "")))
        numbers = [f"{load[name]:,}" for name in LOAD] + [human_bytes(load[name]) for name in SIZES]
        loads.add_row(Text(info["name"]), *numbers)
    memory = memory_table((worker["info"]["name"], worker["load"]["memory"]) for worker in workers)
    stores = _store_table((worker["info"]["name"], worker["load"]["counters"]) for worker in workers)
    return Group(title, "", states, "", loads, "", memory, "", stores)


def memory_table(workers: Iterable[tuple[str, dict[str, int]]]) -> Table:
    """Return the bytes of named workers by class of memory; of the rare classes those that a worker has."""
    rows = [(name, Counter(memory)) for name, memory in workers]
    classes = [key for key in CLASSES if key not in RARE_CLASSES or any(memory[key] for _, memory in rows)]
    memory_rows = table(("worker", *(CLASSES[key] for key in classes)), num_left=1)
    for name, memory in rows:
        memory_rows.add_row(Text(name), *(human_bytes(memory[key]) for key in classes))
    return memory_rows


def _store_table(workers: Iterable[tuple[str, dict[str, float]]]) -> Table:
    """Return the outcomes of the puts and gets of named workers at the page store."""
    stores = table(("worker", "store", *STORE, *STORE_BYTES.values()), num_left=2)
    for name, counters in workers:
        state = Text("down", style="red") if counters.get("store_is_down") else Text("up", style="green")
        counts = [f"{sum(counters.get(key, 0) for key in parts):,.0f}" for parts in STORE.values()]
        stores.add_row(
            Text(name), state, *counts, *(human_bytes(counters.get(key, 0)) for key in STORE_BYTES)
        )
    return stores


def table(columns: Sequence[str], num_left: int) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        # A long name is folded, not truncated.
        table.add_column(column, justify="left" if index < num_left else "right", overflow="fold")
    return table


def human_bytes(num_bytes: float) -> str:
    """Return a size with three digits and a binary unit: `1.50 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1000 or unit == "TiB":
            break
        num_bytes /= 1024
    digits = 0 if unit == "B" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {unit}"
