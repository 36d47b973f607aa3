"""Refuses, where there are no keys, requests and commands that pages of other sites send from a user's
browser, and orders of operators that come from another machine.

A page may send a form anywhere; its browser names the page's site in `Origin`.
A site may also point its name to this machine (DNS rebinding): its pages then use that name in `Host`.
"""

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from tidemill.cluster.edge.requests.api_keys import OPERATORS_PATHS, ApiKeys
from tidemill.workers.messages import RequestError

READS = frozenset({"GET", "HEAD", "OPTIONS"})
"""The methods that another site may use: it cannot read the reply."""

PRIVATE_PATHS = ("/cluster/support", "/cluster/edges")
"""The paths whose reads are for operators, too: logs, settings, and who joins."""

KEYS_FIX = "serve with --api-key"


def check_site(
    method: str, server: str, headers: Mapping[str, str], allowed_origins: Collection[str] = ()
) -> None:
    """Check a request; `server` is the address that it reached. Raises RequestError (403)."""
    host, origin = headers.get("host", ""), headers.get("origin")
    is_foreign = origin is not None and origin.partition("://")[2] != host
    if is_foreign and method not in READS and not {origin, "*"}.intersection(allowed_origins):
        raise RequestError(
            f"a page of another site may ask nothing without an API key: {KEYS_FIX} or --allowed-origins",
            status=403,
            code="foreign_origin",
        )
    name = _name_of(host)
    if name and _is_loopback(server) and not _is_local(name):
        raise RequestError(
            f"this server listens on {server}, not as {name[:64]}: ask for localhost, or {KEYS_FIX}",
            status=403,
            code="unknown_host",
        )


def check_operator(method: str, path: str, server: str, client: str) -> None:
    """Check a request from the address `client`, empty for a Unix socket. Raises RequestError (403)."""
    is_order = path.startswith(OPERATORS_PATHS) and (method not in READS or path.startswith(PRIVATE_PATHS))
    if is_order and client and client != server and not _is_loopback(client):
        raise RequestError(
            f"without API keys, {path} is for clients on the server's own machine: {KEYS_FIX}, or with "
            "--api-keys-file and a key of an operator",
            status=403,
            code="not_an_operator",
        )


def open_line(host: str, keys: ApiKeys) -> str | None:
    """Return a line for the log of an endpoint that other machines reach without keys."""
    if keys.are_needed or _is_local(host):
        return None
    return (
        f"everyone who reaches {host} may ask, because there are no API keys; orders of operators are taken "
        "from this machine alone: to allow others, serve with --api-keys-file and a key of an operator"
    )


def _name_of(host: str) -> str:
    """Return the host without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets around nothing
        return host


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.removeprefix("::ffff:")).is_loopback
    except ValueError:
        return False


def _is_local(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)
