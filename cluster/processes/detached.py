"""A server that outlives the command that started it: `tidemill serve --detach` and `tidemill down`.

TMPDIR/tidemill-x7k2w9qa/     a private folder, see cluster/processes/system/private_folder.py
  server.json                 its address, its folders
  config.yaml                 the configuration that the process of the endpoint reads
  endpoint.lock               locked by that process, with its pid
  files/                      Ray's folder
  files/server.log            the output of Ray's start and of the endpoint

Ray runs by itself, as with `ray start`. The endpoint's process is a driver of this Ray. The
supervisor, an actor there, starts it again whenever it ends.

All of them are in one session: Linux may share the cores out by session (`sched_autogroup_enabled`), and a
session of edges alone has waited for seconds beside busy workers.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tidemill.cluster.processes.endpoint.endpoint import Endpoint, listening
from tidemill.cluster.processes.system.children import CONFIG, LOG, end, endpoint_command, endpoint_pid
from tidemill.cluster.processes.system.private_folder import (
    FILES,
    DetachedServer,
    detached_servers,
    lasting_folder,
    remove_folder,
    too_long,
    writers,
)
from tidemill.cluster.settings import OBJECT_STORE_BYTES, authority
from tidemill.kvstore.errors import TidemillError

READY = "ready: "
OURS = "tidemill: "

LOOK_S = 0.1
RAY_STARTS_MAX = 3
NO_RAY = os.EX_UNAVAILABLE
"""The exit status when Ray did not start. The endpoint itself never ends with it."""

STOP_MARGIN_S = 15.0
"""The time to end beside that for open answers."""

ConfigOf = Callable[[str | None, int], str]
"""Returns the text of a configuration from the URL of a private store, and the port."""


class DetachError(TidemillError):
    """A detached server cannot be started; the message is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A detached server that serves; `line` is what it printed then."""

    line: str
    pid: int
    log: Path


def start_detached(
    endpoint: Endpoint,
    temp_folder: Path,
    store_parent: Path | None,
    config_of: ConfigOf,
    environ: Mapping[str, str],
) -> Started:
    """Start Ray and a server on it; return when it serves. Its folder is made below `temp_folder`, and one
    for a private store below `store_parent`. Raises DetachError and PortTaken; nothing is left running
    then."""
    if reason := too_long(temp_folder):
        raise DetachError(reason)
    for known in detached_servers(temp_folder):
        if known.url.rpartition(":")[2] == str(endpoint.port) and known.is_running():
            raise DetachError(f"a detached server has {known.url} already: end it with `tidemill down`")
    with listening(endpoint) as sockets:
        port: int = sockets.http.getsockname()[1]
    with ExitStack() as stack:
        root = stack.enter_context(lasting_folder("tidemill-", temp_folder))
        store = None
        if store_parent is not None:
            store = stack.enter_context(lasting_folder("tidemill-store-", store_parent))
        server = DetachedServer(
            url=f"{endpoint.scheme}://{authority(endpoint.host, port)}",
            root=str(root),
            store="" if store is None else str(store),
            cwd=str(Path.cwd()),
            open_s_max=endpoint.limits.shutdown_s_max,
        )
        for folder in filter(None, (server.root, server.store)):
            server.write(folder)
        store_url = None if store is None else f"file://{store / FILES}"
        (root / CONFIG).write_text(config_of(store_url, port))
        for _ in range(RAY_STARTS_MAX):  # a busy machine may need several attempts
            process = _start(root, environ)
            line = _ready_line(process, root)
            if line is not None:
                return Started(line=line, pid=process.pid, log=root / LOG)
            end(writers(root), 0.0)
        raise DetachError(f"Ray does not start: {_last_line(root)}")


def stop_detached(server: DetachedServer) -> None:
    """End a detached server, after its open answers. Nothing is left."""
    root = Path(server.root)
    pid = endpoint_pid(root) if server.is_running() else None
    if pid is not None:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            process.send_signal(signal.SIGTERM)
            process.wait(server.open_s_max + STOP_MARGIN_S)
    remove_detached(server)


def remove_detached(server: DetachedServer) -> None:
    """End all processes of a detached server except this one, and remove its folders."""
    for folder in filter(None, (server.root, server.store)):
        remove_folder(Path(folder))


def _start(root: Path, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process that starts Ray, which nothing but a signal ends, and then becomes the endpoint."""
    ray = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"),
        *("--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={root / FILES}"),
        *(f"--object-store-memory={OBJECT_STORE_BYTES}", "--min-worker-port=0", "--max-worker-port=0"),
    ]
    script = f"{shlex.join(ray)} || exit {NO_RAY}; exec {shlex.join(endpoint_command(root))}"
    with (root / LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own program
            ["/bin/sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )


def _ready_line(process: "subprocess.Popen[bytes]", root: Path) -> str | None:
    """Wait until the endpoint serves; return None if Ray does not start. Raises DetachError with the line of
    an endpoint that ends."""
    while True:
        has_ended = process.poll() is not None
        lines = (root / LOG).read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith(READY):
                return line
        if process.returncode == NO_RAY:
            return None
        if has_ended:
            refusals = [line.removeprefix(OURS) for line in lines if line.startswith(OURS)]
            raise DetachError(refusals[-1] if refusals else f"the server ended: {_last_line(root)}")
        time.sleep(LOOK_S)


def _last_line(root: Path) -> str:
    lines = (root / LOG).read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
