"""Lists the objects of a Mooncake master over HTTP: its client library cannot.

Slow, for operators.
"""

import json
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from itertools import islice
from typing import TypedDict

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.remote_store import Listing

_TIMEOUT_S = 5.0
_NAMES_MAX = 100  # per request: they are in the request line of HTTP


class _Replica(TypedDict):
    size_: int


class _Object(TypedDict):
    ok: bool
    values: list[_Replica] | None


def list_objects(address: str) -> Listing:
    """List the objects of the master with the HTTP address `HOST:PORT`. Blocking; raises StoreError."""
    host, _, port = address.rpartition(":")
    try:
        connection = HTTPConnection(host, int(port), timeout=_TIMEOUT_S)
        try:
            names = iter(_get(connection, "/get_all_keys").split())
            capacity_bytes = _capacity_bytes(_get(connection, "/metrics"))
            objects = [
                found
                for batch in iter(lambda: list(islice(names, _NAMES_MAX)), [])
                for found in _sizes(connection, batch)
            ]
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        raise StoreError(
            f"the Mooncake master does not list its objects at http://{address} ({error}): name its "
            "--metrics_host and --metrics_port with ?admin=HOST:PORT"
        ) from error
    return Listing(objects, capacity_bytes)


def _sizes(connection: HTTPConnection, names: Sequence[str]) -> Iterator[tuple[str, int]]:
    answer = json.loads(_get(connection, f"/batch_query_keys?keys={','.join(names)}"))
    found: dict[str, _Object] = answer["data"]
    for name, described in found.items():
        for replica in (described["values"] or [])[:1]:
            yield name, replica["size_"]


def _capacity_bytes(metrics: str) -> int:
    lines = (line.split() for line in metrics.splitlines())
    return next((int(float(line[1])) for line in lines if line[:1] == ["master_total_capacity_bytes"]), 0)


def _get(connection: HTTPConnection, path: str) -> str:
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read().decode()
    if response.status != 200:
        raise ValueError(f"{path.partition('?')[0]}: status {response.status}")
    return body
