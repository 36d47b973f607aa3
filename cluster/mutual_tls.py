"""The certificates of a cluster's processes: by them they know each other, and hide what they say."""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CLUSTER_NAME = "tidemill"
"""The DNS name that every process's certificate carries, wherever it runs: addresses come and go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MutualTls:
    """PEM files, under these paths on every node. Whoever has a certificate by `ca` is of the cluster, so it
    signs nothing else. They are read whenever a process connects or starts to listen."""

    certificate: Path
    key: Path
    ca: Path

    def check(self) -> None:
        """Whether two processes that have these would hear each other: they are let shake hands, without a
        socket. Raises ssl.SSLError and OSError."""
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
