"""The edges that may join, or have joined, by a token, and the revoked certificates. Pure.

The supervisor keeps them in its journal. A secret is kept as its digest, and no private key is here.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256

from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError

NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
SERIAL = re.compile(r"[0-9a-f]{8,40}")

KEPT_S = 7 * 86_400.0
"""The time for which an edge is listed after all that it had has expired."""

NEW = "make a new one with `tidemill join-token`"


class JoinRefused(TidemillError):
    """The cluster gives this edge no certificate; the message is one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningEdge:
    """An edge. The token admits one public key, that of `key_sha256` once it was used. `serials` has the end
    of each certificate in unix time, by serial in hexadecimal digits."""

    token: str
    secret_sha256: str
    until_s: float  # unix time
    key_sha256: str = ""
    serials: Mapping[str, float] = field(default_factory=dict[str, float])
    revoked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """All edges by name, and the end of each revoked certificate in unix time, by serial; 0: unknown."""

    edges: Mapping[str, JoiningEdge] = field(default_factory=dict[str, JoiningEdge])
    revoked: Mapping[str, float] = field(default_factory=dict[str, float])

    def with_token(self, name: str, member: JoiningEdge, now_s: float) -> "Members":
        """Add an edge with a new token. Raises RequestError for a name that is in use."""
        if NAME.fullmatch(name) is None:
            raise RequestError(
                f"{name!r} is no name of an edge: use up to 63 of a-z, 0-9 and -", param="name", status=400
            )
        known = self._pruned(now_s)
        before = known.edges.get(name)
        if before is not None and not before.revoked and max(before.until_s, *_ends(before)) > now_s:
            raise RequestError(
                f"an edge {name} has a token or a certificate: give another name, or revoke it first",
                param="name",
                status=409,
            )
        return replace(known, edges={**known.edges, name: member})

    def admitted(self, token: str, secret: str, key_sha256: str, now_s: float) -> tuple[str, "Members"]:
        """Use a token for a public key; the same key may use it again, for the answer may have been lost.
        Return the name of the edge. Raises JoinRefused."""
        digest = sha256(secret.encode()).hexdigest()
        named = {member.token: name for name, member in self.edges.items()}
        if token not in named or not hmac.compare_digest(self.edges[named[token]].secret_sha256, digest):
            raise JoinRefused(f"the token is not one of this cluster: {NEW}")
        name = named[token]
        member = self.edges[name]
        if member.revoked:
            raise JoinRefused(f"the token of {name} was revoked: {NEW}")
        if member.key_sha256 not in {"", key_sha256}:
            raise JoinRefused(f"the token of {name} was used by another edge, for it admits one: {NEW}")
        if member.until_s <= now_s:
            raise JoinRefused(f"the token of {name} has expired: {NEW}")
        used = replace(member, key_sha256=key_sha256)
        return name, replace(self, edges={**self.edges, name: used})

    def renewing(self, serial: str, key_sha256: str) -> str:
        """Return the edge that may renew the certificate of this serial. Raises JoinRefused."""
        if serial in self.revoked:
            raise JoinRefused("the certificate of this edge was revoked")
        for name, member in self.edges.items():
            if serial in member.serials and member.key_sha256 == key_sha256:
                return name
        raise JoinRefused(f"the certificate of this edge is not one of a token: {NEW}")

    def certified(self, name: str, serial: str, until_s: float, now_s: float) -> "Members":
        known = self._pruned(now_s)
        member = known.edges[name]
        with_it = replace(member, serials={**member.serials, serial: until_s})
        return replace(known, edges={**known.edges, name: with_it})

    def without(self, what: str, now_s: float) -> "Members":
        """Revoke the token and all certificates of an edge, by its name or one of their serials, or any other
        certificate of the cluster by its serial. Raises RequestError."""
        known = self._pruned(now_s)
        serial = what.lower().replace(":", "").lstrip("0")
        for name, member in known.edges.items():
            if what == name or serial in member.serials:
                edges = {**known.edges, name: replace(member, revoked=True)}
                return Members(edges=edges, revoked={**known.revoked, **member.serials})
        if SERIAL.fullmatch(serial) is None:
            names = ", ".join(sorted(known.edges)) or "none"
            raise RequestError(
                f"{what} is neither an edge that joined by a token ({names}) nor a hexadecimal serial",
                param="name",
                status=404,
            )
        return replace(known, revoked={**known.revoked, serial: 0.0})

    def _pruned(self, now_s: float) -> "Members":
        edges = {
            name: replace(member, serials={key: end for key, end in member.serials.items() if end > now_s})
            for name, member in self.edges.items()
            if max(member.until_s, *_ends(member)) > now_s - KEPT_S
        }
        revoked = {serial: end for serial, end in self.revoked.items() if not end or end > now_s}
        return Members(edges=edges, revoked=revoked)


def _ends(member: JoiningEdge) -> tuple[float, ...]:
    return (0.0, *member.serials.values())
