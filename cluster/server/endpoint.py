"""Where a server listens and who may ask: its sockets, and what the system lets it open."""

import resource
import socket
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import OPEN, Security
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.kvstore.errors import TidemillError

UNREAD_BYTES_MAX = 256 << 10
"""Of one connection, which the kernel keeps for a client that does not read; by itself it keeps megabytes."""

FILES_BESIDE = 4096
"""... the connections of clients, that a frontend may have open."""


class PortTaken(TidemillError):
    """The endpoint cannot listen where it was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the server listens, and who may ask."""

    host: str
    port: int
    grpc_port: int | None = None  # None: no gRPC
    security: Security = OPEN
    telemetry: Telemetry = QUIET
    limits: EdgeLimits = field(default_factory=EdgeLimits)

    @property
    def scheme(self) -> str:
        return "http" if self.security.tls is None else "https"


def allow_files(connections_max: int) -> None:
    """Raise what this process may open, which is often 1,024, as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + FILES_BESIDE
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@contextmanager
def listening(endpoint: Endpoint) -> Generator[socket.socket]:
    """The socket of HTTP, taken first: that a port is in use is said before the cluster starts."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX
        )  # its connections inherit it
        _bind(listener, endpoint.host, endpoint.port, "--port")
        if endpoint.grpc_port is not None:
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # gRPC takes no socket that others made
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _bind(probe, endpoint.host, endpoint.grpc_port, "--grpc-port")
        listener.listen(2048)
        yield listener


def _bind(listener: socket.socket, host: str, port: int, option: str) -> None:
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error}): give another --host or {option}, 0 takes a free one"
        ) from error
