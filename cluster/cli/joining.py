"""`tidemill join-token` and `tidemill revoke`, and the token of `tidemill edge`."""

import argparse
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from tidemill.cluster.cli.fleet import CommandContext, add_server_command, show
from tidemill.cluster.cli.options.arguments import UsageError
from tidemill.cluster.cli.options.server_address import ServerAddress
from tidemill.cluster.mutual_tls import MutualTls

if TYPE_CHECKING:
    from tidemill.cluster.processes.joining.credentials import Credentials

TOKEN_VARIABLE = "TIDEMILL_JOIN_TOKEN"  # noqa: S105 - its name
TOKEN_S = 3600.0


def add_joining_commands(add_parser: Callable[..., argparse.ArgumentParser], context: CommandContext) -> None:
    text = "make a one-time token, with which an edge gets a certificate of the cluster"
    token = add_server_command(add_parser, context, "join-token", _join_token, text)
    token.add_argument("name", nargs="?", metavar="NAME", help="the name of the edge (a random one)")
    token.add_argument(
        "--expires-in",
        type=float,
        default=TOKEN_S,
        metavar="SECONDS",
        help="the life of the token (%(default)g)",
    )
    text = "revoke an edge or a certificate of the cluster, or list the edges that have joined by tokens"
    revoke = add_server_command(add_parser, context, "revoke", _revoke, text)
    revoke.add_argument(
        "name", nargs="?", metavar="NAME|SERIAL", help="an edge with its token and certificates, or a serial"
    )


def credentials_of(
    addresses: tuple[str, ...],
    token: str,
    tls: MutualTls | None,
    cache_folder: Path,
    unix_time_s: Callable[[], float],
) -> "Credentials":
    """Return the credentials that an edge gets by a token. Raises UsageError and TokenError."""
    from tidemill.cluster.processes.joining.credentials import Credentials  # noqa: PLC0415 - cryptography
    from tidemill.cluster.processes.joining.token import Token  # noqa: PLC0415 - only with a token

    if tls is not None:
        raise UsageError(
            "--token gets a certificate: leave out --cluster-ssl-certfile, -keyfile and -ca-certs"
        )
    parsed = Token.parse(token)
    folder = cache_folder / "joined" / f"{parsed.fingerprint[:16]}-{parsed.name}"
    return Credentials(addresses=addresses, token=parsed, folder=folder, unix_time_s=unix_time_s)


def _join_token(options: argparse.Namespace, server: ServerAddress, _: CommandContext) -> int:
    from tidemill.cluster.cli.status import ask_server  # noqa: PLC0415 - httpx

    if not 0 < options.expires_in <= 7 * 86_400:
        raise UsageError(f"--expires-in {options.expires_in:g}: give more than 0 seconds, and a week at most")
    name = options.name or f"edge-{secrets.token_hex(3)}"
    body = {"name": name, "life_s": options.expires_in}
    made = ask_server(server, "POST", "/cluster/edges", answer="token", body=body)
    if options.json:
        show(options, {"name": name, "token": made["token"], "join": made["join"]}, "")
        return 0
    sys.stderr.write(f"a token for one edge, {name}, for {options.expires_in:g} s; it is shown only now\n")
    sys.stdout.write(f"tidemill edge --join {made['join']} --token {made['token']}\n")
    return 0


def _revoke(options: argparse.Namespace, server: ServerAddress, _: CommandContext) -> int:
    from tidemill.cluster.cli.status import ask_server  # noqa: PLC0415 - httpx

    if options.name is None:
        found = ask_server(server, "GET", "/cluster/edges", answer="edges")
    else:
        body = {"name": options.name}
        found = ask_server(server, "POST", "/cluster/edges/revoke", answer="edges", body=body)
    show(options, {"edges": found["edges"]}, render_edges(found["edges"]))
    return 0


def render_edges(edges: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Render a row for each edge and each certificate."""
    from tidemill.cluster.cli.status import table  # noqa: PLC0415 - httpx

    if not edges:
        return Text("no edge has a token: `tidemill join-token` makes one")
    rows = table(("edge", "state", "serial", "until"), num_left=4)
    for edge in edges:
        known = edge["serials"] or {"": edge["token_until_s"]}
        for serial, until_s in known.items():
            until = f"{datetime.fromtimestamp(until_s, UTC):%Y-%m-%d %H:%M}Z" if until_s else "-"
            rows.add_row(*map(Text, (edge["name"] or "-", edge["state"], serial or "-", until)))
    return Group(rows)
