"""Runs pytest in forks of a process that has imported torch: importing takes most of the time of a short run.

    python -B forks.py < requests > answers

Both have a line of JSON for each run. This file imports nothing of the copy that is tested.
"""

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

INTERNAL_ERROR = 3
"""The status of pytest when it fails itself."""

IMPORTED_FIRST = ("torch", "numpy", "pydantic", "pytest", "rich", "uvloop")
"""Not what pytest rewrites when it is imported: its plugins and their libraries."""


class Forks:
    """The process that forks. Call `close` at the end."""

    def __init__(self, output: Path) -> None:
        """The file `output` has what the last run has printed."""
        self._output = output
        self._process = subprocess.Popen(
            [sys.executable, "-B", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def pytest(
        self, arguments: Sequence[str], cwd: Path, environ: Mapping[str, str], timeout_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        """Run pytest as `python -m pytest` would, with PYTHONPATH of `environ`. Raises TimeoutExpired."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        wanted = [list(arguments), str(cwd), dict(environ), timeout_s, str(self._output)]
        self._process.stdin.write(f"{json.dumps(wanted)}\n")
        self._process.stdin.flush()
        status = json.loads(self._process.stdout.readline())
        if status is None:
            raise subprocess.TimeoutExpired(list(arguments), timeout_s or 0.0)
        return subprocess.CompletedProcess(
            list(arguments), status, self._output.read_text(errors="replace"), ""
        )

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _run(arguments: list[str], cwd: str, environ: dict[str, str], output: str) -> None:
    """Become `python -m pytest`."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, file), (2, file)):
        os.dup2(source, target)
    sys.path[:1] = environ["PYTHONPATH"].split(":")  # instead of the folder of this file
    sys.argv = ["pytest", *arguments]
    import pytest  # noqa: PLC0415  imported before the fork

    status = pytest.main(arguments)
    sys.stdout.flush()
    os._exit(status)


def _wait(pid: int, timeout_s: float | None) -> int | None:
    """Return the status of a child as `subprocess` has it, or None if it was killed after `timeout_s`."""
    watched = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    ended = poll.poll(None if timeout_s is None else timeout_s * 1000)
    os.close(watched)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if ended else None


def main() -> None:
    for name in IMPORTED_FIRST:
        __import__(name)
    for line in sys.stdin:
        arguments, cwd, environ, timeout_s, output = json.loads(line)
        pid = os.fork()
        if not pid:
            try:
                _run(arguments, cwd, environ, output)
            except BaseException:  # noqa: BLE001  the parent's loop is not for the child
                traceback.print_exc()
                os._exit(INTERNAL_ERROR)
        print(json.dumps(_wait(pid, timeout_s)), flush=True)  # noqa: T201  the answer


if __name__ == "__main__":
    main()
