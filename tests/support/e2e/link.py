"""A proxy of TCP that resets connections on demand, so that they break between two running processes."""

import asyncio
import socket
import struct
import threading
from contextlib import suppress

from tests.support.sockets import Connection

CHUNK_BYTES = 64 << 10


class Link:
    """Proxies on a thread of their own. As many connections break as `resets` has, each at its next bytes."""

    def __init__(self) -> None:
        self.resets = self.num_resets = 0  # to come, and those that happened
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._connections = set[asyncio.Task[None] | None]()  # asyncio forgets a task whose client is lost
        threading.Thread(target=self._loop.run_forever, name="link", daemon=True).start()

    async def to(self, address: str) -> str:
        """Return where a new proxy to `address` (HOST:PORT) listens."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._listen(address), self._loop))

    async def _listen(self, address: str) -> str:
        there, _, port = address.rpartition(":")

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                onwards = await asyncio.open_connection(there, int(port))
            except OSError:
                _reset(writer)
            else:
                await self._carry((reader, writer), onwards)

        self._servers.append(server := await asyncio.start_server(connected, "127.0.0.1", 0))
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _carry(self, near: Connection, far: Connection) -> None:
        """Carry bytes until both directions have ended, or one was reset."""
        self._connections.add(task := asyncio.current_task())
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._one_way(near[0], far[1]))
                ways.create_task(self._one_way(far[0], near[1]))
        except* OSError:
            self.num_resets += 1
            _reset(near[1])
            _reset(far[1])
        finally:
            near[1].close()
            far[1].close()
            self._connections.discard(task)

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.resets:
                self.resets -= 1
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Reset the connection, so that the other end does not see an ordinary end."""
    with suppress(OSError):
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
