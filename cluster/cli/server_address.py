"""The address of a running server, and the API key for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a running server is, and the key that it wants, if any."""

    url: str
    api_key: str = ""
