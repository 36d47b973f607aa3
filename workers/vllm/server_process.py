"""The vLLM server of a worker: started, watched, and ended with the worker."""

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.vllm import guard

LINES_KEPT = 200

ERROR = re.compile(r"\b\w*(Error|Exception): \S")
FOLLOWS = re.compile(r"\b(BrokenPipeError|EOFError): |root cause")
"""Errors that only follow from the end of another process, or refer to its error."""

FIXES = {
    2: "correct --engine-args",
    128 + signal.SIGKILL: "it was killed: if memory ran out, lower --memory, or run fewer workers there",
}
"""The fix that an exit code names."""

LEVELS = {"WARNING": logging.WARNING, "ERROR": logging.ERROR, "CRITICAL": logging.ERROR}

PREFIX = re.compile(r"^\(.*? pid=\d+\) +|^.*\[\w+\.py:\d+\] ")
"""The beginning of a line of vLLM: its process, or its level, time and place."""

REST_S_MAX = 0.1
"""The time for the rest of a server to end by itself."""

log = logging.getLogger(__name__)


class EngineEnded(TidemillError):
    """The vLLM server of this worker has ended or does not work; the message is one line with the reason."""


class ServerProcess:
    """A running server. Its lines go to the log of the worker."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str | None]) -> None:
        """Start the server, with the environment of this process and these changes. Raises OSError."""
        self._lines = deque[str](maxlen=LINES_KEPT)
        self._group = 0  # of the server's processes; 0: not known yet
        self._process = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-P", str(Path(guard.__file__)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(environ) + "\n")
        self._process.stdin.flush()
        self._reader = Thread(target=self._read, name="vllm-log", daemon=True)
        self._reader.start()

    def check(self) -> None:
        """Raise EngineEnded if the server has ended."""
        code = self._process.poll()
        if code is not None:
            self._end_rest()
            code = code if code >= 0 else 128 - code
            reasons = [] if code == 128 + signal.SIGKILL else [self.reason]
            fixes = [FIXES[code]] if code in FIXES else []
            raise EngineEnded(f"vLLM ended with exit code {code}: {'; '.join(reasons + fixes)}")

    @property
    def reason(self) -> str:
        """The last line about an error that does not follow from another one, else the last line; warnings
        name errors that may come."""
        lines = [
            PREFIX.sub("", PREFIX.sub("", line)).strip() for line in self._lines if " WARNING " not in line
        ]
        errors = [line for line in lines if ERROR.search(line)]
        causes = [line for line in errors if not FOLLOWS.search(line)]
        return (causes or errors or lines or ["it wrote nothing"])[-1]

    async def watch(self) -> None:
        """Raise EngineEnded when the server has ended."""
        self.check()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        process = os.pidfd_open(self._process.pid)
        loop.add_reader(process, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(process)
            os.close(process)
        self.check()

    def stop(self) -> None:
        """End the server, as the end of this process does, and wait until none of its processes runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._end_rest()
        self._reader.join()
        self._process.stdout.close()

    def _end_rest(self) -> None:
        """Kill the processes of the server that outlive the guard, because that was killed: their output is
        still open."""
        self._reader.join(REST_S_MAX)
        if self._reader.is_alive() and self._group:
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not self._group and line.strip().isdecimal():
                self._group = int(line)
                continue
            if text := line.strip():
                self._lines.append(text)
                level = next((level for word, level in LEVELS.items() if f" {word} " in text), logging.INFO)
                log.log(level, "vllm: %s", text)
