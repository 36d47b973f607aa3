"""Repeat what a process does until it ends: a failed round is logged and counted, and others follow."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

FAILED_ROUNDS = Counter[str]()
"""The failed rounds of this process by task; 0 for a task of which none failed."""

log = logging.getLogger(__name__)


async def every(
    period_s: float,
    work: Callable[[], Awaitable[bool | None]],
    task: str,
    *,
    fatal: tuple[type[Exception], ...] = (),
) -> None:
    """Call `work` with pauses of `period_s` until it returns True, whatever it raises. Only what is `fatal`
    and the end of this task end it before. Of failures in a row the first is logged."""
    FAILED_ROUNDS[task] += 0
    failures = 0
    while True:
        try:
            if await work():
                return
        except (*fatal, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a library of Rust panics with one that is no Exception
            if _is_cancelled():
                raise asyncio.CancelledError from error
            FAILED_ROUNDS[task] += 1
            failures += 1
            if failures == 1:
                log.exception("%s: a round failed, others follow after %g s", task, period_s)
        else:
            if failures:
                log.warning("%s: rounds succeed again after %d failures", task, failures)
            failures = 0
        await asyncio.sleep(period_s)


def _is_cancelled() -> bool:
    """Return whether the end of this task was asked for. A call that another task has cancelled raises
    CancelledError, too."""
    current = asyncio.current_task()
    return current is not None and current.cancelling() > 0
