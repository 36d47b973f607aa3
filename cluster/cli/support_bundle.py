"""`tidemill support-bundle`: collect the diagnostics of a server in an archive, without keys and
prompts.

Its index.json lists every part with `ok`, or with the reason why it is missing.
"""

import argparse
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tidemill import __version__
from tidemill.cluster.cli.fleet import EXIT_NOT_ALL, CommandContext
from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.options.server_address import ServerAddress
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
"""The HTTP path of each file, and a key that its answer must have."""

METRICS = "metrics.txt"
LOGS = ("logs", "/cluster/support/logs")


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """A file of the archive, or the reason why it is missing."""

    name: str
    text: str = ""
    error: str = ""


def bundle(options: argparse.Namespace, server: ServerAddress, context: CommandContext) -> int:
    """Write the archive, and name what is missing in it."""
    files = collect(server)
    try:
        write_bundle(options.output, files, context.unix_time_s(), server)
    except OSError as error:
        raise UsageError(f"--output {options.output}: {error.strerror}") from error
    for file in files:
        if file.error:
            sys.stderr.write(f"tidemill: without {file.name}: {file.error}\n")
    missing = sum(bool(file.error) for file in files)
    sys.stdout.write(f"{options.output}: {len(files) - missing} of {len(files)} parts, see index.json\n")
    return EXIT_NOT_ALL if missing else 0


def collect(server: ServerAddress) -> list[BundleFile]:
    """Return all parts; a part that cannot be fetched has an error."""
    answers = (_json(server, name, *source) for name, source in JSON.items())
    return [_client(), *answers, _metrics(server), *_logs(server)]


def write_bundle(path: Path, files: Sequence[BundleFile], unix_time_s: float, server: ServerAddress) -> None:
    """Write an archive that only its owner can read. Raises OSError."""
    secrets = [server.api_key]
    index = {
        "made_unix_s": unix_time_s,
        "server": server.url,
        "parts": {file.name: file.error or "ok" for file in files},
    }
    index_file = BundleFile(name="index.json", text=_dump(index))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE)
    os.fchmod(descriptor, PRIVATE)  # an existing file may be readable by others
    with os.fdopen(descriptor, "wb") as output, tarfile.open(fileobj=output, mode="w:gz") as archive:
        for file in (index_file, *(file for file in files if not file.error)):
            data = without_secrets(file.text, secrets).encode(errors="replace")
            entry = tarfile.TarInfo(f"tidemill-support/{file.name}")
            entry.size, entry.mtime, entry.mode = len(data), int(unix_time_s), PRIVATE
            archive.addfile(entry, io.BytesIO(data))


def _client() -> BundleFile:
    """Return the versions of the client, which may differ from the server's."""
    versions = {"tidemill": __version__, "python": platform.python_version(), "platform": platform.platform()}
    return BundleFile(name="client.json", text=_dump(versions))


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
