"""The items of one call on a worker that its reader has not taken yet."""

import asyncio
from collections import deque

from tidemill.cluster.messages import TokenSink
from tidemill.cluster.rpc.codec import Failure, Trial
from tidemill.workers.messages import Delta, Produced


class Inbox:
    """A queue with one reader. A plain token may go to `sink` instead, past the reader."""

    def __init__(self, sink: TokenSink | None = None) -> None:
        self._sink = sink
        self._items = deque[Delta | Produced | Trial | Failure]()
        self._reader: asyncio.Future[None] | None = None  # it waits for an item

    def __len__(self) -> int:
        return len(self._items)

    def take(self, token: int) -> bool:
        """Return whether the sink took this token. It is asked only while the reader waits, which has passed
        on all earlier items by then. If it raises, the reader gets its error."""
        if self._sink is None or self._reader is None or self._reader.done():
            return False
        try:
            return self._sink(token)
        except Exception as error:  # noqa: BLE001  of one call: other calls share the frame
            self._reader.set_exception(error)
            return True

    def put(self, item: Delta | Produced | Trial | Failure) -> None:
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> Delta | Produced:
        """Return the next item that is no news of a trial. Raises the failure of the call."""
        while True:
            while not self._items:
                self._reader = asyncio.get_running_loop().create_future()
                try:
                    await self._reader
                finally:
                    self._reader = None
            match self._items.popleft():
                case Trial():
                    pass
                case Delta() | Produced() as item:
                    return item
                case failure:
                    raise failure
