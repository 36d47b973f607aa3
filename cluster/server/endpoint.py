"""The endpoint of a server: its addresses, security, sockets and limit of open files."""

import resource
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random

from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import OPEN, Security
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.cluster.settings import ClusterSettings, RouterSettings
from tidemill.kvstore.errors import TidemillError

UNREAD_BYTES_MAX = 256 << 10
"""The kernel's send buffer of one connection; by default it would hold megabytes for a client that does not
read."""

OTHER_FILES_MAX = 4096
"""The files that the edge may open in addition to client connections."""


ROUTER_PORTS = range(20_000, 30_000)
"""The ports for routers. Systems take the ports of outgoing connections from higher ones."""


class PortTaken(TidemillError):
    """The endpoint cannot listen on its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The addresses, security, telemetry and limits of a server."""

    host: str
    port: int
    grpc_port: int | None = None  # None: no gRPC
    security: Security = OPEN
    telemetry: Telemetry = QUIET
    limits: EdgeLimits = field(default_factory=EdgeLimits)

    @property
    def scheme(self) -> str:
        return "http" if self.security.tls is None else "https"


def raise_file_limit(connections_max: int) -> None:
    """Raise the limit of open files, often 1,024, to the need of this process or the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections_max + OTHER_FILES_MAX
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


@contextmanager
def listening(endpoint: Endpoint) -> Generator[socket.socket]:
    """Yield the listening HTTP socket. Raises PortTaken, also for the gRPC port."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit the size of the send buffer.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX)
        _bind(listener, endpoint.host, endpoint.port, "--port")
        if endpoint.grpc_port is not None:
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # gRPC opens its own socket
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _bind(probe, endpoint.host, endpoint.grpc_port, "--grpc-port")
        listener.listen(2048)
        yield listener


def with_router_ports(settings: ClusterSettings) -> ClusterSettings:
    """Return the settings with a free port for each router that has none, so that a router has the same
    address after a restart. Raises PortTaken."""
    with ExitStack() as sockets:

        def free_port(port: int, host: str) -> int:
            probe = sockets.enter_context(socket.socket())  # stays open, so that each port is another
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port and settings.detached_folder is not None:
                return port  # a router may listen there already, because only the endpoint was started again
            if port:
                _bind(probe, host, port, "--router-port")
                return port
            for candidate in Random().sample(ROUTER_PORTS, len(ROUTER_PORTS)):  # noqa: S311 - no secret
                with suppress(OSError):
                    probe.bind((host, candidate))
                    return candidate
            raise PortTaken(
                f"no port of {ROUTER_PORTS.start} to {ROUTER_PORTS.stop - 1} is free for a router"
            )

        def with_ports(router: RouterSettings) -> RouterSettings:
            ports = router.ports or (0,) * router.replicas
            host = router.host or ""  # Ray knows the node's address, so test all of them
            return replace(router, ports=tuple(free_port(port, host) for port in ports))

        fleets = tuple(replace(fleet, router=with_ports(fleet.router)) for fleet in settings.fleets)
    return replace(settings, fleets=fleets)


def _bind(listener: socket.socket, host: str, port: int, option: str) -> None:
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise PortTaken(
            f"cannot listen on {host}:{port} ({error}): give another --host or {option}, 0 for a free port"
        ) from error
