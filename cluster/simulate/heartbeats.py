"""Heartbeats of simulated workers: soon after a change, otherwise rarely."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from tidemill.workers.messages import Ack, Announcement, Heartbeat, WorkerInfo, WorkerLoad

LOOK_S = 0.25
"""The interval at which a real worker checks for changes to report."""

IDLE_S, IDLE_S_MAX = 2.0, 64.0
"""The first and the longest interval without a change; each interval is twice the one before. Real workers
send a heartbeat every second. Here a thousand idle workers must cost little."""


class Reporting(Protocol):
    """A simulated worker. It calls `on_change` when there is something new to report."""

    on_change: Callable[[], None]

    @property
    def info(self) -> WorkerInfo: ...
    def load(self) -> WorkerLoad: ...
    def take_announcement(self, *, full: bool) -> Announcement: ...


class SimHeartbeats:
    """The heartbeats of one worker. The first one is sent immediately."""

    def __init__(
        self, worker: Reporting, report: Callable[[Heartbeat], Ack], interval_s: float = LOOK_S
    ) -> None:
        self._worker = worker
        self._interval_s = interval_s
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._sequence = 0
        self._full = True
        self._soon = False
        self._last_s = 0.0
        self._idle_s = IDLE_S
        self._next = self._loop.call_soon(self._send)
        worker.on_change = self._send_soon

    def stop(self) -> None:
        self._next.cancel()

    def _send_soon(self) -> None:
        if not self._soon:
            self._soon = True
            self._idle_s = IDLE_S
            self._next.cancel()
            self._next = self._loop.call_at(self._last_s + self._interval_s, self._send)

    def _send(self) -> None:
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
        self._next = self._loop.call_later(self._idle_s, self._send)
        self._idle_s = min(2 * self._idle_s, IDLE_S_MAX)
