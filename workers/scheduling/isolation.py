"""Suspects run alone, one after the other, and everybody else in between.

    others | suspect 1, until it is past its place | others | suspect 2 ... | others

A suspect was in a step that raised, or is on trial: in a step of a worker that died. The caller of one on
trial is told before it runs alone, and nothing else runs until the caller has been told that the trial is
over: a worker that dies meanwhile died of this request.
"""

from collections.abc import Awaitable, Callable

from tidemill.workers.scheduling.sequence import IsolationNotice, Sequence

Tell = Callable[[bool], Awaitable[None]]
"""Tells the caller of a request on trial that it runs alone from now on, or not any more. Returns when the
caller can be expected to know."""


class IsolatedRuns:
    def __init__(self) -> None:
        self._now: Sequence | None = None
        self._others_first = False

    def choose(self, rows: list[Sequence], *, in_flight: bool) -> list[Sequence]:
        """Those of `rows`, which run, that the next step may have."""
        if self._is_over(rows):
            self._now, self._others_first = None, True
        if self._now is None:
            suspects = [row for row in rows if row.is_suspect]
            others = [row for row in rows if not row.is_suspect]
            if not suspects or (self._others_first and others):
                self._others_first = False
                return others
            if in_flight:
                return []
            self._now = suspects[0]
        if in_flight:
            return []
        if self._now.request.on_trial and not self._now.alone:
            _ask(self._now, alone=True)
            return []
        return [self._now] if self._now.is_suspect and self._now in rows else []

    def _is_over(self, rows: list[Sequence]) -> bool:
        now = self._now
        if now is None:
            return False
        if now in rows and now.is_suspect:
            return False
        if now.alone or now.is_notifying:
            if now in rows:
                _ask(now, alone=False)
            return False  # its caller does not know yet
        return True


def _ask(sequence: Sequence, *, alone: bool) -> None:
    """Once: it may lose its memory, and have it again, before its caller knows."""
    if not sequence.is_notifying:
        sequence.is_notifying = True
        sequence.outbox.put_nowait(IsolationNotice(alone))
