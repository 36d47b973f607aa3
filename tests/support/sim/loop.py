"""An asyncio loop with virtual time and a seeded order of ready callbacks."""

import asyncio
import heapq
from collections.abc import Coroutine
from random import Random
from typing import Any


class SimLoop(asyncio.SelectorEventLoop):
    """A loop with virtual time. Equal seeds give equal runs."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        ready, scheduled = self._ready, self._scheduled  # pyrefly: ignore[missing-attribute]
        if not ready and scheduled:
            self._now = max(self._now, scheduled[0].when())
        while scheduled and scheduled[0].when() <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            if not handle.cancelled():
                ready.append(handle)
        assert ready or scheduled, "deadlock: nothing is ready and nothing is scheduled"
        if ready:
            ready.rotate(-self._rng.randrange(len(ready)))
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


def simulate(seed: int, main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end in virtual time. An exception that was never awaited fails the run, too."""
    unseen: list[dict[str, Any]] = []
    loop = SimLoop(Random(seed))
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    try:
        loop.run_until_complete(main)
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    assert not unseen, unseen
