"""Options about who may ask: API keys and TLS, of `tidemill serve` and of the commands that ask a server."""

import argparse
import secrets
import ssl
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from tidemill.cluster.cli_files import UsageError
from tidemill.cluster.http.keys import Key, digest_of, read_keys
from tidemill.cluster.mutual_tls import CLUSTER_NAME, MutualTls
from tidemill.cluster.security import Security, Server, Tls
from tidemill.cluster.settings import ClusterSettings

KEY_VARIABLE = "TIDEMILL_API_KEY"
TENANT_OF_OPTIONS = "operator"

ClusterHost = Literal["loopback", "node", "node-plain"]


def add_security_options(serve: argparse.ArgumentParser) -> None:
    security = serve.add_argument_group("security")
    security.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"only who brings it may ask, and give orders; several times for several (${KEY_VARIABLE})",
    )
    security.add_argument(
        "--api-keys-file",
        type=Path,
        metavar="PATH",
        help="YAML with digests of keys, their tenants and rates: `tidemill key TENANT` makes an entry",
    )
    security.add_argument(
        "--ssl-certfile",
        type=Path,
        metavar="PATH",
        help="serve HTTPS with this certificate, and gRPC",
    )
    security.add_argument("--ssl-keyfile", type=Path, metavar="PATH", help="its private key")
    security.add_argument(
        "--ssl-ca-certs", type=Path, metavar="PATH", help="clients must show a certificate signed by these"
    )
    inside = serve.add_argument_group("security between the cluster's processes")
    inside.add_argument(
        "--cluster-host",
        choices=get_args(ClusterHost),
        default="loopback",
        help="where routers and workers listen: inside their machine; at their node's address, with the "
        "certificates below; or there in plain, for networks that nobody else can reach (%(default)s)",
    )
    inside.add_argument(
        "--cluster-ssl-certfile",
        type=Path,
        metavar="PATH",
        help=f"of every process, on every node; it names {CLUSTER_NAME}",
    )
    inside.add_argument("--cluster-ssl-keyfile", type=Path, metavar="PATH", help="its private key")
    inside.add_argument(
        "--cluster-ssl-ca-certs",
        type=Path,
        metavar="PATH",
        help="who has a certificate signed by these is of the cluster",
    )


def security_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Security:
    """Raises TidemillError."""
    given: list[str] = options.api_key or [key for key in (environ.get(KEY_VARIABLE),) if key]
    if not all(given):
        raise UsageError("--api-key is empty: give a long random text, as `tidemill key` makes one")
    keys = [Key(tenant=TENANT_OF_OPTIONS, sha256=digest_of(key), operator=True) for key in given]
    if options.api_keys_file is not None:
        keys += read_keys(options.api_keys_file)
    return Security(keys=tuple(keys), tls=_tls(options))


def add_key_options(key: argparse.ArgumentParser) -> None:
    key.add_argument("tenant", metavar="TENANT", help="who asks with it")
    key.set_defaults(run=_key)


def add_server_options(command: argparse.ArgumentParser) -> None:
    """Of a command that asks a running server."""
    command.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (%(default)s)")
    command.add_argument("--api-key", metavar="KEY", help=f"of an operator (${KEY_VARIABLE})")


def server_of(options: argparse.Namespace, environ: Mapping[str, str]) -> Server:
    return Server(options.url, options.api_key or environ.get(KEY_VARIABLE, ""))


def _key(options: argparse.Namespace) -> int:
    """A new key, and what a server has to know of it."""
    key = f"sk-{secrets.token_urlsafe(32)}"
    try:
        known = Key(tenant=options.tenant, sha256=digest_of(key))
    except ValueError:
        raise UsageError(f"TENANT {options.tenant!r}: use up to 64 letters, digits, - _ and .") from None
    sys.stderr.write("the key, which is told once; below it what --api-keys-file has under `keys:`\n")
    sys.stdout.write(f"{key}\n- tenant: {known.tenant}\n  sha256: {known.sha256}\n")
    return 0


def guarded(settings: ClusterSettings, options: argparse.Namespace) -> ClusterSettings:
    """The same cluster, listening where `options` say and with their certificates. Raises UsageError."""
    tls = _cluster_tls(options)
    where: ClusterHost = options.cluster_host
    if where == "node" and tls is None:
        raise UsageError(
            "--cluster-host node lets other machines reach routers and workers: give certificates with "
            "--cluster-ssl-certfile, --cluster-ssl-keyfile and --cluster-ssl-ca-certs, or say node-plain if "
            "nobody else can reach that network"
        )
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


def _cluster_tls(options: argparse.Namespace) -> MutualTls | None:
    given = {
        name: getattr(options, f"cluster_ssl_{name.replace('-', '_')}")
        for name in ("certfile", "keyfile", "ca-certs")
    }
    if all(path is None for path in given.values()):
        return None
    for name, path in given.items():
        if path is None:
            raise UsageError(
                f"--cluster-ssl-{name} is missing: certificates between processes take all three"
            )
        if not path.is_file():
            raise UsageError(f"--cluster-ssl-{name}: there is no file {path}")
    # nodes and processes have working directories of their own
    certificate, key, ca = (path.absolute() for path in given.values())
    tls = MutualTls(certificate=certificate, key=key, ca=ca)
    try:
        tls.check()
    except (ssl.SSLError, OSError) as error:
        raise UsageError(
            f"processes with these certificates would not hear each other ({error}): --cluster-ssl-certfile "
            f"names the DNS name {CLUSTER_NAME}, and --cluster-ssl-ca-certs has signed it"
        ) from error
    return tls


def _tls(options: argparse.Namespace) -> Tls | None:
    certificate, key, client_ca = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise UsageError("HTTPS takes --ssl-certfile and --ssl-keyfile together")
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
