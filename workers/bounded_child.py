"""A child process that answers questions within limits of time and memory, which the kernel enforces.

Some calls cannot be interrupted, and few characters can keep them busy for minutes. The child is started
with the first question and kept. Its standard input ends with its parent, and so does the child.
"""

import json
import resource
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANSWER_S_MAX = 20.0
"""The time to wait for the child, which may share its core with many others."""

MEMORY_BYTES = 1 << 30
"""The memory that the child may reserve beyond what it has after its start."""


class BoundedChild:
    """The child process of one thread at a time. It runs `module`, which calls `answer_questions`."""

    def __init__(self, module: str, head: object) -> None:
        """`head` is the first line that the child reads, as JSON."""
        self._module = module
        self._head = json.dumps(head).encode() + b"\n"
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def ask(self, question: object) -> Any:  # noqa: ANN401 - JSON
        """Return the answer of the child, or None if it reached a limit and was killed."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        line = json.dumps(question).encode() + b"\n"
        try:
            child.stdin.write(line)
            child.stdin.flush()
            ready, _, _ = select.select([child.stdout], [], [], ANSWER_S_MAX)
            line = child.stdout.readline() if ready else b""
        except BrokenPipeError:
            line = b""
        except BaseException:  # an interrupt: the next answer would be that of this question
            self.close()
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        self.close()
        return None

    def close(self) -> None:
        """End the child. The next question starts another one."""
        self._end()
        self._child = None

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._child = subprocess.Popen(  # noqa: S603  our own command
                [sys.executable, "-P", "-m", self._module], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self._end = weakref.finalize(self, _kill, self._child)
            assert self._child.stdin is not None
            self._child.stdin.write(self._head)
        return self._child


def _kill(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.communicate()


def answer_questions(answer: Callable[[Any], object], cpu_s_max: float) -> None:
    """Answer what the parent asks until it ends, each question within `cpu_s_max` of CPU time."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # open answers of the parent go on
        signal.signal(number, signal.SIG_IGN)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also inside a call of a library
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s_max)
        found = answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(json.dumps(found).encode() + b"\n")
        sys.stdout.buffer.flush()


def head_of_parent() -> Any:  # noqa: ANN401 - JSON
    """Return the first line of the parent."""
    return json.loads(sys.stdin.buffer.readline())
