"""The guard of a gRPC server with mutual TLS: it refuses revoked certificates."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

if TYPE_CHECKING:  # generic only in the type stubs
    Context = grpc.aio.ServicerContext[bytes, bytes]
    Handler = grpc.RpcMethodHandler[bytes, bytes]

PEERS_MAX = 4096

REVOKED = "the certificate of this process was revoked"


@dataclass(frozen=True, slots=True)
class Peer:
    """A caller. Only a client's certificate, as an edge gets one by a token, makes an edge of it."""

    serial: str  # hexadecimal digits
    is_edge: bool


class Guard:
    """The revoked certificates that a server knows, by serial. It belongs to one asyncio loop."""

    def __init__(self, not_for_edges: Collection[str] = ()) -> None:
        """Refuse callers that are edges the methods of these names."""
        self.revoked: frozenset[str] = frozenset()
        self._not_for_edges = not_for_edges
        self._peers: dict[bytes, Peer] = {}  # by certificate
        self._open = defaultdict[str, set[asyncio.Future[None]]](set)  # the streams, by serial

    def revoke(self, serials: Collection[str]) -> None:
        """Refuse these certificates, too, and end their streams."""
        new = self.revoked.union(serials) - self.revoked
        self.revoked |= new
        for serial in new:
            for stream in self._open.get(serial, ()):
                stream.cancel()

    def guarded(self, name: str, method: "Handler") -> "Handler":
        call: Any = method.stream_stream or method.unary_unary
        if method.stream_stream:
            return grpc.stream_stream_rpc_method_handler(self._stream(name, call))
        return grpc.unary_unary_rpc_method_handler(self._unary(name, call))

    def _unary(
        self, name: str, method: "Callable[[bytes, Context], Awaitable[bytes]]"
    ) -> "Callable[[bytes, Context], Awaitable[bytes]]":
        async def call(data: bytes, context: "Context") -> bytes:
            serial = await self._admit(name, context)
            answer = await method(data, context)
            if serial in self.revoked:  # meanwhile: some methods wait
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, REVOKED)
            return answer

        return call

    def _stream(
        self, name: str, method: "Callable[[AsyncIterator[bytes], Context], Awaitable[None]]"
    ) -> "Callable[[AsyncIterator[bytes], Context], Awaitable[None]]":
        async def call(frames: AsyncIterator[bytes], context: "Context") -> None:
            serial = await self._admit(name, context)
            stream = asyncio.ensure_future(method(frames, context))
            self._open[serial].add(stream)
            try:
                await stream
            except asyncio.CancelledError:
                if serial in self.revoked:
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED, REVOKED)
                raise
            finally:
                self._open[serial].discard(stream)
                if not self._open[serial]:
                    del self._open[serial]

        return call

    async def _admit(self, name: str, context: "Context") -> str:
        """Return the serial of the caller's certificate, or refuse the call."""
        peer = self._peer(context)
        if peer.serial in self.revoked:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, REVOKED)
        if peer.is_edge and name in self._not_for_edges:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED,
                "an edge that joined by a token may not do this: ask the server",
            )
        return peer.serial

    def _peer(self, context: "Context") -> Peer:
        facts = cast("dict[str, list[bytes]]", context.auth_context())
        [pem] = facts["x509_pem_cert"]
        peer = self._peers.get(pem)
        if peer is None:
            if len(self._peers) >= PEERS_MAX:
                self._peers.clear()
            peer = self._peers[pem] = peer_of(pem)
        return peer


def peer_of(pem: bytes) -> Peer:
    known = x509.load_pem_x509_certificate(pem)
    try:
        usage = known.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        is_edge = False
    else:
        is_edge = ExtendedKeyUsageOID.SERVER_AUTH not in usage
    return Peer(f"{known.serial_number:x}", is_edge)
