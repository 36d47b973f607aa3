"""The certificates of a cluster's processes, which authenticate them and encrypt their messages."""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLUSTER_NAME = "tidemill"
"""The DNS name in the certificate of every process, on every node, because addresses change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls:
    """PEM files, under these paths on every node. A process with a certificate by `ca` belongs to the
    cluster, so `ca` must sign nothing else. The files are read whenever a process connects or starts to
    listen."""

    certificate: Path
    key: Path
    ca: Path

    def check(self) -> None:
        """Test that two processes with these files accept each other, by a handshake without a socket. Raises
        ssl.SSLError and OSError."""
        sides = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        for side in sides:
            side.load_cert_chain(self.certificate, self.key)
            side.load_verify_locations(self.ca)
            side.verify_mode = ssl.CERT_REQUIRED
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = sides[0].wrap_bio(to_client, to_server, server_hostname=CLUSTER_NAME)
        server = sides[1].wrap_bio(to_server, to_client, server_side=True)
        for end in (client, server, client, server):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
        server.do_handshake()
