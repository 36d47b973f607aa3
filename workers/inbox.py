"""One way of an item from its source to its reader: every layer is a function of an item.

    source --put--> Inbox --take--> layer --emit--> layer --emit--> reader

An item runs through all layers in the call of `put`. It waits in the inbox only while an earlier one does.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

Pause = Callable[[], Awaitable[object]]
"""Awaited by the source of a stream before its next item, for example while a client does not read."""

Emit = Callable[[ItemT], Pause | None]
"""Passes an item on. The stream of its source ends with the error that it raises."""


class Enough(Exception):
    """Raised by a reader that needs no more items."""


async def done() -> None:
    """A pause after which an inbox is read no more."""


class Inbox(Generic[ItemT]):
    """The items of one stream, in order, for one reader."""

    __slots__ = ("_idle", "_items", "_take")

    def __init__(self) -> None:
        self._items: deque[ItemT] = deque()
        self._take: Emit[ItemT] | None = None
        self._idle: asyncio.Future[Pause] | None = None  # all items have been passed on

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: ItemT) -> None:
        """Pass on an item, as soon as all earlier ones are. It raises no error of the reader."""
        idle, take = self._idle, self._take
        if idle is None or take is None or idle.done():
            self._items.append(item)
            return
        try:
            pause = take(item)
        except Exception as error:  # noqa: BLE001  of this stream: others share the source
            idle.set_exception(error)
        else:
            if pause is not None:
                idle.set_result(pause)

    async def read(self, take: Emit[ItemT]) -> None:
        """Pass on all items to `take`, in the calls of `put` where possible, until it returns `done`. Raises
        the errors of `take`."""
        self._take = take
        while True:
            pause: Pause | None = None
            while pause is None and self._items:
                pause = take(self._items.popleft())
            if pause is None:
                self._idle = asyncio.get_running_loop().create_future()
                try:
                    pause = await self._idle
                finally:
                    self._idle = None
            if pause is done:
                return
            await pause()


async def generated(run: Callable[[Emit[ItemT]], Awaitable[None]]) -> AsyncGenerator[ItemT]:
    """Yield what `run` emits: the outer end of a stream. Closing it cancels `run`, which is at most two items
    ahead of the reader."""
    items = deque[ItemT]()
    arrived, taken = asyncio.Event(), asyncio.Event()

    def emit(item: ItemT) -> Pause | None:
        items.append(item)
        arrived.set()
        taken.clear()
        return taken.wait if len(items) > 1 else None

    running = asyncio.ensure_future(run(emit))
    running.add_done_callback(lambda _: arrived.set())
    try:
        while True:
            while items:
                yield items.popleft()
                if not items:
                    taken.set()
            if running.done():
                running.result()
                return
            arrived.clear()
            await arrived.wait()
    finally:
        running.cancel()
        await asyncio.wait([running])
