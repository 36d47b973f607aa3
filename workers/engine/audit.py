"""Check in production that every byte has one owner: when a worker is idle, and after faults."""

import logging
from collections import Counter, deque
from collections.abc import Callable
from time import perf_counter

log = logging.getLogger(__name__)

EVENTS_MAX = 50
SHARE = 100
"""The pause after a check, as a multiple of its time: checks take 1% of the time."""

BUSY_S_MAX = 0.005
"""A check that takes longer waits until the worker is idle."""

OBJECT_S = 20e-6
"""The time of a check per cached object, before one was measured."""


class OwnershipBroken(AssertionError):
    """A check has failed, so nothing that this worker computes can be trusted."""


class Audit:
    """Decides when to check, and reports a violation with the newest events."""

    def __init__(
        self, check: Callable[[], None], count_objects: Callable[[], int], counters: Counter[str]
    ) -> None:
        """Create an audit. `check` raises AssertionError; its time grows with `count_objects`.

        Under `python -O` there are no assertions: this is logged, and nothing is checked or counted.
        """
        self._check = check
        self._count_objects = count_objects
        self._counters = counters
        self._events = deque[str](maxlen=EVENTS_MAX)
        self._due = False
        self._worked = False
        self._next_s = 0.0
        self._object_s = OBJECT_S
        if not __debug__:
            log.warning(
                "python -O drops assertions, so this worker does not check the owners of its memory: "
                "start without -O and PYTHONOPTIMIZE"
            )

    def fault(self, event: str, now_s: float) -> None:
        """Record what went wrong. A check is due after it."""
        self._events.append(f"{now_s:.3f} {event}")
        self._due = True

    def run(self, now_s: float, *, idle: bool) -> None:
        """Check if that is due and takes little time. Call it after each iteration of the step loop; `idle`
        ones had no step. Raises OwnershipBroken."""
        if not __debug__:
            return
        self._worked |= not idle
        objects = self._count_objects() + 1
        if not (self._due or (idle and self._worked)) or now_s < self._next_s:
            return
        if not idle and objects * self._object_s > BUSY_S_MAX:
            return
        self._due = self._worked = False
        began_s = perf_counter()
        try:
            self._check()
        except AssertionError as error:
            self._counters["ownership_violations"] += 1
            log.critical(
                "the owners of this worker's memory are wrong (%s): it ends, and its streams continue "
                "elsewhere. Please report this with the lines below.\nnow %.3f, newest events:\n%s",
                error or type(error).__name__,
                now_s,
                "\n".join(self._events) or "none",
                exc_info=True,
            )
            text = f"the owners of the worker's memory are wrong: {error or type(error).__name__}"
            raise OwnershipBroken(text) from error
        took_s = perf_counter() - began_s
        self._object_s = took_s / objects
        self._counters["ownership_checks"] += 1
        self._next_s = now_s + SHARE * took_s
