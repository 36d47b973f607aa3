"""A bad line between two hosts: proxies of TCP that are late, stall and reset connections."""

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random

CHUNK_BYTES = 64 << 10
AT_ONCE_MAX = 256
"""Chunks on the line, in each direction of a connection."""


@dataclass(frozen=True, slots=True)
class Weather:
    """`delay_s` is one way; the shares are of the chunks that are read from a socket."""

    delay_s: float = 0.0
    stall_share: float = 0.0
    stall_s: float = 0.4  # a lost packet, until it was sent again
    reset_share: float = 0.0


class Link:
    """All proxies that are made have the weather of the time, on a thread of their own."""

    def __init__(self, weather: Callable[[], Weather], rng: Random) -> None:
        self.num_resets = 0
        self._weather = weather
        self._rng = rng
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._proxies: dict[str, str] = {}
        self._connections = set[asyncio.Task[None] | None]()  # asyncio forgets a task whose client is lost
        threading.Thread(target=self._loop.run_forever, name="link", daemon=True).start()

    def to(self, address: str, host: str = "127.0.0.1") -> str:
        """Return where the proxy to `address` (HOST:PORT) listens on this host. Blocks: not for an event
        loop."""
        if address not in self._proxies:
            made = asyncio.run_coroutine_threadsafe(self._listen(address, host), self._loop)
            self._proxies[address] = made.result()
        return self._proxies[address]

    async def _listen(self, address: str, host: str) -> str:
        there, _, port = address.rpartition(":")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                onwards = await asyncio.open_connection(there, int(port))
            except OSError:
                _reset(writer)
                return
            connection = asyncio.current_task()
            self._connections.add(connection)
            try:
                await self._carry((reader, writer), onwards)
            except OSError:
                pass
            finally:
                self._connections.discard(connection)

        server = await asyncio.start_server(connected, host, 0)
        self._servers.append(server)
        return f"{host}:{server.sockets[0].getsockname()[1]}"

    async def _carry(
        self,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Carry bytes until both directions have ended, or one was reset."""
        ways = [
            asyncio.create_task(self._one_way(near[0], far[1])),
            asyncio.create_task(self._one_way(far[0], near[1])),
        ]
        try:
            await asyncio.gather(*ways)
            for writer in (near[1], far[1]):
                writer.close()
        except OSError:
            self.num_resets += 1
            for writer in (near[1], far[1]):
                _reset(writer)
        finally:
            for way in ways:
                way.cancel()

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises OSError when the connection is to be reset."""
        on_the_line = asyncio.Queue[tuple[float, bytes]](AT_ONCE_MAX)
        arriving = asyncio.create_task(self._arrive(on_the_line, writer))
        due_s = 0.0
        try:
            data = b"-"
            while data:
                data = await reader.read(CHUNK_BYTES)
                weather = self._weather()
                if self._rng.random() < weather.reset_share:
                    raise ConnectionResetError
                stall_s = weather.stall_s if self._rng.random() < weather.stall_share else 0.0
                due_s = max(due_s, self._loop.time() + weather.delay_s + stall_s)  # nothing overtakes
                await on_the_line.put((due_s, data))
            await arriving
        finally:
            arriving.cancel()

    async def _arrive(
        self, on_the_line: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due_s, data = await on_the_line.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset the connection, so that the other end does not see an ordinary end."""
    with suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
