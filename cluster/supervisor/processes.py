"""List the operating-system processes below this one, and end them reliably."""

import contextlib
import os
from collections.abc import Iterable

import psutil

KILL_S_MAX = 3.0


def children() -> list[psutil.Process]:
    """Return the running processes that this one has started."""
    return psutil.Process().children()


def has_ended(child: psutil.Process) -> bool:
    """Return whether a child of this process has ended. Opens no file, because none may be left to open."""
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # its status has been read
        return True


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the roots that still run and all their descendants."""
    found: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [root, *root.children(recursive=True)]
    return found


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """Wait `grace_s` for the processes to end, then kill them and their descendants and wait again."""
    _, running = psutil.wait_procs(processes, timeout=grace_s)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()  # so that it starts no more processes
    doomed = with_descendants(running)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=KILL_S_MAX)
