"""Certificates and keys of an endpoint."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def uvicorn_settings(tls: Tls | None) -> dict[str, Any]:
    """Return uvicorn's settings for the certificates."""
    if tls is None:
        return {}
    files = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    if tls.client_ca is None:
        return files
    return {**files, "ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
