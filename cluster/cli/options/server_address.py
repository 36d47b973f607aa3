"""The address of a running server, and the API key for it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerAddress:
    url: str
    api_key: str = ""  # empty: send none
