"""A server that measures how long its event loop is held, for benchmarks.serving.abuse.

python -m benchmarks.serving.watched serve ...

A timer of the loop is due each 2 ms.
Between two of its runs the CPU time of the loop's thread is the length of what held it.
Other work on the machine does not change that.
The CPU time of all threads of the process is an upper bound for what held the interpreter.
The file `holds` in the temporary folder has the longest of both.
"""

import asyncio
import mmap
import struct
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from tidemill.cluster.cli.main import main

FILE = "holds"
HOLDS = struct.Struct("dd")
PERIOD_S = 0.002


class HoldMeter:
    """Measures a loop from its first iteration on."""

    def __init__(self, loop: asyncio.AbstractEventLoop, file: Path) -> None:
        file.write_bytes(bytes(HOLDS.size))
        with file.open("r+b") as opened:
            self._longest = mmap.mmap(opened.fileno(), HOLDS.size)
        self._loop = loop
        loop.call_soon(self._measure, 0.0, 0.0)

    def _measure(self, thread_s: float, process_s: float) -> None:
        now = time.thread_time(), time.process_time()
        if thread_s:
            holds = HOLDS.unpack(self._longest[:])
            held = now[0] - thread_s, now[1] - process_s
            self._longest[:] = HOLDS.pack(*map(max, holds, held))
        self._loop.call_later(PERIOD_S, self._measure, *now)


def longest_s(file: Path) -> tuple[float, float]:
    """Return the longest holds since the last call, in seconds: of the loop's thread, of all threads."""
    holds = HOLDS.unpack(file.read_bytes())
    with file.open("r+b") as opened:
        opened.write(bytes(HOLDS.size))
    return holds


if __name__ == "__main__":
    new_event_loop = uvloop.new_event_loop
    holds_file = Path(tempfile.gettempdir()) / FILE

    def watched() -> uvloop.Loop:
        loop = new_event_loop()
        HoldMeter(loop, holds_file)
        return loop

    uvloop.new_event_loop = watched
    try:
        status = main()
    finally:
        holds_file.unlink(missing_ok=True)
    sys.exit(status)
