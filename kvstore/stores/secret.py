"""Reads the file with the secret that seals the objects of several tenants."""

import stat
from base64 import b64decode
from pathlib import Path

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.seal import SECRET_BYTES

_FORMS = f"{SECRET_BYTES} random bytes, raw or in hex or base64"
_FIX = "make one with: openssl rand -hex 32"


def read_secret(path: Path) -> bytes:
    """Read `SECRET_BYTES` from a file: raw, or as text in hex or base64. Raises StoreError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"the store secret {path} cannot be read ({error.strerror}): {_FIX}") from error
    secret = content if len(content) == SECRET_BYTES else _decode(content.strip())
    if len(secret) != SECRET_BYTES:
        raise StoreError(f"the store secret {path} does not hold {_FORMS}: {_FIX}")
    return secret


def is_public(path: Path) -> bool:
    """Return whether every user of this machine can read the file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def _decode(text: bytes) -> bytes:
    try:
        return (
            bytes.fromhex(text.decode()) if len(text) == 2 * SECRET_BYTES else b64decode(text, validate=True)
        )
    except ValueError:
        return b""
