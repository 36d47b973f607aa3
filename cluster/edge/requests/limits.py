"""What one edge holds at once: a flood is refused at the door, so that its memory stays bounded."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from tidemill.workers.messages import Overloaded

RETRY_S = 1.0
BODY_BYTES_MAX = 4 << 20
BODY_BYTES_PER_S = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Of one frontend. A worker takes twice as many calls of one frontend as `answers_max`, so that no call
    is refused there: data_plane.Limits."""

    requests_max: int = 2048  # with a body
    body_bytes_max: int = 256 << 20  # of all of them
    answers_max: int = 2048
    connections_max: int = 8192  # one more is closed at once
    headers_s_max: float = 20.0  # from the first byte, or from the start of the connection, to the last
    body_s_max: float = 30.0  # and a second more for each BODY_BYTES_PER_S that have come
    send_s_max: float = 30.0  # in which a client must take something of what waits for it
    shutdown_s_max: float = 5.0  # in which open answers may end when the server was told to stop


class InFlightLimit:
    """Counts what is held, and refuses what would be too much."""

    def __init__(self, most: int, what: str) -> None:
        """`what` is counted, for people."""
        self._most = most
        self._what = what
        self.held = 0

    def take(self, amount: int) -> None:
        """Raises Overloaded, and takes nothing then."""
        if self.held + amount > self._most:
            raise Overloaded(
                f"this frontend has {self.held} {self._what} at once and takes at most {self._most}",
                predicted_s=0.0,
                retry_after_s=RETRY_S,
            )
        self.held += amount

    def give(self, amount: int) -> None:
        self.held -= amount
        assert self.held >= 0, self._what

    @contextmanager
    def holding(self, amount: int) -> Generator[None]:
        """Raises Overloaded."""
        self.take(amount)
        try:
            yield
        finally:
            self.give(amount)
