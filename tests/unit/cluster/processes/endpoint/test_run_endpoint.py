"""The end of a server and of what runs beside it."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from tidemill.cluster.processes.endpoint import run_endpoint
from tidemill.cluster.processes.endpoint.run_endpoint import run_serving, stop_signals

NEVER_ENDS = """
import threading
from tidemill.cluster.processes import server
server.STOP_S_MAX = 0.2
server._end_in_time(lambda: 0.1)
threading.Event().wait()
"""


class Swallows:
    """A task that loses its first cancellation, as in a library that raises another error instead."""

    def __init__(self) -> None:
        self.num_cancelled = 0

    async def run(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                if self.num_cancelled > 1:
                    raise


async def test_task_that_loses_its_cancellation_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_endpoint, "CANCEL_S", 0.02)
    swallows, stop, ended, answers = Swallows(), asyncio.Event(), asyncio.Event(), list[str]()

    async def serve() -> None:
        await ended.wait()
        await asyncio.sleep(0.1)  # its open answers
        answers.append("whole")

    serving = asyncio.create_task(run_serving(serve(), ended.set, stop, [swallows.run]))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(30):
        await serving
    assert swallows.num_cancelled == 2
    assert answers == ["whole"]


def test_first_signal_begins_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_endpoint, "STOP_SIGNALS", (signal.SIGUSR1,))
    begun: list[str] = []

    async def main() -> None:
        with stop_signals(lambda: begun.append("begun")) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            await stop.wait()
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.sleep(0.1)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert begun == ["begun"]


def test_server_that_does_not_end_is_killed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 1
    assert "threading.py" in ended.stderr
    assert "in wait" in ended.stderr
