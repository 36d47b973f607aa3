"""The clients of a router's catalogue: the server that publishes it, and the edges that read it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256

import grpc
import grpc.aio

from tidemill.cluster.mutual_tls import MutualTls
from tidemill.cluster.rpc.catalogue import Catalogue
from tidemill.cluster.rpc.channels import open_channel, unary
from tidemill.cluster.rpc.codec import Malformed, decode, encode
from tidemill.cluster.rpc.router_failover import FindRouter
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import Unserved, WorkerGone

PART_BYTES = 4 << 20
"""The bytes of a file that one message carries."""

CATALOGUE_WAIT_S = 5.0
"""The time for which a router holds a call until its catalogue changes."""

ANSWER_S_MAX = 3.0
FILE_S_MAX = 60.0


class Expelled(TidemillError):
    """The cluster has revoked our certificate."""


def version_of(data: bytes) -> bytes:
    """Return the version of an encoded catalogue, which differs whenever its content does."""
    return sha256(data).digest()


def _reason(error: Exception) -> object:
    return error.details() if isinstance(error, grpc.aio.AioRpcError) else error


class CatalogueWriter:
    """Publishes a catalogue to one router, whose address may change."""

    def __init__(self, find: FindRouter, tls: MutualTls | None) -> None:
        self._find = find
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self.address = ""  # the last that was found

    async def connect(self) -> str:
        """Return the router's address. Raises WorkerGone and OSError."""
        if self._channel is None:
            self.address = await self._find()
            self._channel = open_channel(self.address, self._tls)
        return self.address

    async def publish(self, data: bytes, files: Mapping[str, bytes]) -> None:
        """Give the router an encoded catalogue, and those of its files, by digest, that it lacks. Raises
        Unserved."""
        try:
            await self.connect()
            assert self._channel is not None
            publish = unary(self._channel, "tidemill.Router/Publish")
            missing = decode(list[str], await publish(data, timeout=ANSWER_S_MAX))
            put = unary(self._channel, "tidemill.Router/PutPart")
            for digest in missing:
                body = files[digest]
                for start in range(0, max(1, len(body)), PART_BYTES):
                    part = (digest, start, len(body), body[start : start + PART_BYTES])
                    await put(encode(part), timeout=ANSWER_S_MAX)
            if missing:
                await publish(data, timeout=ANSWER_S_MAX)
        except (grpc.aio.AioRpcError, WorkerGone, Malformed, KeyError, OSError) as error:
            await self.close()
            raise Unserved(f"the router does not take the catalogue: {_reason(error)}") from error

    async def close(self) -> None:
        """Close the connection; the next call opens another."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


class CatalogueReader:
    """Reads the catalogue of any of several routers: of one until it fails, then of the next."""

    def __init__(self, addresses: Sequence[str], tls: MutualTls | None) -> None:
        self._given = tuple(addresses)
        self._addresses = tuple(addresses)
        self._tls = tls
        self._at = 0
        self._channel: grpc.aio.Channel | None = None
        self._version = b""

    @property
    def address(self) -> str:
        """The address of the router that is asked next."""
        return self._addresses[self._at % len(self._addresses)]

    async def changed(self) -> Catalogue | None:
        """Return the catalogue once it differs from the last one, None when it has not changed for a while.
        Raises Unserved, and the next call asks the next router, and Expelled."""
        try:
            watch = unary(self._open(), "tidemill.Router/Catalogue")
            data = await watch(self._version, timeout=CATALOGUE_WAIT_S + ANSWER_S_MAX)
            if not data:
                if not self._version:
                    raise Unserved(f"the cluster of the router {self.address} is not ready")
                return None
            catalogue = decode(Catalogue, data)
        except (grpc.aio.AioRpcError, Malformed, OSError) as error:
            failed = self.address
            await self._next()
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise Expelled(f"the router {failed} refuses this edge: {_reason(error)}") from error
            raise Unserved(f"the router {failed} has no catalogue for us: {_reason(error)}") from error
        self._version = version_of(data)
        found = [address for model in catalogue.models for address in model.routers]
        self._addresses = tuple(dict.fromkeys((self.address, *found, *self._given)))
        self._at = 0
        return catalogue

    async def file(self, digest: str) -> bytes:
        """Return a file of the catalogue. Raises Unserved, also when its digest is another."""
        body = bytearray()
        try:
            async with asyncio.timeout(FILE_S_MAX):
                get = unary(self._open(), "tidemill.Router/GetPart")
                while part := await get(encode((digest, len(body))), timeout=ANSWER_S_MAX):
                    body += part
        except (grpc.aio.AioRpcError, TimeoutError, OSError) as error:
            raise Unserved(f"the router {self.address} does not send a file: {_reason(error)}") from error
        if sha256(body).hexdigest() != digest:
            raise Unserved(f"the router {self.address} sends another file than its catalogue names")
        return bytes(body)

    def forget(self) -> None:
        """Read the last catalogue again, because it could not be used."""
        self._version = b""

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = open_channel(self.address, self._tls)
        return self._channel

    async def _next(self) -> None:
        self._at = (self._at + 1) % len(self._addresses)
        await self.close()

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with suppress(grpc.aio.AioRpcError):
                await channel.close()
