"""The API keys and TLS of `tidemill serve`, and the API key of the commands that call a server."""

import argparse
import secrets
import ssl
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.config.tree import ClusterConfig, EdgeConfig
from tidemill.cluster.edge.requests.api_keys import ApiKey, KeysFile, digest_of
from tidemill.cluster.edge.requests.security import Security, Tls
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.settings import ClusterSettings

if TYPE_CHECKING:
    from tidemill.cluster.processes.system.private_folder import DetachedServer

KEY_VARIABLE = "TIDEMILL_API_KEY"
SERVER_URL = "http://127.0.0.1:8000"
TENANT_OF_OPTIONS = "operator"


def security_of(edge: EdgeConfig, api_keys: Sequence[str] | None, environ: Mapping[str, str]) -> Security:
    """Return the API keys and the TLS settings of an endpoint. Raises TidemillError."""
    given = api_keys or [key for key in (environ.get(KEY_VARIABLE),) if key]
    if not all(given):
        raise UsageError("--api-key is empty: give a long random text, like one of `tidemill key`")
    keys = [ApiKey(tenant=TENANT_OF_OPTIONS, sha256=digest_of(key), operator=True) for key in given]
    if edge.api_keys_file is None:
        return Security(keys=tuple(keys), tls=endpoint_tls(edge))
    keys_file = KeysFile(path=Path(edge.api_keys_file), others=tuple(keys))
    return Security(keys=keys_file.read(), keys_file=keys_file, tls=endpoint_tls(edge))


def add_key_options(key: argparse.ArgumentParser) -> None:
    key.add_argument("tenant", metavar="TENANT", help="the tenant that will use the key")
    key.set_defaults(run=_key)


def add_server_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a command that calls a running server."""
    command.add_argument("--url", help=f"the server (a detached one of this machine, or {SERVER_URL})")
    command.add_argument("--api-key", metavar="KEY", help=f"an operator's API key (${KEY_VARIABLE})")


def server_address(options: argparse.Namespace, environ: Mapping[str, str]) -> ServerAddress:
    url = options.url
    if url is None:
        server = find_detached()
        url = SERVER_URL if server is None else server.url
    return ServerAddress(url, options.api_key or environ.get(KEY_VARIABLE, ""))


def find_detached(url: str | None = None) -> "DetachedServer | None":
    """Return the detached server of this user at `url`, or the only one, None without any. One whose Ray has
    ended is removed. Raises UsageError if there are several."""
    from tidemill.cluster.processes.system.private_folder import (  # noqa: PLC0415 - psutil
        detached_servers,
        remove_abandoned,
    )

    temp_folder = Path(tempfile.gettempdir())
    known = [server for server in detached_servers(temp_folder) if url in {None, server.url}]
    for server in known:
        if not server.is_running():
            sys.stderr.write(
                f"tidemill: the detached server at {server.url} has ended: what it left is removed\n"
            )
            remove_abandoned({Path(folder).parent for folder in (server.root, server.store) if folder})
    running = [server for server in known if server.is_running()]
    if len(running) > 1:
        urls = " and ".join(server.url for server in running)
        raise UsageError(f"detached servers run at {urls}: give the --url of one")
    return running[0] if running else None


def _key(options: argparse.Namespace) -> int:
    """Print a new key and its entry for the server's file of keys."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        known = ApiKey(tenant=options.tenant, sha256=digest_of(key))
    except ValueError:
        raise UsageError(f"TENANT {options.tenant!r}: use up to 64 letters, digits, - _ and .") from None
    sys.stderr.write("the key, which is shown only now, and its entry under `keys:` in --api-keys-file\n")
    sys.stdout.write(f"{key}\n- tenant: {known.tenant}\n  sha256: {known.sha256}\n")
    return 0


def with_cluster_security(settings: ClusterSettings, config: ClusterConfig) -> ClusterSettings:
    """Return the settings with the listening address and certificates of `config`. Raises UsageError."""
    tls = cluster_tls(config)
    host = "127.0.0.1" if config.host == "loopback" else None
    if config.ssl_ca_keyfile is not None and tls is not None:
        settings = _with_authority(settings, Path(config.ssl_ca_keyfile).absolute(), tls.ca)
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


def _with_authority(settings: ClusterSettings, key: Path, ca: Path) -> ClusterSettings:
    """Return the settings with the key that signs for edges, and a port for them after those of the routers.
    Raises AuthorityError."""
    from tidemill.cluster.processes.joining.authority import Authority  # noqa: PLC0415 - cryptography

    Authority(key, ca)
    ports = [port for fleet in settings.fleets for port in fleet.router.ports]
    first, *others = settings.fleets
    first = replace(first, router=replace(first.router, join_port=max(ports, default=-1) + 1))
    return replace(settings, fleets=(first, *others), authority_key=key)


def cluster_tls(config: ClusterConfig) -> MutualTls | None:
    """Return the certificates between the cluster's processes, None without some. Raises UsageError."""
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
    # Absolute, because nodes and processes have different working directories.
    certificate, key, ca = (path.absolute() for path in paths)
    tls = MutualTls(certificate=certificate, key=key, ca=ca)
    try:
        tls.check()
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"processes with these certificates cannot connect to each other ({error}): "
            f"--cluster-ssl-certfile must have the DNS name {CLUSTER_NAME}, signed by --cluster-ssl-ca-certs"
        ) from error
    return tls


def endpoint_tls(edge: EdgeConfig) -> Tls | None:
    """Return the TLS settings of an endpoint. Raises UsageError."""
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
            f"{certificate} and {key} are not a certificate and its key in PEM ({error}): "
            "check --ssl-certfile, --ssl-keyfile and --ssl-ca-certs"
        ) from error
    return Tls(certificate=certificate, key=key, client_ca=client_ca)
