"""Parses JSON that clients send, in bodies and in the arguments of calls."""

import json
import re
from collections.abc import Callable
from math import isfinite
from typing import cast

from pydantic_core import from_json

from tidemill.workers.messages import RequestError

SURROGATE = re.compile("[\ud800-\udfff]")
FIELD_CHARS_MAX = 128
PLAIN = frozenset({int, str, bool, type(None)})
"""The types of values that are finite."""


def parse_json(text: str | bytes) -> object:
    """Return what json.loads returns, and raise what it raises. Raises RequestError for NaN, infinite and too
    large numbers, and for half of a surrogate pair, in a text or a name.

    pydantic's parser takes a third of its time for numbers, for which the interpreter is held.
    It refuses some of what json.loads takes: halves of surrogate pairs and a byte order mark.
    """
    try:
        value = from_json(text)
    except ValueError:
        value = json.loads(text)
        _refuse(value, _is_half, "half of a surrogate pair: send valid Unicode")
    if _is_infinite(value):
        _refuse(value, _is_infinite, "NaN or a number beyond 1.8e308: send finite ones")
    return value


def _refuse(value: object, is_wrong: Callable[[object], bool], reason: str) -> None:
    field = field_with(is_wrong, value)
    if field is not None:
        field = field[:FIELD_CHARS_MAX]
        raise RequestError(f"{field or 'the body'} holds {reason}", param=field or None)


def field_with(is_wrong: Callable[[object], bool], value: object, field: str = "") -> str | None:
    """Return the field with a wrong text or number, as a client writes it; of a wrong name, the object that
    has it. None: nothing is wrong."""
    match value:
        case dict():
            members = cast("dict[str, object]", value)
            if any(map(is_wrong, members)):
                return field
            inside = ((f"{field}.{name}".removeprefix("."), member) for name, member in members.items())
        case list():
            inside = ((f"{field}[{at}]", item) for at, item in enumerate(cast("list[object]", value)))
        case _:
            return field if is_wrong(value) else None
    found = (field_with(is_wrong, item, name) for name, item in inside)
    return next((name for name in found if name is not None), None)


def _is_half(value: object) -> bool:
    """Return whether no UTF-8 can hold a text."""
    return isinstance(value, str) and SURROGATE.search(value) is not None


def _is_infinite(value: object) -> bool:
    """Return whether a number is not finite, or some number of an object or a list."""
    match value:
        case float():
            return not isfinite(value)
        case dict():
            return any(map(_is_infinite, cast("dict[str, object]", value).values()))
        case list():
            items = cast("list[object]", value)
            return not PLAIN.issuperset(map(type, items)) and any(map(_is_infinite, items))
        case _:
            return False
