"""A process that removes what its server leaves when it is killed.

    python -m tidemill.cluster.processes.system.reaper SERVER_PID FOLDER...

It waits for the end of its standard input, a pipe that the server alone holds open, whatever ends
the server. A killed server may still hold the locks of its folders when the pipe is closed, so the
reaper waits for its end, too. Then it removes what killed servers have left below the folders.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

from tidemill.cluster.processes.system.private_folder import remove_abandoned

STOPPED = b"."
"""The message of a server that ends by itself."""


@contextmanager
def reaping(parents: Iterable[Path]) -> Generator[None]:
    """Run a reaper for the folders of this process below `parents`."""
    server_pid = str(os.getpid())
    command = [
        sys.executable,
        "-m",
        "tidemill.cluster.processes.system.reaper",
        server_pid,
        *map(str, parents),
    ]
    with subprocess.Popen(  # noqa: S603 - our own program
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            yield
        finally:
            process.communicate(STOPPED)


def main(server_pid: int, parents: list[Path]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a signal to all of a service's processes
        signal.signal(number, signal.SIG_IGN)
    with suppress(ProcessLookupError):
        server = os.pidfd_open(server_pid)
        if sys.stdin.buffer.read() != STOPPED:
            select.select([server], [], [])  # its last thread has ended
    remove_abandoned(parents)


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
