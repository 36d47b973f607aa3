"""What the command makes of the words that it is given, and how it refuses them."""

from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.sizes import parse_bytes


class UsageError(TidemillError):
    """Options that do not go together."""


def bytes_of(size: str, option: str) -> int:
    """Raises UsageError."""
    try:
        return parse_bytes(size)
    except ValueError as error:
        raise UsageError(f"{option} {size}: {error}") from error
