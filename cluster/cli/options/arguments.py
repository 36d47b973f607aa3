"""Parse arguments of the command, and refuse wrong ones."""

import argparse
from dataclasses import fields
from typing import Any

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.sizes import parse_bytes

Option = tuple[str, dict[str, Any], str]
"""A flag, the arguments of `add_argument`, and the help without the default."""


class UsageError(TidemillError):
    """A wrong argument, or arguments that exclude each other."""


def bytes_of(size: str, option: str) -> int:
    """Parse a size like `8GiB`. Raises UsageError that names `option`."""
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option} {size}: {error}") from error


def check_above_zero(options: argparse.Namespace, *names: str) -> None:
    """Raise UsageError for the first of these options that is set, and not above 0."""
    for name in names:
        value: float | None = getattr(options, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}: set it above 0")


def named(options: argparse.Namespace, kind: type[Any]) -> dict[str, Any]:
    """Return the options that have the names of fields of a dataclass."""
    return {field.name: vars(options)[field.name] for field in fields(kind) if field.name in options}
