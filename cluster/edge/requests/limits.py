"""Limits of one edge: excess requests are refused immediately, so that its memory stays bounded.

No client can take a limit from the others.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Network, ip_address

from tidemill.workers.messages import Overloaded

RETRY_S = 1.0
BODY_BYTES_MAX = 4 << 20
BODY_BYTES_PER_S = 16 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeLimits:
    """Limits of one edge. A worker takes twice as many calls per edge as `answers_max`, so that it refuses
    none (`ServerLimits` in cluster/worker/server.py). One client alone gets half of what is shared."""

    requests_max: int = 4096  # whose body has arrived
    body_bytes_max: int = 112 << 20  # of all of them
    answers_max: int = 4096
    connections_max: int = 8192  # of all clients; further ones are closed immediately
    headers_s_max: float = 20.0  # from the first byte, or from the start of the connection, to the last
    body_s_max: float = 30.0  # for its first part, each further one, and beyond BODY_BYTES_PER_S on average
    send_s_max: float = 30.0  # the time in which a client must take something of what waits for it
    shutdown_s_max: float = 5.0  # the time that open answers have when the server stops
    allowed_origins: tuple[str, ...] = ()  # sites whose pages may call from a browser; "*": all
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


class InFlightLimit:
    """Counts what is in progress and refuses the excess, and also a client that holds too much.

    A client may hold as much as is free: one alone half of all, the next one half of the rest, and there is
    always something for another.
    """

    def __init__(self, most: int, what: str) -> None:
        """`what` is counted, for messages."""
        self._most = most
        self._what = what
        self._held: dict[str, int] = {}  # by client, none of them 0
        self.held = 0

    def take(self, amount: int, client: str) -> None:
        """Count `amount` more for a client. Raises Overloaded and counts nothing then."""
        held = self._held.get(client, 0)
        if held + amount > self._most - self.held:
            raise Overloaded(
                f"this frontend has {self.held} {self._what}, {held} of them yours, and takes at most "
                f"{self._most}, from one client half of what others leave",
                predicted_s=0.0,
                retry_after_s=RETRY_S,
            )
        self._set(client, held + amount)

    def give(self, amount: int, client: str) -> None:
        self._set(client, self._held.get(client, 0) - amount)

    @contextmanager
    def holding(self, amount: int, client: str) -> Generator[None]:
        """Count `amount` inside the block. Raises Overloaded."""
        self.take(amount, client)
        try:
            yield
        finally:
            self.give(amount, client)

    def _set(self, client: str, held: int) -> None:
        self.held += held - self._held.pop(client, 0)
        assert held >= 0, self._what
        if held:
            self._held[client] = held

    def check(self) -> None:
        """Assert that the sum is that of all clients."""
        assert self.held == sum(self._held.values()) <= self._most, self._what
        assert all(held > 0 for held in self._held.values()), self._what


def client_of(tenant: str | None, address: str | None) -> str:
    """Return who shares a limit: a tenant, or without keys an address (of IPv6 its /64, which one client
    has)."""
    if tenant is not None:
        return f"tenant:{tenant}"
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return address or ""
    if isinstance(parsed, IPv4Address):
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped or IPv6Network((parsed.packed[:8] + bytes(8), 64)))
