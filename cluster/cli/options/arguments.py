"""Parse arguments of the command, and refuse wrong ones."""

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.sizes import parse_bytes


class UsageError(TidemillError):
    """A wrong argument, or arguments that exclude each other."""


def bytes_of(size: str, option: str) -> int:
    """Parse a size like `8GiB`. Raises UsageError that names `option`."""
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option} {size}: {error}") from error
