"""The catalogue of a router: the server publishes it, and edges read it. A router that has restarted
has none until the server publishes it again, about a second later."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from hashlib import sha256

from tidemill.cluster.rpc.catalogue import Catalogue
from tidemill.cluster.rpc.catalogue_client import CATALOGUE_WAIT_S, PART_BYTES, version_of
from tidemill.cluster.rpc.codec import Malformed, decode, encode

FILE_BYTES_MAX = 256 << 20


class CatalogueServer:
    """The latest catalogue and its files. Only processes of the cluster reach it."""

    def __init__(self) -> None:
        self._data = b""  # the encoded catalogue; empty: none yet
        self._version = b""
        self._files: dict[str, bytes] = {}  # by digest: those of the catalogue, and those on their way
        self._parts: dict[str, bytearray] = {}
        self._changed = asyncio.Event()

    def calls(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """Return the methods of the server, which raise Malformed."""
        return {
            "Publish": self._publish,
            "PutPart": self._put_part,
            "Catalogue": self.newer,
            "GetPart": self._get_part,
        }

    def publish(self, data: bytes) -> list[str]:
        """Serve this catalogue from now on, if all its files are here. Return the digests of those that are
        not. Raises Malformed."""
        if data == self._data:
            return []
        named = {digest for model in decode(Catalogue, data).models for digest in model.files.values()}
        missing = sorted(named - self._files.keys())
        if not missing:
            self._files = {digest: self._files[digest] for digest in named}
            self._parts.clear()
            self._data, self._version = data, version_of(data)
            self._changed.set()
            self._changed = asyncio.Event()
        return missing

    def put_part(self, digest: str, start: int, size: int, part: bytes) -> None:
        """Add the next part of a file of `size` bytes. Raises Malformed."""
        if start == 0:
            self._parts[digest] = bytearray()
        body = self._parts.get(digest)
        if body is None or start != len(body) or size > FILE_BYTES_MAX or start + len(part) > size:
            raise Malformed(f"a part of {len(part)} bytes at {start} of a file of {size} does not follow")
        body += part
        if len(body) == size:
            del self._parts[digest]
            if sha256(body).hexdigest() != digest:
                raise Malformed("the file does not have the digest that it is called by")
            self._files[digest] = bytes(body)

    async def newer(self, version: bytes) -> bytes:
        """Return the encoded catalogue when it has another version; empty if it keeps this one for
        CATALOGUE_WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CATALOGUE_WAIT_S):
                while self._version == version:
                    await self._changed.wait()
        return b"" if self._version == version else self._data

    async def _publish(self, data: bytes) -> bytes:
        return encode(self.publish(data))

    async def _put_part(self, data: bytes) -> bytes:
        self.put_part(*decode(tuple[str, int, int, bytes], data))
        return b""

    async def _get_part(self, data: bytes) -> bytes:
        digest, start = decode(tuple[str, int], data)
        body = self._files.get(digest)
        if body is None or start < 0:
            raise Malformed("there is no such file")
        return body[start : start + PART_BYTES]
