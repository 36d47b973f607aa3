"""Unpacks the body of a request, and bounds the cost of its JSON before it is parsed.

A parser holds the interpreter until it is done, in any thread: 4 MiB of `[],` take a second, a text of
4 MiB some milliseconds. So the structure is counted first, by fast searches of the whole body.
"""

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate

from tidemill.cluster.edge.requests.limits import BODY_BYTES_MAX
from tidemill.workers.messages import RequestError

DEPTH_MAX = 128
MEMBERS_MAX = 1 << 15
CONTAINERS_MAX = 1 << 16
VALUES_MAX = 1 << 18
"""Each limit alone takes some 20 ms to parse and to check."""

INLINE_BYTES_MAX = 256 << 10
"""Longer bodies are counted in a thread."""

PARTS_MAX = 80
"""The most parts of a packed body: each copies those behind it, and those of bgzip have 64 KiB."""

NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


GZIP = zlib.MAX_WBITS | 16
WINDOWS = {"gzip": (GZIP,), "x-gzip": (GZIP,), "deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS)}
"""The formats of zlib by the name of an encoding. `deflate` has a header in the standard, and none in some
clients."""


def unpacked(body: bytes, encoding: str) -> bytes:
    """Return a body in its `content-encoding`; of one that is too large no more than BODY_BYTES_MAX + 1
    bytes. Raises RequestError."""
    if encoding not in WINDOWS:
        raise RequestError(
            f"content-encoding {encoding[:64]!r}: send {', '.join(WINDOWS)} or none", status=415
        )
    for window in WINDOWS[encoding]:
        with suppress(zlib.error, EOFError):
            return b"".join(_parts(body, window))
    raise RequestError(f"the body is damaged or cut short: it is not the {encoding} of anything")


def _parts(packed: bytes, window: int) -> Iterator[bytes]:
    """Yield what is packed, of which `gzip` may have several parts in a row, up to BODY_BYTES_MAX + 1 bytes.
    Raises RequestError, zlib.error, and EOFError if it is cut short."""
    left = BODY_BYTES_MAX + 1
    for _ in range(PARTS_MAX):
        unpacker = zlib.decompressobj(window)
        part = unpacker.decompress(packed, left)
        yield part
        left -= len(part)
        if not left:
            return
        if not unpacker.eof:
            raise EOFError
        packed = unpacker.unused_data
        if not packed.strip(b"\0") or window != GZIP:  # padding, or nothing that the format knows
            return
    raise RequestError(f"the body is packed in more than {PARTS_MAX} parts: pack it whole")


async def check_json_body(body: bytes) -> None:
    """Check the structure of a body. Raises RequestError."""
    if len(body) <= INLINE_BYTES_MAX:
        check_json(body)
    else:
        await asyncio.to_thread(check_json, body)


def check_json(body: bytes) -> None:
    """Check the structure of a JSON text, as far as it is one. Raises RequestError.

    Parsers read on until their first error, and up to there they and this function see the same strings.
    """
    if 0 in body:
        raise RequestError("the body is no JSON in UTF-8: it holds a byte 0")
    if body.count(b"[") + body.count(b"{") <= DEPTH_MAX and body.count(b",") < MEMBERS_MAX:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    _bound(unescaped.count(b'"') // 2, VALUES_MAX, "strings")
    structure = b"".join(unescaped.split(b'"')[::2])
    _bound(structure.count(b","), VALUES_MAX, "values")
    _bound(structure.count(b":"), MEMBERS_MAX, "members of objects")
    brackets = structure.translate(None, NO_BRACKETS)
    _bound(len(brackets) // 2, CONTAINERS_MAX, "objects and lists")
    depth = max(accumulate(1 if bracket in b"[{" else -1 for bracket in brackets), default=0)
    _bound(depth, DEPTH_MAX, "levels of objects and lists")


def _bound(found: int, most: int, what: str) -> None:
    if found > most:
        raise RequestError(f"the body has {found:,} {what}: send at most {most:,}", code="body_too_complex")
