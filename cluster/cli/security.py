"""Options about who may ask: API keys and TLS, of `tidemill serve` and of the commands that ask a server."""

import argparse
import secrets
import ssl
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tidemill.cluster.cli.arguments import UsageError
from tidemill.cluster.cli.server_address import ServerAddress
from tidemill.cluster.config.tree import ClusterConfig, EdgeConfig
from tidemill.cluster.edge.requests.api_keys import ApiKey, digest_of, read_keys
from tidemill.cluster.edge.requests.security import Security, Tls
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.settings import ClusterSettings

KEY_VARIABLE = "TIDEMILL_API_KEY"
TENANT_OF_OPTIONS = "operator"


def security_of(edge: EdgeConfig, api_keys: Sequence[str] | None, environ: Mapping[str, str]) -> Security:
    """Raises TidemillError."""
    given = api_keys or [key for key in (environ.get(KEY_VARIABLE),) if key]
    if not all(given):
        raise UsageError("--api-key is empty: give a long random text, as `tidemill key` makes one")
    keys = [ApiKey(tenant=TENANT_OF_OPTIONS, sha256=digest_of(key), operator=True) for key in given]
    if edge.api_keys_file is not None:
        keys += read_keys(Path(edge.api_keys_file))
    return Security(keys=tuple(keys), tls=_tls(edge))


def add_key_options(key: argparse.ArgumentParser) -> None:
    key.add_argument("tenant", metavar="TENANT", help="who asks with it")
    key.set_defaults(run=_key)


def add_server_options(command: argparse.ArgumentParser) -> None:
    """Of a command that asks a running server."""
    command.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    command.add_argument("--api-key", metavar="KEY", help=f"of an operator (${KEY_VARIABLE})")


def server_of(options: argparse.Namespace, environ: Mapping[str, str]) -> ServerAddress:
    return ServerAddress(options.url, options.api_key or environ.get(KEY_VARIABLE, ""))


def _key(options: argparse.Namespace) -> int:
    """A new key, and what a server has to know of it."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        known = ApiKey(tenant=options.tenant, sha256=digest_of(key))
    except ValueError:
        raise UsageError(f"TENANT {options.tenant!r}: use up to 64 letters, digits, - _ and .") from None
    sys.stderr.write("the key, which is told once; below it what --api-keys-file has under `keys:`\n")
    sys.stdout.write(f"{key}\n- tenant: {known.tenant}\n  sha256: {known.sha256}\n")
    return 0


def guarded(settings: ClusterSettings, config: ClusterConfig) -> ClusterSettings:
    """The same cluster, listening where `config` says and with its certificates. Raises UsageError."""
    tls = cluster_tls(config)
    where = config.host
    host = "127.0.0.1" if where == "loopback" else None
    return replace(
        settings,
        fleets=tuple(
            replace(
                fleet,
                workers=tuple(replace(worker, host=host, tls=tls) for worker in fleet.workers),
                router=replace(fleet.router, host=host, tls=tls),
            )
            for fleet in settings.fleets
        ),
    )


def cluster_tls(config: ClusterConfig) -> MutualTls | None:
    """Raises UsageError."""
    files = {
        "certfile": config.ssl_certfile,
        "keyfile": config.ssl_keyfile,
        "ca-certs": config.ssl_ca_certs,
    }
    paths = [Path(file) for file in files.values() if file is not None]
    if not paths:
        return None
    for name, path in zip(files, paths, strict=True):
        if not path.is_file():
            raise UsageError(f"--cluster-ssl-{name}: there is no file {path}")
    # nodes and processes have working directories of their own
    certificate, key, ca = (path.absolute() for path in paths)
    tls = MutualTls(certificate=certificate, key=key, ca=ca)
    try:
        tls.check()
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"processes with these certificates would not hear each other ({error}): --cluster-ssl-certfile "
            f"names the DNS name {CLUSTER_NAME}, and --cluster-ssl-ca-certs has signed it"
        ) from error
    return tls


def _tls(edge: EdgeConfig) -> Tls | None:
    if edge.ssl_certfile is None or edge.ssl_keyfile is None:
        return None
    certificate, key = Path(edge.ssl_certfile), Path(edge.ssl_keyfile)
    client_ca = None if edge.ssl_ca_certs is None else Path(edge.ssl_ca_certs)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for option, path in (("certfile", certificate), ("keyfile", key), ("ca-certs", client_ca)):
        if path is not None and not path.is_file():
            raise UsageError(f"--ssl-{option}: there is no file {path}")
    try:
        context.load_cert_chain(certificate, key)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"{certificate} and {key} are no certificate in PEM with its key ({error}): check --ssl-certfile,"
            " --ssl-keyfile and --ssl-ca-certs"
        ) from error
    return Tls(certificate=certificate, key=key, client_ca=client_ca)
