"""`tidemill support-bundle`: one archive of what others need to find out what is wrong. No keys, no prompts.

index.json names every part, and why one that could not be had is not there.
"""

import io
import json
import os
import platform
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tidemill import __version__
from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.cluster.cli.status import ask_server, ask_text
from tidemill.cluster.observability.redact import without_secrets
from tidemill.kvstore.errors import TidemillError

PRIVATE = 0o600

JSON = {
    "version.json": ("/version", "version"),
    "status.json": ("/cluster", "workers"),
    "memory.json": ("/cluster/memory", "workers"),
    "scale.json": ("/cluster/scale", "roles"),
    "requests.json": ("/cluster/requests", "requests"),
    "config.json": ("/cluster/support/config", "config"),
    "software.json": ("/cluster/support/software", "software"),
    "nodes.json": ("/cluster/support/nodes", "nodes"),
}
"""By file: the path, and what its answer has."""

METRICS = "metrics.txt"
LOGS = ("logs", "/cluster/support/logs")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """A file of the archive, or why it is not there."""

    name: str
    text: str = ""
    error: str = ""


def collect(server: ServerAddress) -> list[BundleFile]:
    """All that can be had."""
    told = (_json(server, name, *where) for name, where in JSON.items())
    return [_client(), *told, _metrics(server), *_logs(server)]


def write_bundle(path: Path, parts: Sequence[BundleFile], unix_time_s: float, server: ServerAddress) -> None:
    """Readable by its owner alone. Raises OSError."""
    known = [server.api_key]
    index = {
        "made_unix_s": unix_time_s,
        "server": server.url,
        "parts": {one.name: one.error or "ok" for one in parts},
    }
    files = [BundleFile(name="index.json", text=_dump(index)), *(one for one in parts if not one.error)]
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
    os.fchmod(opened, PRIVATE)  # one that was there may have been for all
    with os.fdopen(opened, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for one in files:
            data = without_secrets(one.text, known).encode(errors="replace")
            entry = tarfile.TarInfo(f"tidemill-support/{one.name}")
            entry.size, entry.mtime, entry.mode = len(data), int(unix_time_s), PRIVATE
            archive.addfile(entry, io.BytesIO(data))


def _client() -> BundleFile:
    """Who asks: perhaps of another version than the server."""
    here = {"tidemill": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return BundleFile(name="client.json", text=_dump(here))


def _json(server: ServerAddress, name: str, path: str, answer: str) -> BundleFile:
    try:
        return BundleFile(name=name, text=_dump(ask_server(server, "GET", path, answer)))
    except TidemillError as error:
        return BundleFile(name=name, error=str(error))


def _metrics(server: ServerAddress) -> BundleFile:
    try:
        return BundleFile(name=METRICS, text=ask_text(server, "/metrics"))
    except TidemillError as error:
        return BundleFile(name=METRICS, error=str(error))


def _logs(server: ServerAddress) -> Iterator[BundleFile]:
    name, path = LOGS
    try:
        logs = ask_server(server, "GET", path, answer="logs")["logs"]
    except TidemillError as error:
        yield BundleFile(name=name, error=str(error))
        return
    for log, text in cast("dict[str, Any]", logs).items():
        yield BundleFile(name=f"{name}/{Path(log).name or 'log'}", text=str(text))


def _dump(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
