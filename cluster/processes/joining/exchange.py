"""One exchange of joining over TLS: a request and its answer, each a length of 4 bytes and MessagePack."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

from tidemill.cluster.listener import Handshakes, InFlightLimit, Listener, client_of
from tidemill.cluster.messages import JoinAnswer, JoinRequest
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.processes.joining.authority import serial_of
from tidemill.cluster.rpc.channels import read_pem
from tidemill.cluster.rpc.codec import Malformed, decode, encode
from tidemill.workers.messages import Unserved

LENGTH_BYTES = 4
FRAME_BYTES_MAX = 64 << 10
EXCHANGE_S_MAX = 15.0
"""The time of an exchange with its handshake, longer than a router waits for the supervisor."""

CONNECTIONS_MAX = 256
EXCHANGES_MAX = 64
"""The most exchanges in progress, which addresses share, and as many for edges with a certificate."""

JOIN_HANDSHAKES_MAX = 32

log = logging.getLogger(__name__)


class JoinServer:
    """Answers edges that have no certificate yet, or renew theirs. Strangers get the certificates of the
    authorities, which are public, and nothing else."""

    def __init__(self, join: Callable[[JoinRequest], Awaitable[JoinAnswer]], tls: MutualTls) -> None:
        """`join` raises Unserved."""
        self._join = join
        self._tls = tls
        self.places = InFlightLimit(CONNECTIONS_MAX, "connections")
        self._exchanges = InFlightLimit(EXCHANGES_MAX, "exchanges")
        self._renewals = InFlightLimit(EXCHANGES_MAX, "renewals")
        self._listener: Listener | None = None
        self._socket: socket.socket | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address as host:port. Raises OSError."""
        context = self._tls.server()
        context.verify_mode = ssl.CERT_OPTIONAL
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=CONNECTIONS_MAX)
        handshakes = Handshakes(JOIN_HANDSHAKES_MAX)
        self._listener = Listener(self._socket, context, lambda: _Joining(self), self.places, handshakes)
        bound = f"[{host}]" if ":" in host else host
        self.address = f"{bound}:{self._socket.getsockname()[1]}"
        return self.address

    async def stop(self) -> None:
        if self._listener is not None and self._socket is not None:
            self._listener.close()
            await self._listener.wait_closed()
            self._socket.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a request, unless too many are in progress: those of strangers leave room for renewals."""
        client = client_of(None, writer.get_extra_info("peername")[0])
        limit = self._renewals if _serial(writer) else self._exchanges
        try:
            with limit.holding(1, client):
                await self._exchange(reader, writer)
        except (asyncio.IncompleteReadError, Malformed, TimeoutError, Unserved, OSError) as error:
            log.info("an edge could not join: %s", error)
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(EXCHANGE_S_MAX):
            request = decode(JoinRequest, await _read(reader))
            if not request.request:
                answer = JoinAnswer(ca=await asyncio.to_thread(read_pem, self._tls.ca))
            else:
                answer = await self._join(replace(request, serial=_serial(writer)))
            _write(writer, encode(answer))
            await writer.drain()


class _Joining(asyncio.StreamReaderProtocol):
    """One connection, which is counted until it is lost."""

    def __init__(self, server: JoinServer) -> None:
        super().__init__(asyncio.StreamReader(limit=FRAME_BYTES_MAX), server.answer)
        self._server = server
        self.place: str | None = None
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.place is not None:
            self._server.places.give(1, self.place)


def _serial(writer: asyncio.StreamWriter) -> str:
    """Return the serial of the caller's certificate, which TLS has verified; empty without one."""
    connection: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    certificate = None if connection is None else connection.getpeercert(binary_form=True)
    return "" if certificate is None else serial_of(certificate)


async def ask(address: str, context: ssl.SSLContext, request: JoinRequest) -> JoinAnswer:
    """Return the answer of the server at host:port. Raises OSError, which ssl.SSLError is, TimeoutError and
    Unserved."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(EXCHANGE_S_MAX):
        reader, writer = await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=context, server_hostname=CLUSTER_NAME
        )
        try:
            _write(writer, encode(request))
            return decode(JoinAnswer, await _read(reader))
        except (asyncio.IncompleteReadError, Malformed) as error:
            raise Unserved(f"{address} ends the connection without an answer") from error
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> bytes:
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    if length > FRAME_BYTES_MAX:
        raise Malformed(f"a message of {length} bytes, more than {FRAME_BYTES_MAX}")
    return await reader.readexactly(length)


def _write(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(len(body).to_bytes(LENGTH_BYTES) + body)
