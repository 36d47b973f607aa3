"""Bounds the frames of HTTP/2 (RFC 9113) in front of the gRPC library, which parses headers without end.

client --> TCP --> TLS, if there is a certificate --> FrameBounds --> Unix socket --> gRPC library

Only the 9-byte heads of frames are read. Bytes to clients are not looked at.
"""

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from itertools import count
from typing import cast
from urllib.parse import unquote

import grpc.aio

from tidemill.cluster.edge.requests.security import Tls, tls_context
from tidemill.cluster.listener import HANDSHAKES_MAX, Handshakes, InFlightLimit, Listener
from tidemill.cluster.settings import authority
from tidemill.kvstore.errors import TidemillError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
ALPN = "h2"
DATA, HEADERS, WINDOW_UPDATE, CONTINUATION = 0, 1, 8, 9
END_STREAM, END_HEADERS = 1, 4

BLOCK_BYTES_MAX = 32 << 10
BLOCK_FRAMES_MAX = 16
"""The headers of a call, with their CONTINUATION frames. The library refuses 16 KiB of decoded metadata."""

FRAMES_BURST = 2048
FRAMES_PER_S = 1024
"""Frames of a connection, except data and windows. The burst lets 1,024 calls begin and end."""

WINDOWS_BURST = 2048
WINDOW_BYTES = 8
"""Window updates of a connection: as many, and one more for each of these bytes that the library sent.
An honest client sends at most two for a frame of data, which has more than 16 bytes."""

CALLS_BURST = 64
CALLS_PER_S = 1000
"""Calls of one client on all its connections, the later ones of which wait: a call takes some 0.4 ms of the
event loop before its first message."""

BACKLOG = 2048
"""Connections that wait for the event loop, as uvicorn has it."""

CLOSE_S_MAX = 10.0
"""The time in which a client takes the last bytes of a connection."""

OPEN_S_MAX = 10.0
"""The time from the start of a connection until the library has taken it."""

FULL_PAUSE_S = 0.01
"""The pause of a connection while those that the library has not accepted yet are at their limit."""


class Unbounded(TidemillError):
    """A client sends more frames than it may."""


class FrameBounds:
    """The bounds of one connection. The frames may be split anywhere."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._skip = len(PREFACE)
        self._head = b""
        self._block_bytes = 0
        self._block_frames = 0
        self._left = float(FRAMES_BURST)
        self._windows_left = WINDOWS_BURST * WINDOW_BYTES
        self._at_s = clock()

    def count_sent(self, num_bytes: int) -> None:
        """Let the client acknowledge what the library sends."""
        self._windows_left += num_bytes

    def admit(self, data: bytes, at: int) -> tuple[int, bool]:
        """Return the end of the bytes from `at` on that may be forwarded, and whether a call begins there.

        A call begins behind the head of its first frame. Raises Unbounded.
        """
        now_s = self._clock()
        self._left = min(self._left + (now_s - self._at_s) * FRAMES_PER_S, FRAMES_BURST)
        self._at_s = now_s
        while True:
            skipped = min(self._skip, len(data) - at)
            self._skip -= skipped
            at += skipped
            part = data[at : at + HEAD_BYTES - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) < HEAD_BYTES:
                return at, False
            self._skip = int.from_bytes(self._head[:3], "big")
            kind, flags = self._head[3:5]
            self._head = b""
            self._count_frame(kind, flags, self._skip)
            if kind == HEADERS:
                return at, True

    def _count_frame(self, kind: int, flags: int, num_bytes: int) -> None:
        if kind in (HEADERS, CONTINUATION):
            self._block_bytes += num_bytes
            self._block_frames += 1
            if self._block_bytes > BLOCK_BYTES_MAX or self._block_frames > BLOCK_FRAMES_MAX:
                raise Unbounded
            if flags & END_HEADERS:
                self._block_bytes = self._block_frames = 0
        if kind == WINDOW_UPDATE:
            self._windows_left -= WINDOW_BYTES
        elif kind != DATA or not (num_bytes > 0 or flags & END_STREAM):
            self._left -= 1
        if self._left < 0 or self._windows_left < 0:
            raise Unbounded


class Side(asyncio.Protocol):
    """One end of a forwarded connection. What it receives is written to the other end."""

    transport = cast("asyncio.Transport", None)  # until it is open
    other: "Side | None" = None  # the same
    is_full = False  # what is written waits for the peer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        self.is_full = True
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        self.is_full = False
        if self.other is not None:
            self.other.read_on()

    def read_on(self) -> None:
        """Read again, unless the other end still takes nothing."""
        if not self.transport.is_closing() and self.other is not None and not self.other.is_full:
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio names it
        if self.other is not None and not self.other.transport.is_closing():
            self.other.transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S_MAX, self.other.transport.abort)


class _ClientSide(Side):
    """The end of a client: bounded, and counted for its address. The library gets it with its preface."""

    place: str | None = None  # which the listener has taken

    def __init__(self, gate: "FrameGate") -> None:
        self._gate = gate
        self._loop = asyncio.get_running_loop()
        self._bounds = FrameBounds(self._loop.time)
        self._opening: asyncio.Task[None] | None = None
        self._due: asyncio.TimerHandle | None = None
        self._waiting = b""
        self._next_call: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._due = self._loop.call_later(OPEN_S_MAX, self.transport.abort)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != ALPN:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._waiting += data
        if self.other is None:
            self._await_preface()
        elif self._next_call is None:
            self._forward()

    def _await_preface(self) -> None:
        if not self._waiting.startswith(PREFACE[: len(self._waiting)]):
            self.transport.abort()
        elif self._opening is None and len(self._waiting) >= len(PREFACE):
            self.transport.pause_reading()
            self._opening = self._loop.create_task(self._open())

    def read_on(self) -> None:
        if self._next_call is None:
            super().read_on()

    def _forward(self) -> None:
        """Forward what waits, up to the first call that has to wait."""
        self._next_call = None
        assert self.other is not None
        library, data, end, pause_s = self.other.transport, self._waiting, 0, 0.0
        try:
            while end < len(data) and pause_s == 0:
                end, begins_call = self._bounds.admit(data, end)
                if begins_call:
                    pause_s = self._gate.begin_call(self.place or "")
        except Unbounded:
            self.transport.abort()
            library.abort()
            return
        library.write(data[:end])
        self._waiting = data[end:]
        if pause_s > 0:
            self.transport.pause_reading()
            self._next_call = self._loop.call_later(pause_s, self._forward)
        else:
            self.read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._opening is not None:
            self._opening.cancel()
        for timer in (self._due, self._next_call):
            if timer is not None:
                timer.cancel()
        if self.place is not None:
            self._gate.places.give(1, self.place)
            self.place = None

    async def _open(self) -> None:
        """Connect to the library, and read from the client from then on."""
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)  # noqa: FBT003 - its only argument
        side = _LibrarySide(self, self._bounds)
        try:
            await self._gate.connect(inner, self.place or "")
            await self._loop.create_unix_connection(lambda: side, sock=inner)
        except (OSError, asyncio.CancelledError):
            inner.close()
            self.transport.abort()
            return
        if self._due is not None:
            self._due.cancel()
        self.other = side
        self._forward()


class _LibrarySide(Side):
    """The end of the library, whose bytes the client may acknowledge."""

    def __init__(self, client: Side, bounds: FrameBounds) -> None:
        self.other = client
        self._bounds = bounds

    def data_received(self, data: bytes) -> None:
        self._bounds.count_sent(len(data))
        super().data_received(data)


class FrameGate:
    """Listens for clients, and forwards what is within the bounds to a server on a Unix socket."""

    def __init__(self, connections_max: int, tls: Tls | None) -> None:
        """Raises OSError when the files of `tls` cannot be read."""
        self.places = InFlightLimit(connections_max, "connections")
        self._tls = tls_context(tls)
        if self._tls is not None:
            self._tls.set_alpn_protocols([ALPN])
        self._name = secrets.token_hex(8)
        self._numbers = count()
        self._calls_s: dict[str, float] = {}  # by client: the time at which its calls are within CALLS_PER_S
        self._library = -1
        self._socket: socket.socket | None = None
        self._listener: Listener | None = None

    def bind(self, server: grpc.aio.Server) -> None:
        """Have the server listen on a socket to which only this process can connect. Raises OSError.

        Its name is gone afterwards, and with it the way for others to skip TLS and the bounds.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/grpc"
            try:
                server.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:  # gRPC raises it for every reason
                raise OSError(f"{path} cannot be bound: {error}") from error
            self._library = os.open(path, os.O_PATH)

    async def connect(self, inner: socket.socket, client: str) -> None:
        """Connect to the server, which sees the client in the name of this end. Raises OSError."""
        inner.bind(f"\0tidemill/{self._name}/{next(self._numbers)}/{client}")
        while True:
            try:
                inner.connect(f"/proc/self/fd/{self._library}")
            except BlockingIOError:
                await asyncio.sleep(FULL_PAUSE_S)
            else:
                return

    def begin_call(self, client: str) -> float:
        """Return the seconds that a call has to wait."""
        now_s = asyncio.get_running_loop().time()
        if len(self._calls_s) > CALLS_PER_S:
            self._calls_s = {client: at_s for client, at_s in self._calls_s.items() if at_s > now_s}
        at_s = max(self._calls_s.get(client, 0.0), now_s) + 1 / CALLS_PER_S
        self._calls_s[client] = at_s
        return max(0.0, at_s - now_s - CALLS_BURST / CALLS_PER_S)

    def listen(self, host: str, port: int, listener: socket.socket | None = None) -> str:
        """Accept from `listener`, or else listen; return the address. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = listener or socket.create_server((host, port), family=family, backlog=BACKLOG)
        handshakes = Handshakes(HANDSHAKES_MAX)
        self._listener = Listener(self._socket, self._tls, lambda: _ClientSide(self), self.places, handshakes)
        bound = self._socket.getsockname()[1]
        return authority(host, bound)

    async def close(self) -> None:
        """Accept no more."""
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        if self._socket is not None:
            self._socket.close()
        if self._library >= 0:
            os.close(self._library)
            self._library = -1


def client_at(peer: str) -> str:
    """Return the client behind a peer of the library, like unix-abstract:tidemill/5f1c/7/127.0.0.1."""
    return unquote(peer).split("/", 3)[-1]
