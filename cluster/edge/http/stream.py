"""Replies last as long as somebody reads them: server-sent events, and the end of work nobody waits for."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

CLIENT_CLOSED_REQUEST = 499
"""Never sent: the client is gone."""

ENCODER = json.JSONEncoder(separators=(",", ":"))
"""`json.dumps` would make one for each event."""


def event(body: object, name: str | None = None) -> bytes:
    """One server-sent event."""
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {ENCODER.encode(body)}\n\n".encode()


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Result of `work`; None when the client went away first. `work` has ended, in any case, on return."""
    running = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        return running.result() if running.done() else None
    finally:
        running.cancel()
        gone.cancel()
        await asyncio.gather(running, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as the client takes them, and closes `events` whatever ends the reply.

    The headers wait for the first event: an error before it still becomes an ordinary error reply.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            body = await anext(events)
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            await send({"type": "http.response.body", "body": body, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
