"""Limits of one edge: excess requests are refused immediately, so that its memory stays bounded."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tidemill.workers.messages import Overloaded

RETRY_S = 1.0
BODY_BYTES_MAX = 4 << 20
BODY_BYTES_PER_S = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Limits of one edge. A worker takes twice as many calls per edge as `answers_max`, so that it refuses
    none (`Limits` in cluster/worker/server.py)."""

    requests_max: int = 2048  # with a body
    body_bytes_max: int = 256 << 20  # of all of them
    answers_max: int = 2048
    connections_max: int = 8192  # further ones are closed immediately
    headers_s_max: float = 20.0  # from the first byte, or from the start of the connection, to the last
    body_s_max: float = 30.0  # and a second more per BODY_BYTES_PER_S that have arrived
    send_s_max: float = 30.0  # the time in which a client must take something of what waits for it
    shutdown_s_max: float = 5.0  # the time that open answers have when the server stops


class InFlightLimit:
    """Counts what is in progress and refuses the excess."""

    def __init__(self, most: int, what: str) -> None:
        """`what` is counted, for messages."""
        self._most = most
        self._what = what
        self.held = 0

    def take(self, amount: int) -> None:
        """Count `amount` more. Raises Overloaded and counts nothing then."""
        if self.held + amount > self._most:
            raise Overloaded(
                f"this frontend has {self.held} {self._what} and takes at most {self._most}",
                predicted_s=0.0,
                retry_after_s=RETRY_S,
            )
        self.held += amount

    def give(self, amount: int) -> None:
        self.held -= amount
        assert self.held >= 0, self._what

    @contextmanager
    def holding(self, amount: int) -> Generator[None]:
        """Count `amount` inside the block. Raises Overloaded."""
        self.take(amount)
        try:
            yield
        finally:
            self.give(amount)
