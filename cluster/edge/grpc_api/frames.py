"""Bounds the frames of HTTP/2 (RFC 9113) in front of the gRPC library, which parses headers without end.

client --> TCP --> FrameBounds --> loopback --> gRPC library

Only the 9-byte heads of frames are read. Bytes to clients are not looked at.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

from tidemill.cluster.edge.requests.limits import InFlightLimit, client_of
from tidemill.workers.messages import Overloaded

LOOPBACK = "127.0.0.1"
PREFACE_BYTES = 24
HEAD_BYTES = 9
DATA, HEADERS, WINDOW_UPDATE, CONTINUATION = 0, 1, 8, 9
END_STREAM, END_HEADERS = 1, 4

BLOCK_BYTES_MAX = 32 << 10
BLOCK_FRAMES_MAX = 16
"""The headers of a call, with their CONTINUATION frames. The library refuses 16 KiB of decoded metadata."""

FRAMES_BURST = 2048
FRAMES_PER_S = 1024
"""Frames of a connection, except data and windows. The burst lets 1,024 calls begin and end."""

BACKLOG = 2048
"""Connections that wait for the event loop, as uvicorn has it."""

CLOSE_S_MAX = 10.0
"""The time in which a client takes the last bytes of a connection."""


class FrameBounds:
    """The bounds of one connection. The frames may be split anywhere."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._skip = PREFACE_BYTES
        self._head = b""
        self._block_bytes = 0
        self._block_frames = 0
        self._left = float(FRAMES_BURST)
        self._at_s = clock()

    def admit(self, data: bytes) -> bool:
        """Return whether these bytes are within the bounds, after all before them were."""
        now_s = self._clock()
        self._left = min(self._left + (now_s - self._at_s) * FRAMES_PER_S, FRAMES_BURST)
        self._at_s = now_s
        at = 0
        while True:
            skipped = min(self._skip, len(data) - at)
            self._skip -= skipped
            at += skipped
            part = data[at : at + HEAD_BYTES - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) < HEAD_BYTES:
                return True
            self._skip = int.from_bytes(self._head[:3], "big")
            kind, flags = self._head[3:5]
            self._head = b""
            if not self._admit_frame(kind, flags, self._skip):
                return False

    def _admit_frame(self, kind: int, flags: int, num_bytes: int) -> bool:
        if kind in (HEADERS, CONTINUATION):
            self._block_bytes += num_bytes
            self._block_frames += 1
            if self._block_bytes > BLOCK_BYTES_MAX or self._block_frames > BLOCK_FRAMES_MAX:
                return False
            if flags & END_HEADERS:
                self._block_bytes = self._block_frames = 0
        is_data = kind == DATA and (num_bytes > 0 or flags & END_STREAM)
        if not is_data and kind != WINDOW_UPDATE:
            self._left -= 1
        return self._left >= 0


class Side(asyncio.Protocol):
    """One end of a forwarded connection. What it receives is written to the other end."""

    transport: asyncio.Transport
    other: "Side | None" = None  # once it is open

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio names it
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S_MAX, self.other.transport.abort)


class _ClientSide(Side):
    """The end of a client: bounded, and counted for its address."""

    def __init__(self, gate: "FrameGate") -> None:
        self._gate = gate
        self._bounds = FrameBounds(asyncio.get_running_loop().time)
        self._address: str | None = None
        self._opening: asyncio.Task[None] | None = None
        self._early = b""  # uvloop reads once before it pauses

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        address = transport.get_extra_info("peername")[0]
        try:
            self._gate.places.take(1, client_of(None, address))
        except Overloaded:
            self.transport.abort()
            return
        self._address = address
        self.transport.pause_reading()
        self._opening = asyncio.get_running_loop().create_task(self._open(address))

    def data_received(self, data: bytes) -> None:
        if not self._bounds.admit(data):
            self.transport.abort()
            if self.other is not None:
                self.other.transport.abort()
        elif self.other is None:
            self._early += data
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._opening is not None:
            self._opening.cancel()
        if self._address is not None:
            self._gate.places.give(1, client_of(None, self._address))

    async def _open(self, address: str) -> None:
        """Connect to the library, and read from the client from then on."""
        loop = asyncio.get_running_loop()
        inner = socket.socket()
        inner.setblocking(False)  # noqa: FBT003 - its only argument
        inner.bind((LOOPBACK, 0))
        port = inner.getsockname()[1]
        self._gate.addresses[port] = address
        try:
            await loop.sock_connect(inner, (LOOPBACK, self._gate.port))
            side = _LibrarySide(self._gate, port, self)
            await loop.create_connection(lambda: side, sock=inner)
        except (OSError, asyncio.CancelledError):
            inner.close()
            self._gate.addresses.pop(port, None)
            self.transport.abort()
            return
        self.other = side
        side.transport.write(self._early)
        self._early = b""
        self.transport.resume_reading()


class _LibrarySide(Side):
    """The end of the library, which knows a client by the port of this end."""

    def __init__(self, gate: "FrameGate", port: int, client: Side) -> None:
        """`client` gets what the library sends first, its settings."""
        self.other = client
        self._gate = gate
        self._port = port

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gate.addresses.pop(self._port, None)


class FrameGate:
    """Listens for clients, and forwards what is within the bounds to a server on loopback."""

    def __init__(self, connections_max: int) -> None:
        self.places = InFlightLimit(connections_max, "connections")
        self.addresses: dict[int, str] = {}  # of clients, by the port from which the gate connects
        self.port = 0  # of the server
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, inner_port: int) -> str:
        """Listen, and return the address. Raises OSError."""
        self.port = inner_port
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _ClientSide(self), host, port, backlog=BACKLOG
        )
        bound = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def close(self) -> None:
        """Accept no more."""
        if self._server is not None:
            self._server.close()

    def address(self, peer: str) -> str:
        """Return the address of the client behind a peer of the library, like ipv4:127.0.0.1:4711."""
        return self.addresses.get(int(peer.rpartition(":")[2]), "")
