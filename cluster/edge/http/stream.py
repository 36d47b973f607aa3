"""Replies that stream, and the end of work for clients that have disconnected."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.cluster.edge.apis.reply import Outgoing
from tidemill.cluster.edge.http.connection import body_writer_of

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status of a client that has disconnected; it is never sent."""

NOTICE_ITERATIONS = 4
"""The iterations of the event loop before work begins, in which a client that is gone already is noticed.
Of 1,000 clients that disconnect with their request none reaches a router."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if the client disconnected first. On return `work` has ended."""
    gone = asyncio.create_task(_disconnected(receive))
    tasks: list[asyncio.Task[Any]] = [gone]
    try:
        for _ in range(NOTICE_ITERATIONS):
            await asyncio.sleep(0)
        if gone.done():
            return None
        running = asyncio.create_task(work)
        tasks.append(running)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        if len(tasks) == 1:
            work.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends the messages that `answer` puts, as the client takes them, and cancels it whatever ends the
    reply.

    The headers wait for the first message, so an error before it is still an ordinary error reply.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Callable[[Outgoing], Awaitable[None]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_body(body: bytes, *, more: bool = True) -> None:
            nonlocal begun
            if not begun:
                begun = True
                await send(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def work() -> None:
            writer = body_writer_of(scope)
            await self._answer(Outgoing(send_body, None if writer is None else writer.write))
            await send_body(b"", more=False)

        await while_connected(receive, work())
