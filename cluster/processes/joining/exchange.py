"""One exchange of joining over TLS: a request and its answer, each a length of 4 bytes and MessagePack."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace

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

CONNECTIONS_MAX = 64

log = logging.getLogger(__name__)


class JoinServer:
    """Answers edges that have no certificate yet, or renew theirs. Strangers get the certificates of the
    authorities, which are public, and nothing else."""

    def __init__(self, join: Callable[[JoinRequest], Awaitable[JoinAnswer]], tls: MutualTls) -> None:
        """`join` raises Unserved."""
        self._join = join
        self._tls = tls
        self._places = asyncio.Semaphore(CONNECTIONS_MAX)
        self._server: asyncio.Server | None = None
        self.address = ""

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address as host:port. Raises OSError."""
        context = self._tls.server()
        context.verify_mode = ssl.CERT_OPTIONAL
        self._server = await asyncio.start_server(
            self._answer, host, port, ssl=context, ssl_handshake_timeout=EXCHANGE_S_MAX, limit=FRAME_BYTES_MAX
        )
        bound = f"[{host}]" if ":" in host else host
        self.address = f"{bound}:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._places.locked():
                return
            async with self._places, asyncio.timeout(EXCHANGE_S_MAX):
                request = decode(JoinRequest, await _read(reader))
                if not request.request:
                    answer = JoinAnswer(ca=await asyncio.to_thread(read_pem, self._tls.ca))
                else:
                    answer = await self._join(replace(request, serial=_serial(writer)))
                _write(writer, encode(answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, Malformed, TimeoutError, Unserved, OSError) as error:
            log.info("an edge could not join: %s", error)
        finally:
            writer.close()


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
