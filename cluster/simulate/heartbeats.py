"""Heartbeats of simulated workers: soon after something new, else seldom."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tidemill.workers.messages import Ack, Announcement, Heartbeat, WorkerInfo, WorkerLoad

LOOK_S = 0.25
"""As often as a real worker looks whether there is something new to report."""

IDLE_S, IDLE_S_MAX = 2.0, 64.0
"""Real workers beat every second. With nothing new it changes nothing, and a thousand idle workers must cost
little: each wait is twice the one before."""


class Reporting(Protocol):
    @property
    def info(self) -> WorkerInfo: ...
    def load(self) -> WorkerLoad: ...
    def take_announcement(self, *, full: bool) -> Announcement: ...


class SimHeartbeats:
    """One worker's. The first one comes at once."""

    def __init__(self, worker: Reporting, report: Callable[[Heartbeat], Ack]) -> None:
        self._worker = worker
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._sequence = 0
        self._full = True
        self._soon = False
        self._last_s = 0.0
        self._idle_s = IDLE_S
        self._next = self._loop.call_soon(self._beat)

    def touch(self) -> None:
        """There is something new."""
        if not self._soon:
            self._soon = True
            self._idle_s = IDLE_S
            self._next.cancel()
            self._next = self._loop.call_at(self._last_s + LOOK_S, self._beat)

    def stop(self) -> None:
        self._next.cancel()

    def _beat(self) -> None:
        self._soon = False
        self._last_s = self._loop.time()
        self._sequence += 1
        ack = self._report(
            Heartbeat(
                info=self._worker.info,
                sequence=self._sequence,
                load=self._worker.load(),
                announcement=self._worker.take_announcement(full=self._full),
            )
        )
        self._full = ack.want_full
        self._next = self._loop.call_later(self._idle_s, self._beat)
        self._idle_s = min(2 * self._idle_s, IDLE_S_MAX)
