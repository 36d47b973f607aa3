"""Certificates and keys of an endpoint."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from tidemill.cluster.edge.requests.api_keys import ApiKey, KeysFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files. With `client_ca`, clients must show a certificate that it signed."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """The security of an endpoint: without keys every client is admitted, without `tls` it is plain HTTP."""

    keys: tuple[ApiKey, ...] = ()
    keys_file: KeysFile | None = None  # from which they are read again
    tls: Tls | None = None


OPEN = Security()


def tls_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Return the context of a server with these files. Raises OSError."""
    if tls is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(tls.client_ca)
    return context
