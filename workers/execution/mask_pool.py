"""Threads that compute masks beside the steps.

Masks that have been quick so far have threads of their own, which the step waits for. Others run at a lower
priority, and of these the answer whose masks have cost least so far is next.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from queue import PriorityQueue
from threading import Lock, Thread, get_native_id
from typing import Generic, TypeVar

Result = TypeVar("Result")

Task = tuple[float, int, Callable[[], None] | None]
"""A call, the least first; None ends a thread."""

NICE = 10
"""The niceness of the threads that no step waits for."""


class MaskPool(Generic[Result]):
    def __init__(self, threads: int) -> None:
        """Create a pool with `threads` for quick masks, and half as many for others. They start with the
        first mask."""
        self._threads = threads
        self._numbers = count()
        self._starting = Lock()
        self._started = False
        self._quick = PriorityQueue[Task]()
        self._slow = PriorityQueue[Task]()

    def submit(self, compute: Callable[[], Result], spent_s: float, *, quick: bool) -> Future[Result]:
        """Call `compute` on a thread. `spent_s` is what its answer has cost so far."""
        self._start()
        future = Future[Result]()

        def run() -> None:
            try:
                result = compute()
            except Exception as error:  # noqa: BLE001  the step raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        (self._quick if quick else self._slow).put((0.0 if quick else spent_s, next(self._numbers), run))
        return future

    def close(self) -> None:
        """End the threads, after what they are computing and before what waits."""
        for queue in (self._quick, self._slow):
            for _ in range(self._threads):
                queue.put((-1.0, next(self._numbers), None))

    def _start(self) -> None:
        with self._starting:
            if self._started:
                return
            self._started = True
            for number in range(self._threads):
                Thread(target=_work, args=(self._quick, 0), name=f"mask-{number}", daemon=True).start()
            for number in range((self._threads + 1) // 2):
                Thread(target=_work, args=(self._slow, NICE), name=f"slow-mask-{number}", daemon=True).start()


def lower_priority(nice: int) -> None:
    """Set the niceness of this thread alone, if the system lets it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, get_native_id(), nice)


def _work(queue: "PriorityQueue[Task]", nice: int) -> None:
    if nice:
        lower_priority(nice)
    while (run := queue.get()[-1]) is not None:
        run()
        del run
