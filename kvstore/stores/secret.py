"""The secret that seals objects for several tenants, as operators keep it: in a file."""

import stat
from base64 import b64decode
from pathlib import Path

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.seal import SECRET_BYTES

_FORMS = f"{SECRET_BYTES} random bytes, as they are or in hex or base64"
_FIX = "make one with: openssl rand -hex 32"


def read_secret(path: Path) -> bytes:
    """`SECRET_BYTES` from a file that holds them as they are, or as text in hex or base64. Raises
    StoreError."""
    try:
        held = path.read_bytes()
    except OSError as error:
        raise StoreError(f"the store secret {path} cannot be read ({error.strerror}): {_FIX}") from error
    secret = held if len(held) == SECRET_BYTES else _decoded(held.strip())
    if len(secret) != SECRET_BYTES:
        raise StoreError(f"the store secret {path} does not hold {_FORMS}: {_FIX}")
    return secret


def is_public(path: Path) -> bool:
    """Whether every user of this machine can read it."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def _decoded(text: bytes) -> bytes:
    try:
        return (
            bytes.fromhex(text.decode()) if len(text) == 2 * SECRET_BYTES else b64decode(text, validate=True)
        )
    except ValueError:
        return b""
