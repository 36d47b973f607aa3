"""The operating-system processes below this one: which there are, and how they end for certain."""

import contextlib
from collections.abc import Iterable

import psutil

KILL_S_MAX = 3.0


def children() -> list[psutil.Process]:
    """The processes that this one has started and that still run."""
    return psutil.Process().children()


def with_descendants(roots: Iterable[psutil.Process]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [root, *root.children(recursive=True)]
    return found


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """Give them `grace_s` to end by themselves, then kill them and all that they started. Waits until they
    are gone."""
    _, running = psutil.wait_procs(processes, timeout=grace_s)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()  # it starts nothing more
    doomed = with_descendants(running)
    for process in doomed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=KILL_S_MAX)
