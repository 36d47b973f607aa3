"""A process that removes what its server leaves when it is killed.

    python -m tidemill.cluster.supervisor.reaper FOLDER...

It waits for the end of its standard input, a pipe that the server alone holds open, whatever ends
the server. Then it removes what killed servers have left below the folders.
"""

import signal
import subprocess
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from tidemill.cluster.supervisor.private_folder import remove_abandoned


@contextmanager
def reaping(parents: Iterable[Path]) -> Generator[None]:
    """Run a reaper for the folders of this process below `parents`."""
    command = [sys.executable, "-m", "tidemill.cluster.supervisor.reaper", *map(str, parents)]
    with subprocess.Popen(  # noqa: S603 - our own program
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def main(parents: list[Path]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a signal to all of a service's processes
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.read()
    remove_abandoned(parents)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
