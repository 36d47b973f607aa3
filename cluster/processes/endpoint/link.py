"""Calls in both directions over one stream socket between a server and an edge process of it.

A frame is a length of 4 bytes and a MessagePack array: the number of the call, the name of the function
(empty in an answer), and the argument or answer in MessagePack.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from inspect import isawaitable
from itertools import count
from typing import Any, Self, TypeVar

from tidemill.cluster.rpc.codec import decode, encode
from tidemill.workers.messages import Unserved

ANSWER_S_MAX = 5.0
LENGTH_BYTES = 4
ENDED = "the other process has ended"

AnswerT = TypeVar("AnswerT")

Functions = Mapping[str, Callable[[Any], object]]
"""By name. Each gets the argument of a call, and returns the answer or awaits it."""


class Link:
    """One end. The other end may call `functions`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, functions: Functions
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._functions = functions
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._running: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, end: socket.socket, functions: Functions) -> Self:
        """Return the link over one end of a pair of sockets, which it closes."""
        return cls(*await asyncio.open_unix_connection(sock=end), functions)

    async def run(self) -> None:
        """Answer calls until the other end is closed."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES))
                number, name, body = decode(tuple[int, str, bytes], await self._reader.readexactly(length))
                if name:
                    task = asyncio.create_task(self._answer(number, name, body))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)
                elif (waiting := self._waiting.get(number)) is not None and not waiting.done():
                    waiting.set_result(body)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(Unserved(ENDED))
            for task in self._running:
                task.cancel()
            self._writer.close()

    async def call(self, name: str, kind: type[AnswerT], argument: object = None) -> AnswerT:
        """Call a function of the other end and return its answer, which is of this kind. Raises Unserved."""
        if self._writer.is_closing():
            raise Unserved(ENDED)
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(number, name, argument)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return decode(kind, await waiting)
        except TimeoutError:
            raise Unserved(f"the other process does not answer {name}") from None
        finally:
            del self._waiting[number]

    async def _answer(self, number: int, name: str, body: bytes) -> None:
        answer = self._functions[name](decode(object, body))
        self._send(number, "", await answer if isawaitable(answer) else answer)

    def _send(self, number: int, name: str, content: object) -> None:
        if not self._writer.is_closing():
            frame = encode((number, name, encode(content)))
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES) + frame)
