"""The line of requests that wait for memory: the oldest first, whenever it joined."""

import asyncio
import heapq
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

RETRY_S = 0.25
"""Memory that nobody here holds may come free unannounced: another process on the device gives it back."""


Seniority = tuple[float, int]
"""When a request came, in seconds, later for one of a lower class; then its number, which no other has."""


class AdmissionQueue:
    def __init__(self) -> None:
        self._waiting: list[tuple[Seniority, asyncio.Event]] = []
        self._taken = False
        self._news = asyncio.Event()

    @asynccontextmanager
    async def wait_turn(self, seniority: Seniority) -> AsyncGenerator[None]:
        """The block runs when it is the turn of the request of this `seniority`: the smallest goes first."""
        entry = (seniority, asyncio.Event())
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

    def has_older(self, seniority: Seniority) -> bool:
        """Whether somebody waits whose turn it should be instead."""
        return bool(self._waiting) and self._waiting[0][0] < seniority

    def memory_freed(self) -> None:
        self._news.set()

    def forget_change(self) -> None:
        """What is awaited next must happen after this moment."""
        self._news.clear()

    async def changed(self) -> None:
        """Until memory came free, or somebody joined the line, who may be older; or for a moment."""
        try:
            async with asyncio.timeout(RETRY_S):
                await self._news.wait()
        except TimeoutError:
            pass

    def _leave(self) -> None:
        self._taken = False
        self._call_next()

    def _call_next(self) -> None:
        if self._waiting and not self._taken:
            self._taken = True
            heapq.heappop(self._waiting)[1].set()
