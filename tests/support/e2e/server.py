"""The processes of `tidemill serve` and `tidemill edge` under test: starts them, knows all their processes,
proves that nothing is left."""

import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from tests.support.waits import EVENTUALLY_S_MAX, eventually
from tidemill.cluster.processes.system.private_folder import LOCK

READY = "ready: "
MARK = "TIDEMILL_TEST_RUN"
SHARES_SERVER = {
    "tests/e2e/test_clients.py",
    "tests/e2e/machine/test_fuzz_ports.py",
    "tests/e2e/machine/test_optimized.py",
    "tests/e2e/test_serving.py",
    "tests/e2e/lifecycle/test_docs_commands.py",
    "tests/e2e/lifecycle/test_try.py",
}
"""The files that use the server of tests/e2e/conftest.py: one process runs them."""

NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""An SSL context for clients that ask often; httpx would read all certificates of the system for each."""


def command_of(process: psutil.Process) -> str:
    """Its command line; nothing of one that has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def marked(mark: str, variable: str = MARK) -> list[psutil.Process]:
    """Return the processes whose `variable` begins so; descendants inherit it."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(variable, "").startswith(mark):
                found.append(process)
    return found


def runs(process: psutil.Process) -> bool:
    """Return whether the process has not ended; a zombie has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listening_of(processes: Sequence[psutil.Process]) -> list[str]:
    """The addresses that their sockets listen on."""
    found: list[str] = []
    for process in processes:
        with suppress(psutil.Error):  # it ends meanwhile
            sockets = process.net_connections("inet")
            found += [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]
    return found


def sessions_of(processes: Sequence[psutil.Process]) -> set[int]:
    """Return the sessions of a server's processes, but for that of the reaper, which outlives the others."""
    found: set[int] = set()
    for process in processes:
        with suppress(ProcessLookupError):  # it ends meanwhile
            if "system.reaper" not in command_of(process):
                found.add(os.getsid(process.pid))
    return found


class Serving(ABC):
    """A server, with questions that its URL answers."""

    @property
    @abstractmethod
    def url(self) -> str: ...

    def lives(self) -> dict[str, str]:
        """Return the id of each worker, which the next process of that name does not have."""
        return {row["info"]["name"]: row["info"]["worker"] for row in self.workers()}

    def workers(self, role: str = "") -> list[dict[str, Any]]:
        """The rows of `tidemill status`, of one role."""
        answer = httpx.get(f"{self.url}/cluster", timeout=EVENTUALLY_S_MAX, verify=NO_TLS)
        rows = answer.json()["workers"]
        return [row for row in rows if row["info"]["role"].startswith(role)]

    def counter(self, name: str) -> float:
        """Sum of a counter over the workers."""
        return sum(row["load"]["counters"].get(name, 0) for row in self.workers())

    def oldest_heartbeat_s(self) -> float:
        """Return when the worker whose heartbeat is the oldest sent it, or somewhat earlier."""
        now_s = time.monotonic()
        return min(now_s - row["heard_ago_s"] for row in self.workers())

    def wait_for_heartbeats(self) -> None:
        """Wait until the router knows what the workers have done so far."""
        for _ in range(2):  # the first one may be older
            since_s = time.monotonic()
            eventually(lambda since_s=since_s: self.oldest_heartbeat_s() > since_s)

    def replace_workers(self) -> None:
        """Kill all workers with -9; return when their successors, which hold nothing, are there."""
        before = self.lives()
        for row in self.workers():
            os.kill(row["info"]["pid"], signal.SIGKILL)

        def all_are_new() -> bool:
            now = self.lives()
            return now.keys() >= before.keys() and set(now.values()).isdisjoint(before.values())

        eventually(all_are_new)


class Server(Serving):
    """A server that answers. `url` is its root."""

    def __init__(
        self,
        arguments: Sequence[str],
        log_file: Path,
        module: str = "tidemill",
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Start it and wait; `prefix` is a command that becomes the server."""
        self._log_file = log_file
        self._has_ended = False
        self.temp_folder = Path(tempfile.mkdtemp(prefix="e2e-"))  # a short path, for Ray's sockets
        with log_file.open("w") as log:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # workers import no module from the working directory, so that of a test is named
                env={**environ, "TMPDIR": str(self.temp_folder), "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        assert self._process.stdout is not None
        printed: list[str] = []  # Ray itself may print something first
        for line in self._process.stdout:
            if line.startswith(READY):
                self._url = line.removeprefix(READY).split("/v1 ")[0]
                return
            printed.append(line)
        self.kill_everything()
        raise AssertionError(f"not ready: {''.join(printed)}\n{log_file.read_text()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        """Stop it, unless it was stopped; kill it after a failure."""
        del raised
        try:
            if kind is None and not self._has_ended:
                assert self.stop() == 0
        finally:
            self.kill_everything()

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        """The standard error so far."""
        return self._log_file.read_text()

    def folders(self) -> list[Path]:
        """The private folders of the server, in the order of their paths."""
        links = [path.readlink() for path in Path(f"/proc/{self.pid}/fd").iterdir() if path.is_symlink()]
        return sorted(link.parent for link in links if link.name == LOCK)

    def drain(self, name: str, *, wanted: bool) -> None:
        """Order a worker to take no work, or to take it again; return when it follows."""
        body = {"drain": wanted, "force": True}
        reply = httpx.post(
            f"{self.url}/cluster/workers/{name}/drain",
            json=body,
            timeout=EVENTUALLY_S_MAX,
            verify=NO_TLS,
        )
        assert reply.status_code == httpx.codes.OK, reply.text
        state = "draining" if wanted else "ready"
        eventually(lambda: {row["state"] for row in self.workers() if row["info"]["name"] == name} == {state})

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and `wait`."""
        processes = self.processes()
        os.kill(self.pid, number)
        return self.wait(processes)

    def wait(self, processes: Sequence[psutil.Process]) -> int:
        """Wait for the end of the server and of its `processes`; returns the exit status. Fails when a
        process outlives it, or a temporary file."""
        status = self._process.wait(timeout=EVENTUALLY_S_MAX)
        _, alive = psutil.wait_procs(processes, timeout=EVENTUALLY_S_MAX)
        more = self._printed_more()
        self._has_ended = True
        self._close()
        assert not more, f"standard output has more than the line that it is ready: {more!r}"
        assert not alive, f"processes outlive the server: {alive}"
        files = list(self.temp_folder.iterdir())
        assert not files, f"files outlive the server: {files}"
        return status

    def _printed_more(self) -> bytes:
        """Return what standard output has now, behind the line that the server is ready."""
        assert self._process.stdout is not None
        end = self._process.stdout.fileno()
        os.set_blocking(end, False)
        with suppress(BlockingIOError):
            return os.read(end, 1 << 16)
        return b""

    def _close(self) -> None:
        """An open pipe would be the warning, and so the failure, of some later test."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def kill_everything(self) -> None:
        """Kill what a failed test has left."""
        if self._process.poll() is None:
            for process in reversed(self.processes()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait()
        self._close()
        shutil.rmtree(self.temp_folder, ignore_errors=True)


class EdgeProcess:
    """An edge, from its start on. Its tokenizers and its log are in `folder`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir()
        self._out, self._log = folder / "out", folder / "log"
        with self._out.open("w") as out, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tidemill", "edge", "--port", "0", *arguments],
                stdout=out,
                stderr=log,
                env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def log(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        del raised
        self.kill()

    def wait_until_ready(self) -> str:
        """Return its URL."""
        eventually(lambda: READY in self._out.read_text() or self._process.poll() is not None)
        ready = [line for line in self._out.read_text().splitlines() if line.startswith(READY)]
        assert ready, self.log()
        return ready[0].removeprefix(READY).split("/v1 ")[0]

    def kill(self) -> None:
        """Kill it with -9, if it still runs."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Stop it by SIGTERM; return the status."""
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        return self._process.wait(timeout=EVENTUALLY_S_MAX)


def run_cli(
    *arguments: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[psutil.Process]]:
    """Run a command that is expected to end by itself; with the processes that it has left behind."""
    mark = uuid.uuid4().hex
    ended = subprocess.run(
        [sys.executable, "-m", "tidemill", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment, MARK: mark},
        timeout=2 * EVENTUALLY_S_MAX,
    )
    _, alive = psutil.wait_procs(marked(mark), timeout=EVENTUALLY_S_MAX)
    return ended, alive
