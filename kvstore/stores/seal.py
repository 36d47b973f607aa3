"""What travels with an object of the store, so that no other bytes are ever taken for it. Pure.

    64 bytes    magic 4 | layout version 4 | body bytes 8 | kind 1 | digest 1 | 0 12 | shard 2 | key 16 |
                digest of the body 16                               numbers are little endian

The key is that of a chain over the namespace and every token up to its end, so a seal that fits also tells
the model, the tenant and the depth. Every byte of a seal follows from the key and the body: it is right
exactly when it equals a fresh one.

    x   xxh3-128 of the body: finds accidents, not forgeries, for whoever can write to the store can seal
    b   BLAKE3 of seal and body, keyed with a secret: nobody without it can make an object that fits
"""

import struct
from dataclasses import dataclass, field
from hmac import compare_digest

import xxhash
from blake3 import blake3

from tidemill.kvstore.keys import DIGEST_BYTES, ObjectKey
from tidemill.kvstore.layout import LAYOUT_VERSION
from tidemill.kvstore.stores.page_store import Got

_FORMAT = struct.Struct(f"<4sIQ1s1s12xH{DIGEST_BYTES}s16s")
_MAGIC = b"TMO3"
_VERSION = struct.Struct("<4sI")

SEAL_BYTES = _FORMAT.size
SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Sealing:
    """How objects are sealed. `secret` is `SECRET_BYTES` that all workers of a cluster share, or None."""

    secret: bytes | None = field(default=None, repr=False)

    def describe(self) -> str:
        """Part of the namespace: objects of another secret have other keys, instead of being corrupt."""
        if self.secret is None:
            return ""
        return f"/sealed by {blake3(b'name of a secret', key=self.secret).hexdigest(8)}"

    def seal(self, key: ObjectKey, body: memoryview) -> bytes:
        """`SEAL_BYTES` that bind `body` (contiguous) to `key`. Reads the body once and copies nothing."""
        assert len(key.key) == DIGEST_BYTES
        fields = (key.kind.value.encode(), b"x" if self.secret is None else b"b", key.shard, key.key)
        start = (_MAGIC, LAYOUT_VERSION, body.nbytes, *fields)
        if self.secret is None:
            return _FORMAT.pack(*start, xxhash.xxh3_128_digest(body))
        unsealed = _FORMAT.pack(*start, bytes(16))
        return _FORMAT.pack(*start, blake3(unsealed, key=self.secret).update(body).digest(16))

    def verify(self, key: ObjectKey, body: memoryview, found: bytes | bytearray | memoryview) -> Got:
        """HIT if `found` is the seal of exactly this body under exactly this key; else OTHER_VERSION or
        CORRUPT."""
        if compare_digest(self.seal(key, body), found):
            return Got.HIT
        version = bytes(found[: _VERSION.size])
        told = version[:3] == _MAGIC[:3] and len(version) == _VERSION.size
        return Got.OTHER_VERSION if told and version != _VERSION.pack(_MAGIC, LAYOUT_VERSION) else Got.CORRUPT


PLAIN = Sealing()
