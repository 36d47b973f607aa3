"""JSON as bytes: bodies, server-sent events, and large bodies, which other streams do not wait for."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

from tidemill.cluster.edge.chat.request.json_text import parse_json
from tidemill.workers.messages import RequestError

SLICE_ITEMS = 1024
"""The items of a list that are written without a pause."""

BODIES = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
EVENTS = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""An encoder for all events; `json.dumps` would make one for each."""


def event(body: object, name: str | None = None) -> bytes:
    """Return one server-sent event. Raises RequestError as `json_bytes` does."""
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {_finite(EVENTS, body)}\n\n".encode()


def json_bytes(body: object) -> bytes:
    """Return JSON. Raises RequestError for a number that it does not have, which a request has brought."""
    return _encoded(_finite(BODIES, body))


def _finite(encoder: json.JSONEncoder, body: object) -> str:
    try:
        return encoder.encode(body)
    except ValueError:
        raise RequestError("the request holds NaN or an infinite number: send finite ones") from None


def object_of(text: str) -> dict[str, Any] | None:
    """Return the object that a model wrote as the arguments of a call. None: it wrote none that a reply can
    hold, as in a call that was cut short."""
    try:
        found = parse_json(text or "{}")
        json_bytes(found)  # which refuses infinite numbers
    except (ValueError, RecursionError, RequestError):
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


async def large_json(body: object) -> bytes:
    """Return the same as `json_bytes`, written in a thread, in pieces between which streams go on."""
    return await asyncio.to_thread(lambda: _encoded("".join(_written(body))))


def _encoded(text: str) -> bytes:
    """Return the bytes of JSON. Half of a surrogate pair becomes its escape, which is JSON as well."""
    return text.encode(errors="backslashreplace")


def _written(value: object) -> Iterator[str]:
    match value:
        case dict():
            members = cast("dict[str, object]", value).items()
            for position, (name, member) in enumerate(members):
                yield f"{',' if position else '{'}{BODIES.encode(name)}:"
                yield from _written(member)
            yield "}" if members else "{}"
        case list():
            items = cast("list[object]", value)
            for start in range(0, len(items), SLICE_ITEMS):
                yield "," if start else "["
                if len(items) > SLICE_ITEMS:
                    yield BODIES.encode(items[start : start + SLICE_ITEMS])[1:-1]
                else:
                    yield ",".join("".join(_written(item)) for item in items)
            yield "]" if items else "[]"
        case _:
            yield BODIES.encode(value)
