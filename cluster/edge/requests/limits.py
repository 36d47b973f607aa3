"""Limits of one edge: excess requests are refused immediately, so that its memory stays bounded.

No client can take a limit from the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.cluster.settings import HostedTools
from tidemill.workers.messages import RequestError

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
    hosted_tools: HostedTools = "ignore"

    def left_out(self, kinds: Sequence[str]) -> tuple[str, ...]:
        """Return the names, in the header, of tools of these types, which other servers run. Raises
        RequestError where they are refused."""
        if kinds and self.hosted_tools == "refuse":
            raise RequestError(
                f"tools: {kinds[0][:32]!r} does not run on this server: leave it out, or start the server "
                "with --hosted-tools ignore",
                param="tools",
            )
        return tuple(f"tools.{kind}" for kind in kinds)
