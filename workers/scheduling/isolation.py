"""Run suspects alone, one after the other, and all other requests between them.

    others | suspect 1, until it is past its position | others | suspect 2 ... | others

A suspect was in a step that raised, or is on trial: it was in a step of a worker that crashed. The caller of
a request on trial is notified before the request runs alone. Nothing else runs until the caller has been
notified that the trial is over. So a worker that crashes during the trial crashed because of this request.
"""

from collections.abc import Awaitable, Callable
from enum import Enum, auto

from tidemill.workers.scheduling.sequence import IsolationNotice, Sequence

Notify = Callable[[bool], Awaitable[None]]
"""Notifies the caller of a request on trial that it runs alone from now on (True), or no longer (False).
Returns when the caller can be expected to know."""


class _Stage(Enum):
    """The rows that the next step may run."""

    OTHERS = auto()  # all rows that are not suspects
    SUSPECT = auto()  # the suspect, alone
    STEP_IN_FLIGHT = auto()  # none until the steps in flight have ended
    CALLER = auto()  # none until the suspect's caller knows


class IsolatedRuns:
    def __init__(self) -> None:
        self._suspect: Sequence | None = None
        self._others_first = False

    def choose(self, rows: list[Sequence], *, in_flight: bool) -> list[Sequence]:
        """Return those of the running `rows` that the next step may have."""
        match self._stage(rows, in_flight=in_flight):
            case _Stage.OTHERS:
                return [row for row in rows if not row.is_suspect]
            case _Stage.SUSPECT:
                return [row for row in rows if row is self._suspect]
            case _Stage.STEP_IN_FLIGHT | _Stage.CALLER:
                return []

    def _stage(self, rows: list[Sequence], *, in_flight: bool) -> _Stage:
        if self._is_over(rows):
            self._suspect, self._others_first = None, True
        if self._suspect is None:
            suspects = [row for row in rows if row.is_suspect]
            if not suspects or (self._others_first and len(suspects) < len(rows)):
                self._others_first = False
                return _Stage.OTHERS
            if not in_flight:
                self._suspect = suspects[0]
        if in_flight or self._suspect is None:
            return _Stage.STEP_IN_FLIGHT
        if self._suspect.request.on_trial and not self._suspect.isolation.alone:
            _notify(self._suspect, alone=True)
            return _Stage.CALLER
        return _Stage.SUSPECT if self._suspect.is_suspect else _Stage.CALLER

    def _is_over(self, rows: list[Sequence]) -> bool:
        suspect = self._suspect
        if suspect is None or (suspect in rows and suspect.is_suspect):
            return False
        if suspect.isolation.alone or suspect.isolation.is_notifying:
            if suspect in rows:
                _notify(suspect, alone=False)
            return False  # its caller does not know yet
        return True


def _notify(sequence: Sequence, *, alone: bool) -> None:
    """Notify the caller once: it may lose its memory and get it back before its caller knows."""
    if not sequence.isolation.is_notifying:
        sequence.isolation.is_notifying = True
        sequence.delivery.inbox.put(IsolationNotice(alone))
