"""Devices that answer late: a stream on a thread for the real runner, and a runner for virtual time.

    TIDEMILL_TESTS_LATE=1 python -m pytest tests/unit/workers/engine

runs these tests with every fake runner late; `test_whole_runs.py` there draws some late in every run.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from threading import Event

import torch

from tests.support.sim.in_order import InOrder
from tidemill.workers.execution.step import Drawn, Runner, Step

NEXT_S_MAX = 0.02
"""The time that a step of the stream waits for the launch of the next one."""


ALWAYS_S_MAX = 0.05 if os.environ.get("TIDEMILL_TESTS_LATE") else 0.0
"""The delay in virtual time of answers of every fake runner; 0: only of those that a test makes late."""


class LateEvent:
    def __init__(self, ended: "Future[None]") -> None:
        self._ended = ended

    def query(self) -> bool:
        return self._ended.done()

    def synchronize(self) -> None:
        self._ended.result()


class LateStream:
    """Runs the device's part of a step on a thread, and begins it as late as possible: when the next step is
    launched too. What the host overwrites or reads too early is wrong."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.overlapped = 0  # steps that had not begun when the next one was launched
        self._thread = ThreadPoolExecutor(1, "device")
        self._next = Event()

    def launch(self, work: Callable[[], None]) -> LateEvent:
        self._next.set()
        launched = self._next = Event()
        return LateEvent(self._thread.submit(self._run, work, launched))

    def _run(self, work: Callable[[], None], launched: Event) -> None:
        self.overlapped += launched.wait(NEXT_S_MAX)
        work()

    def close(self) -> None:
        self._thread.shutdown()


class LateRunner:
    """Answers a step some time after it ended: the next one may have ended by then."""

    def __init__(self, runner: Runner, rng: Random, late_s_max: float) -> None:
        self._runner = runner
        self._rng = rng
        self._late_s_max = late_s_max
        self._order = InOrder[list[Drawn]]()

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        answer = asyncio.ensure_future(self._runner.run(step))
        return self._order.add(lambda: self._late(answer))

    async def _late(self, answer: asyncio.Future[list[Drawn]]) -> list[Drawn]:
        await asyncio.wait([answer])
        await asyncio.sleep(self._rng.random() * self._late_s_max)
        return answer.result()
