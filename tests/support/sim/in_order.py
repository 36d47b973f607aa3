"""Sequential work in the order of the calls, in any order of callbacks of the loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    def __init__(self) -> None:
        self._newest: asyncio.Future[T] | None = None

    def add(self, work: Callable[[], Awaitable[T]]) -> asyncio.Future[T]:
        self._newest = asyncio.ensure_future(self._after(self._newest, work))
        return self._newest

    async def _after(self, before: asyncio.Future[T] | None, work: Callable[[], Awaitable[T]]) -> T:
        if before is not None:
            await asyncio.wait([before])
        return await work()
