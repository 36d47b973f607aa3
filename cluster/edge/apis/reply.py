"""The reply to one request, which is the same work for every API.

body --API--> Reply --answer--> increments --writer--> messages --Outgoing--> client
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from tidemill.cluster.edge.requests.answers import Increment
from tidemill.cluster.edge.requests.api_keys import ApiKey
from tidemill.cluster.edge.requests.context import EdgeContext
from tidemill.cluster.edge.requests.errors import error_of
from tidemill.cluster.edge.requests.intake import PreparedRequest
from tidemill.cluster.edge.requests.models import EdgeModel
from tidemill.cluster.edge.requests.recent_requests import RequestIdentity
from tidemill.cluster.edge.requests.usage import UsageCounter
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.inbox import Pause


class Writer(ABC):
    """The form of one reply: functions from its parts to messages. A reply that does not stream is the one
    message that `close` returns. `tally` has each increment before it is written."""

    def __init__(self, tally: UsageCounter) -> None:
        self.tally = tally

    def opening(self) -> Iterable[bytes]:
        """Return what precedes the messages of the first increment, which `tally` has."""
        return ()

    @abstractmethod
    def grow(self, increment: Increment) -> Iterable[bytes]:
        """Return the messages of an increment."""

    def error(self, body: Mapping[str, object]) -> Iterable[bytes]:
        """Return the end of a reply that has begun, or nothing: then the transport ends it."""
        del body
        return ()

    @abstractmethod
    async def close(self) -> Iterable[bytes]:
        """Return the end of a complete reply, with its usage."""


class Whole(Writer):
    """Writes a reply that does not stream: `write` returns it from the increments of each choice."""

    def __init__(
        self, tally: UsageCounter, choices: int, write: Callable[[list[list[Increment]]], Awaitable[bytes]]
    ) -> None:
        super().__init__(tally)
        self._choices: list[list[Increment]] = [[] for _ in range(choices)]
        self._write = write

    def grow(self, increment: Increment) -> Iterable[bytes]:
        self._choices[increment.choice].append(increment)
        return ()

    async def close(self) -> Iterable[bytes]:
        return (await self._write(self._choices),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply that is about to be made. `kind` is the name of its API in lists of requests."""

    model: EdgeModel
    job: PreparedRequest
    kind: str
    id: str
    writer: Writer
    streams: bool = False


class Outgoing:
    """The messages of one reply that its client has not taken, in order."""

    def __init__(
        self, send: Callable[[bytes], Awaitable[object]], write: Callable[[bytes], bool] | None = None
    ) -> None:
        """`write` sends a message immediately, or returns False, and then `send` waits for the client."""
        self.begun = False
        self._send = send
        self._write = write
        self._waiting = deque[bytes]()
        self._flushing = asyncio.Lock()

    def put(self, messages: Iterable[bytes]) -> Pause | None:
        for message in messages:
            self.begun = True
            if self._waiting or self._write is None or not self._write(message):
                self._waiting.append(message)
        return self.flush if self._waiting else None

    async def flush(self) -> None:
        """Send what waits."""
        async with self._flushing:
            while self._waiting:
                await self._send(self._waiting[0])
                self._waiting.popleft()


async def answer(
    edge: EdgeContext, reply: Reply, out: Outgoing, *, request_id: str, client: str, key: ApiKey | None
) -> None:
    """Answer a request of a client. After its first message an error is a message, too, because the status
    has been sent. Raises the error otherwise, and also if it is a bug."""
    identity = RequestIdentity(
        request_id=request_id,
        reply_id=reply.id,
        model=reply.model.name,
        kind=reply.kind,
        client=client,
        key=key,
    )
    writer, tally = reply.writer, reply.writer.tally

    def take(increment: Increment) -> Pause | None:
        tally.record(increment)
        opening = () if out.begun else writer.opening()
        return out.put((*opening, *writer.grow(increment)))

    try:
        await edge.answer(reply.model, reply.job, identity, take)
        last = await writer.close()
    except Exception as error:
        status, body = error_of(error)
        failed = tuple(writer.error(body)) if out.begun else ()
        if not failed:
            raise
        edge.metrics.count_error(status)
        out.put(failed)
        await out.flush()
        if not isinstance(error, TidemillError):
            raise
        return
    out.put(last)
    await out.flush()
