"""The certificates of a cluster's processes, which authenticate them and encrypt their messages."""

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tidemill.workers.pickled_by_name import PickledByName

CLUSTER_NAME = "tidemill"
"""The DNS name in the certificate of every process, on every node, because addresses change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls(PickledByName):
    """PEM files, under these paths on every node. A process with a certificate by `ca` belongs to the
    cluster, so `ca` must sign nothing else. The files are read whenever a process connects or starts to
    listen."""

    certificate: Path
    key: Path
    ca: Path

    @property
    def name(self) -> str:
        return CLUSTER_NAME

    def client(self) -> ssl.SSLContext:
        """Return the context of a process that connects. Raises ssl.SSLError and OSError."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def server(self) -> ssl.SSLContext:
        """Return the context of a process that listens. Raises ssl.SSLError and OSError."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def check(self) -> None:
        """Test that two processes with these files accept each other, by a handshake without a socket. Raises
        ssl.SSLError and OSError."""
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = self.client().wrap_bio(to_client, to_server, server_hostname=CLUSTER_NAME)
        server = self.server().wrap_bio(to_server, to_client, server_side=True)
        for end in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
        server.do_handshake()


PROBE_S_MAX = 3.0
FILES_ADVICE = (
    "give --cluster-ssl-certfile, --cluster-ssl-keyfile and --cluster-ssl-ca-certs of the cluster, or a "
    "--token of `tidemill join-token`"
)


def refusal_of(address: str, tls: MutualTls | None) -> str | None:
    """Return why a process of the cluster at host:port refuses our certificate, in one line; None if it does
    not, or does not answer. gRPC reports no difference."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.check_hostname = tls is not None
    context.verify_mode = ssl.CERT_NONE if tls is None else ssl.CERT_REQUIRED
    try:
        if tls is not None:
            context.load_cert_chain(tls.certificate, tls.key)
            context.load_verify_locations(tls.ca)
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S_MAX)
    except (OSError, ValueError):
        return None
    with plain:
        try:
            connection = context.wrap_socket(plain, server_hostname=CLUSTER_NAME)
        except ssl.SSLError as error:
            speaks_tls = error.reason != "WRONG_VERSION_NUMBER"
            if tls is None:
                return f"it takes certificates of the cluster alone: {FILES_ADVICE}" if speaks_tls else None
            return f"{error}: {FILES_ADVICE}" if speaks_tls else "it has no certificate: give none, too"
        except OSError:
            return None
        with connection:
            if tls is None:
                return f"it takes certificates of the cluster alone: {FILES_ADVICE}"
            is_admitted = _is_admitted(connection)
    return (
        None if is_admitted else f"our certificate is not one of the cluster, or has expired: {FILES_ADVICE}"
    )


def _is_admitted(connection: ssl.SSLSocket) -> bool:
    """Return whether the server accepts our certificate, which TLS 1.3 checks after the handshake. A process
    that is admitted gets a frame of HTTP/2."""
    try:
        return bool(connection.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False
