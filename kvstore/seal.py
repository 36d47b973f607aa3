"""What travels with an object of the store, so that no other bytes are ever taken for it. Pure.

    64 bytes    magic 4 | layout version 4 | body bytes 8 | kind 1 | 0 13 | shard 2 | key 16 | xxh3-128 16
                numbers are little endian

Every byte of a seal follows from the key and the body, so a seal is right exactly when it equals a fresh
one. It finds accidents, not forgeries: whoever can write to the store can seal.
"""

import struct

import xxhash

from tidemill.kvstore.keys import DIGEST_BYTES, ObjectKey
from tidemill.kvstore.layout import LAYOUT_VERSION

_FORMAT = struct.Struct(f"<4sIQ1s13xH{DIGEST_BYTES}s16s")
_MAGIC = b"TMO2"

SEAL_BYTES = _FORMAT.size


def seal(key: ObjectKey, body: memoryview) -> bytes:
    """`SEAL_BYTES` that bind `body` (contiguous) to `key`. Reads the body once and copies nothing."""
    assert len(key.key) == DIGEST_BYTES
    return _FORMAT.pack(
        _MAGIC,
        LAYOUT_VERSION,
        body.nbytes,
        key.kind.value.encode(),
        key.shard,
        key.key,
        xxhash.xxh3_128_digest(body),
    )


def verify(key: ObjectKey, body: memoryview, found: bytes | bytearray | memoryview) -> bool:
    """Whether `found` is the seal of exactly this body under exactly this key."""
    return seal(key, body) == found
