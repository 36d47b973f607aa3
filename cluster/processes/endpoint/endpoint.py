"""The endpoint of a server: its addresses, security, sockets and limit of open files."""

import resource
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from tidemill.cluster.edge.records.database import DatabaseSettings
from tidemill.cluster.edge.requests.limits import EdgeLimits
from tidemill.cluster.edge.requests.security import OPEN, Security
from tidemill.cluster.observability.telemetry import QUIET, Telemetry
from tidemill.cluster.settings import ClusterSettings, RouterSettings, authority
from tidemill.kvstore.errors import TidemillError

UNREAD_BYTES_MAX = 256 << 10
"""The kernel's send buffer of one connection; by default it would hold megabytes for a client that does not
read."""

OTHER_FILES_MAX = 4096
"""The files that the edge may open in addition to client connections."""


BACKLOG = 2048

ROUTER_PORTS = range(20_000, 30_000)
"""The ports for routers. Systems take the ports of outgoing connections from higher ones."""


class PortTaken(TidemillError):
    """The endpoint cannot listen on its address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    host: str
    port: int
    grpc_port: int | None = None  # None: no gRPC
    frontends: int = 1  # edge processes; one is the server itself
    security: Security = OPEN
    telemetry: Telemetry = QUIET
    limits: EdgeLimits = field(default_factory=EdgeLimits)
    database: DatabaseSettings | None = None

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


class Sockets(NamedTuple):
    http: socket.socket
    grpc: socket.socket | None = None


@contextmanager
def listening(endpoint: Endpoint) -> Generator[Sockets]:
    """Yield the listening sockets. Raises PortTaken."""
    with ExitStack() as sockets:

        def listener(port: int, option: str) -> socket.socket:
            family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
            bound = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit the size of the send buffer.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD_BYTES_MAX)
            _bind(bound, endpoint.host, port, option)
            return bound

        http = listener(endpoint.port, "--port")
        grpc = None if endpoint.grpc_port is None else listener(endpoint.grpc_port, "--grpc-port")
        for bound in filter(None, (http, grpc)):
            bound.listen(BACKLOG)
        yield Sockets(http, grpc)


class HandedSocket(socket.socket):
    """One end of a pair of Unix sockets, through which a server hands on the connections that it accepts."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and the client's address, as a listening socket does. Raises OSError."""
        _, descriptors, _, _ = socket.recv_fds(self, 1, 1)
        if not descriptors:
            raise OSError("the server has ended")
        accepted = socket.socket(fileno=descriptors[0])
        try:
            return accepted, accepted.getpeername()
        except OSError as error:  # the client has closed it
            accepted.close()
            raise ConnectionAbortedError from error


def inherited(numbers: str) -> tuple[Sockets, socket.socket]:
    """Return the sockets of an edge process of a server, and its end of the link to that server, from the
    numbers of their descriptors: HTTP,LINK or HTTP,LINK,GRPC."""
    http, link, *grpc = map(int, numbers.split(","))
    handed = [HandedSocket(fileno=number) for number in grpc]
    return Sockets(HandedSocket(fileno=http), *handed), socket.socket(fileno=link)


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
            join_port = None if router.join_port is None else free_port(router.join_port, host)
            opened = tuple(free_port(port, host) for port in ports)
            return replace(router, ports=opened, join_port=join_port)

        fleets = tuple(replace(fleet, router=with_ports(fleet.router)) for fleet in settings.fleets)
    return replace(settings, fleets=fleets)


def _bind(listener: socket.socket, host: str, port: int, option: str) -> None:
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        raise PortTaken(
            f"cannot listen on {authority(host, port)} ({error}): give another --host or {option}, 0 for a "
            "free port"
        ) from error
