"""The seal of an object in a store, so that other bytes are never taken for the object. Pure.

    64 bytes    magic 4 | layout version 4 | body bytes 8 | kind 1 | digest 1 | 0 12 | shard 2 |
                key 16 | digest of the body 16.                     Numbers are little endian.

The key is a chained digest over the namespace and every token up to its end. So a matching seal
also proves the model, the tenant and the depth. Every byte of a seal follows from the key and the
body: a seal is valid exactly if it equals a newly computed one.

    x   xxh3-128 of the body: detects accidents, not forgeries, because every writer can seal.
    b   BLAKE3 of seal and body, keyed with a secret: only writers with the secret can seal.
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
    """The sealing of objects. `secret` is `SECRET_BYTES` that all workers share, or None."""

    secret: bytes | None = field(default=None, repr=False)

    def describe(self) -> str:
        """Return a part of the namespace, so that objects of another secret have other keys."""
        if self.secret is None:
            return ""
        return f"/sealed by {blake3(b'name of a secret', key=self.secret).hexdigest(8)}"

    def seal(self, key: ObjectKey, body: memoryview) -> bytes:
        """Return the seal of `body` (contiguous) under `key`. Reads the body once, copies nothing."""
        assert len(key.key) == DIGEST_BYTES
        fields = (key.kind.value.encode(), b"x" if self.secret is None else b"b", key.shard, key.key)
        start = (_MAGIC, LAYOUT_VERSION, body.nbytes, *fields)
        if self.secret is None:
            return _FORMAT.pack(*start, xxhash.xxh3_128_digest(body))
        unsealed = _FORMAT.pack(*start, bytes(16))
        return _FORMAT.pack(*start, blake3(unsealed, key=self.secret).update(body).digest(16))

    def verify(self, key: ObjectKey, body: memoryview, found: bytes | bytearray | memoryview) -> Got:
        """Return HIT if `found` seals `body` under `key`, else OTHER_VERSION or CORRUPT."""
        if compare_digest(self.seal(key, body), found):
            return Got.HIT
        version = bytes(found[: _VERSION.size])
        is_a_seal = version[:3] == _MAGIC[:3] and len(version) == _VERSION.size
        is_current = version == _VERSION.pack(_MAGIC, LAYOUT_VERSION)
        return Got.OTHER_VERSION if is_a_seal and not is_current else Got.CORRUPT


PLAIN = Sealing()
