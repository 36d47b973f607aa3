"""Run a server and all its processes until the worker ends.

    python guard.py COMMAND...

Standard input is a pipe that the worker alone holds open, so it ends with the worker, whatever ends that. Its
first line has changes of the environment as JSON; null unsets a variable. The server's processes are a group:
they get SIGTERM, and what runs after GRACE_S is killed. Their temporary files go with them. The first line of
standard output is the number of the group.
"""

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

GRACE_S = 2.0
"""Shorter than the time that a server of ours gives its processes to end."""

PR_SET_PDEATHSIG = 1


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a service may get with all its processes: the guard's end is that of the worker."""


def _begin() -> None:
    """Write the number of the group, and end with the guard."""
    os.write(sys.stdout.fileno(), b"%d\n" % os.getpid())
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_apart(command: list[str]) -> int:
    """Run the server below a process that is no child of the worker, nor of its group: Ray kills those with
    it, before they could end the server."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if guard := os.fork():
        return _code(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))
    os.setpgid(0, 0)
    return run(command)


def run(command: list[str]) -> int:
    """Return the exit code of the server, when none of its group runs: 128 and the number of a signal."""
    for name, value in json.loads(sys.stdin.readline()).items():
        (os.unsetenv(name) if value is None else os.putenv(name, value))
    with tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True) as folder:
        os.putenv("TMPDIR", folder)
        return _run(command)


def _run(command: list[str]) -> int:
    server = subprocess.Popen(  # noqa: S603 - of the configuration
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_begin,  # noqa: PLW1509 - there are no threads
    )
    ended = os.pidfd_open(server.pid)
    ready, _, _ = select.select([sys.stdin, ended], [], [])
    if ended not in ready:
        _signal(server.pid, signal.SIGTERM)
        select.select([ended], [], [], GRACE_S)
    _signal(server.pid, signal.SIGKILL)
    return _code(server.wait())


def _code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(run_apart(sys.argv[1:]))
