"""Router failover: which of several routers a client asks, and when it returns to the first.

Requests that any router can answer go to one until it is away, then to the next. All clients return to the
first when it is back, because each router knows its own placements earlier than those of the others
(decision 45).
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import grpc
import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.channels import cancellable, connection_broke, open_channel, unary
from tidemill.cluster.rpc.codec import encode
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import RequestError, Unserved, WorkerGone

FindRouter = Callable[[], Awaitable[str]]
"""Returns the current address of the router. Raises WorkerGone while it is away."""

PLAIN = "tidemill.Router"
ORDERS = "tidemill.Orders"
"""The gRPC services of a router."""

FIRST = 0

RETRY_S = 0.1
RETURN_S = 5.0
"""The period of the questions to an earlier router than the current one. When it has answered two of them, it
has a heartbeat of every worker."""

OUT_WAIT_S_MAX = 0.5

ANSWER_S_MAX = 1.0
"""The time that an answer may take beyond the time that the router was asked to wait."""


def always_at(address: str) -> FindRouter:
    async def find() -> str:
        return address

    return find


class RouterLinks:
    """The connections to several routers, of which one is current."""

    def __init__(self, routers: Sequence[FindRouter], tls: MutualTls | None) -> None:
        self._links = [_Link(find, tls) for find in routers]
        self._current = FIRST
        self._returning: asyncio.Task[None] | None = None

    async def call(
        self,
        name: str,
        body: Callable[[], bytes],
        wait_s_max: float,
        *,
        first: bool = False,
        service: str = PLAIN,
    ) -> bytes:
        """Call the current router, or the `first`, until there is an answer or the time is up; `body` builds
        the body of each attempt. Raises Unserved, and what the router refuses."""
        reason = "it does not answer"
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s_max + ANSWER_S_MAX):
                while True:
                    try:
                        return await self._ask(FIRST if first else self._current, f"{service}/{name}", body())
                    except WorkerGone as error:
                        reason = str(error)
                    await asyncio.sleep(RETRY_S)
        raise unanswered(wait_s_max, reason)

    async def ask(self, name: str, body: bytes) -> bytes:
        """Call the current router once. Raises what it refuses, and WorkerGone if it is away."""
        return await self._ask(self._current, f"{PLAIN}/{name}", body)

    async def _ask(self, index: int, method: str, body: bytes) -> bytes:
        """Call one router. If it is away, the next one is current then."""
        try:
            return await self._links[index].call(method, body)
        except grpc.aio.AioRpcError as error:
            _raise_refusal(error)
            reason = error.details() or error.code().name
        except (WorkerGone, OSError) as error:
            reason = str(error)
        if index == self._current:  # no concurrent call has moved on
            self._current = (index + 1) % len(self._links)
            if self._current != FIRST and self._returning is None:
                self._returning = asyncio.create_task(self._return())
        raise WorkerGone(reason)

    async def _return(self) -> None:
        """Make the earliest router that answers twice in turn the current one, until it is the first."""
        answered = set[int]()

        async def look() -> bool:
            nonlocal answered
            await asyncio.sleep(RETURN_S)
            before, earlier = answered, range(self._current)
            answered = {index for index in earlier if await self._answers(index)}
            self._current = min(before & answered, default=self._current)
            return self._current == FIRST

        try:
            await every(0, look, "return to the first router")
        finally:
            self._returning = None

    async def _answers(self, index: int) -> bool:
        with suppress(grpc.aio.AioRpcError, WorkerGone, OSError, TimeoutError):
            async with asyncio.timeout(OUT_WAIT_S_MAX):
                await self._links[index].call(f"{PLAIN}/Out", encode([]))
                return True
        return False

    async def close(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
        for link in self._links:
            await link.close()


def unanswered(wait_s_max: float, reason: str) -> Unserved:
    return Unserved(f"no answer from the router within {wait_s_max:g} s: {reason}")


class _Link:
    def __init__(self, find: FindRouter, tls: MutualTls | None) -> None:
        self._find = find
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._calls: Counter[grpc.aio.Channel] = Counter()  # in progress
        self._finding = asyncio.Lock()  # thousands may wait for a router that restarts

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _open(self) -> grpc.aio.Channel:
        async with self._finding:
            if self._channel is None:
                self._channel = open_channel(await self._find(), self._tls)
            return self._channel

    async def call(self, method: str, body: bytes) -> bytes:
        channel = await self._open()
        self._calls[channel] += 1
        try:
            with cancellable():
                return await unary(channel, method)(body)
        except grpc.aio.AioRpcError as error:
            if connection_broke(error) and self._channel is channel:
                self._channel = None
            raise
        finally:
            self._calls[channel] -= 1
            if self._channel is not channel and not self._calls[channel]:  # closing it cancels its calls
                del self._calls[channel]
                await channel.close()


def _raise_refusal(error: grpc.aio.AioRpcError) -> None:
    """Raise an error that the router means permanently: a retry would get the same."""
    details = error.details() or "the router refuses"
    match error.code():
        case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNAUTHENTICATED:
            raise Unserved(details) from None
        case grpc.StatusCode.PERMISSION_DENIED:
            raise RequestError(details, status=403) from None
        case _:
            pass
