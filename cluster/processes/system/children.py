"""List the operating-system processes below this one, end them reliably, and start a detached one."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""SIGHUP comes when a terminal closes; a process that ignores it, as with nohup, goes on."""

KILL_S_MAX = 3.0

CONFIG = "config.yaml"
LOG = "files/server.log"
RAY_ADDRESS = "files/ray_current_cluster"
ENDPOINT_LOCK = "endpoint.lock"
"""Files in the folder of a detached server. Ray writes its address there itself."""


def children() -> list[psutil.Process]:
    return psutil.Process().children()


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended. Opens no file for a child of this process, because none may be left
    to open."""
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it is no child, or its status has been read
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            return process.status() == psutil.STATUS_ZOMBIE
        return not psutil.pid_exists(process.pid)


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [root, *root.children(recursive=True)]
    return found


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """Wait `grace_s` for the processes to end, then kill them and their descendants and wait again."""
    running = _still_running(processes, grace_s)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()  # so that it starts no more processes
    doomed = with_descendants(running)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _still_running(doomed, KILL_S_MAX)


def _still_running(processes: list[psutil.Process], wait_s: float) -> list[psutil.Process]:
    """Wait for the processes to end, and return those that run after `wait_s`."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # psutil opened a process in the moment of its end
            return psutil.wait_procs(processes, timeout=wait_s)[1]


def endpoint_command(root: Path) -> list[str]:
    """Return the command of the endpoint of the detached server in the folder `root`."""
    config = str(root / CONFIG)
    return [sys.executable, "-m", "tidemill", "serve", "--config", config, "--detached-folder", str(root)]


def start_endpoint(root: Path, cwd: str) -> "subprocess.Popen[bytes]":
    """Start the process of the endpoint of the detached server in the folder `root`."""
    with (root / LOG).open("ab") as log:
        return subprocess.Popen(  # noqa: S603 - our own program
            endpoint_command(root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            process_group=0,
        )


def lock_endpoint(root: Path) -> bool:
    """Make this process the endpoint of the detached server in `root`, until it ends; return False if
    another process is."""
    lock = os.open(root / ENDPOINT_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return True


def endpoint_pid(root: Path) -> int | None:
    """Return the pid of the endpoint of the detached server in `root`, None if none runs."""
    with contextlib.suppress(FileNotFoundError), (root / ENDPOINT_LOCK).open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return int(lock.read() or b"0") or None
    return None
