"""Parses JSON that clients send, in bodies and in the arguments of calls."""

import json
from typing import cast

from pydantic_core import from_json

from tidemill.workers.messages import RequestError

FIELD_CHARS_MAX = 128


def parse_json(text: str | bytes) -> object:
    """Return what json.loads returns, and raise what it raises. Raises RequestError for half of a surrogate
    pair, in a text or a name.

    pydantic's parser takes a third of its time for numbers, for which the interpreter is held.
    It refuses some of what json.loads takes: halves of surrogate pairs and a byte order mark.
    """
    try:
        return from_json(text)
    except ValueError:
        value = json.loads(text)
    field = half_pair_in(value)
    if field is not None:
        field = field[:FIELD_CHARS_MAX]
        reason = "holds half of a surrogate pair: send valid Unicode"
        raise RequestError(f"{field or 'the body'} {reason}", param=field or None)
    return value


def half_pair_in(value: object, field: str = "") -> str | None:
    """Return the field with text that no UTF-8 can hold, as a client writes it; of a name, the object that
    has it. None: all can be encoded."""
    match value:
        case str():
            return None if _is_unicode(value) else field
        case dict():
            members = cast("dict[str, object]", value)
            if not all(map(_is_unicode, members)):
                return field
            inside = ((f"{field}.{name}".removeprefix("."), member) for name, member in members.items())
        case list():
            inside = ((f"{field}[{at}]", item) for at, item in enumerate(cast("list[object]", value)))
        case _:
            return None
    return next((found for name, item in inside if (found := half_pair_in(item, name)) is not None), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
