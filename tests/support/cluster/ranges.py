"""Values for the fields of messages: any within the range that the type names, and those at its ends."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

ENDS = (-(2**63), -(2**40), -5, -1, 0, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1)
"""Integers that a field may be sent, within its range or not. MessagePack has no others beyond them."""


def within(hint: object) -> st.SearchStrategy[Any]:
    """Draw values of a type, within the ranges that it names."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _in_range(inner[0], inner[1])
    if origin in {Union, types.UnionType}:
        return st.one_of(*map(within, inner))
    if origin is tuple and inner[1:] == (...,):
        return st.lists(within(inner[0]), max_size=5).map(tuple)
    if origin is tuple:
        return st.tuples(*map(within, inner))
    if origin is dict:
        return st.dictionaries(*map(within, inner), max_size=5)
    return st.from_type(cast("type[Any]", hint))


def _in_range(base: object, range_: msgspec.Meta) -> st.SearchStrategy[Any]:
    most = range_.le if range_.lt is None else range_.lt - 1
    if base is int:
        return st.integers(cast("int", range_.ge), cast("int", most))
    if base is float:
        low = range_.ge if range_.gt is None else range_.gt
        return st.floats(low, most, exclude_min=range_.gt is not None, allow_nan=False)
    return st.lists(within(get_args(base)[0]), min_size=range_.min_length or 0, max_size=5).map(tuple)


def every(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw messages of this type with a value for each of their fields, also for those with a default."""
    drawn = {name: within(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return st.builds(kind, **drawn | fields)


def with_ends(message: object) -> Iterator[object]:
    """Yield what a message of plain lists and maps becomes with each of its integers at each of ENDS."""
    match message:
        case bool():
            return
        case int():
            yield from ENDS
        case list():
            parts = cast("list[object]", message)
            for at, part in enumerate(parts):
                yield from ([*parts[:at], end, *parts[at + 1 :]] for end in with_ends(part))
        case dict():
            fields = cast("dict[object, object]", message)
            for name, part in fields.items():
                yield from (fields | {name: end} for end in with_ends(part))
        case _:
            return
