"""The connections of a group whose ranks are on several nodes: addresses, TLS, and the loss of a node."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, Literal, Protocol, TypeAlias, TypeVar

SOCKET = "leader"

SILENCE_S, PROBES = 1, 3
"""A connection that is silent for SILENCE_S is probed as often; a node that does not answer is gone."""

UNREAD_MS_MAX = 4000
"""The time in milliseconds after which a node that acknowledges no data is gone."""

RECEIVE_BYTES = 1 << 16

_Result = TypeVar("_Result")


class Certificates(Protocol):
    """The certificates of the cluster's processes. The calls read them, and raise OSError."""

    @property
    def name(self) -> str:
        """The DNS name in each of them."""
        ...

    def client(self) -> ssl.SSLContext: ...

    def server(self) -> ssl.SSLContext: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network of one rank. Collectives use `interface`, or else that of the address `host`. They are
    neither encrypted nor authenticated, as gloo and NCCL have no way to do it."""

    host: str
    interface: str | None = None
    certificates: Certificates | None = None  # of the links; None: plain sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The place where ranks on several nodes meet: ports of the leader, and a secret of this start of the
    group."""

    host: str
    link: int
    store: int
    secret: bytes


Meeting: TypeAlias = Path | Ports
"""The place where ranks meet: on one machine a folder that is new and accessible to this user only."""


def listen(host: str) -> socket.socket:
    """Listen on a free port of one address. Raises OSError."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def end_with_node(connection: socket.socket) -> None:
    """Let a TCP connection end soon after the other node has vanished. A killed process ends its connections
    immediately."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, SILENCE_S),
        (socket.TCP_KEEPINTVL, SILENCE_S),
        (socket.TCP_KEEPCNT, PROBES),
        (socket.TCP_USER_TIMEOUT, UNREAD_MS_MAX),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


async def connect(
    meeting: Meeting, network: Network | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect a rank to its leader. Raises OSError."""
    if isinstance(meeting, Path):
        return await asyncio.open_unix_connection(meeting / SOCKET)
    assert network is not None
    certificates = network.certificates
    reader, writer = await asyncio.open_connection(
        meeting.host,
        meeting.link,
        ssl=None if certificates is None else certificates.client(),
        server_hostname=None if certificates is None else certificates.name,
    )
    end_with_node(writer.get_extra_info("socket"))
    return reader, writer


class TlsConnection(RawIOBase):
    """The leader's end of a TLS connection: one thread reads, others send. An ssl.SSLSocket is not made for
    that. The constructor blocks for the handshake, and raises OSError when the other end is refused."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__()
        self._plain = plain
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._lock = Lock()  # of the two buffers, never held while a socket waits
        self._sending = Lock()
        self._is_open = False
        self._with_input(self._tls.do_handshake)
        self._is_open = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:  # noqa: ANN401  a memoryview
        """Raises OSError, also at the end of the connection."""
        data = self._with_input(lambda: self._tls.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def sendall(self, data: bytes) -> None:
        """Raises OSError."""
        left = memoryview(data)
        with self._lock:
            while left:
                left = left[self._tls.write(left) :]
        self._flush()

    def makefile(self, _mode: Literal["rb"]) -> BinaryIO:
        """Return a buffered reader, as a socket does."""
        return BufferedReader(self)

    def shutdown(self, how: int) -> None:
        self._plain.shutdown(how)

    def close(self) -> None:
        self._plain.close()
        super().close()

    def _with_input(self, call: Callable[[], _Result]) -> _Result:
        """Return what `call` does, with as much input as it needs."""
        while True:
            try:
                with self._lock:
                    return call()
            except ssl.SSLWantReadError:
                pass
            finally:
                # Later a reader has nothing to send that cannot wait for the next frame.
                if not self._is_open:
                    self._flush()
            data = self._plain.recv(RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the other end has closed the connection")
            with self._lock:
                self._incoming.write(data)

    def _flush(self) -> None:
        """Send what is encrypted, in its order. Must not keep the thread that reads: the other end may read
        no more before its own data are taken."""
        with self._sending:
            with self._lock:
                data = self._outgoing.read()
            self._plain.sendall(data)
