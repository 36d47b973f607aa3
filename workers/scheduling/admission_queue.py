"""The queue of requests that wait for memory: the smallest sort key is first, whenever it joined."""

import asyncio
import heapq
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

RETRY_S = 0.25
"""The interval of retries. Another process on the device may free memory without notice."""


Precedence = tuple[float, int]
"""A place in the order of requests, the smallest first: an arrival in seconds, later for a lower class and
for a long rest of the prompt (decision 43), then the unique number of the request."""


class AdmissionQueue:
    def __init__(self) -> None:
        self._waiting: list[tuple[Precedence, asyncio.Event]] = []
        self._taken = False
        self._news = asyncio.Event()

    @asynccontextmanager
    async def wait_until_first(self, precedence: Precedence) -> AsyncGenerator[None]:
        """Run the block when the request with this sort key is first: the smallest goes first."""
        entry = (precedence, asyncio.Event())
        heapq.heappush(self._waiting, entry)
        self._news.set()
        self._call_next()
        try:
            await entry[1].wait()
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            else:
                self._leave()
            raise
        try:
            yield
        finally:
            self._leave()

    def has_older(self, precedence: Precedence) -> bool:
        """Return whether a request with a smaller sort key waits."""
        return bool(self._waiting) and self._waiting[0][0] < precedence

    def memory_freed(self) -> None:
        """Wake the first request: memory was freed, or steps have room for prompts."""
        self._news.set()

    def forget_change(self) -> None:
        """Make `changed` wait for a change after this call."""
        self._news.clear()

    async def changed(self) -> None:
        """Wait until memory was freed or a request joined the queue, at most RETRY_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(RETRY_S):
                await self._news.wait()

    def _leave(self) -> None:
        self._taken = False
        self._call_next()

    def _call_next(self) -> None:
        if self._waiting and not self._taken:
            self._taken = True
            heapq.heappop(self._waiting)[1].set()
