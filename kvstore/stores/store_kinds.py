"""The kinds of page stores, one row each; open_store.py and cluster/supervisor/store_plan.py read
this table."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from tidemill.kvstore.stores.circuit_breaker import TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """The facts about a kind of store. `options` are the options of a URL that a worker opens.

    `server_options` are the options of a URL for `tidemill serve`, which starts a server of the
    store or lends memory to one; only a kind with a server has some. `lender_options` are those of
    `options` that the process that lends memory needs, too. `timeout_s` is the default timeout;
    None means that no operation can hang.
    """

    scheme: str
    example: str
    options: tuple[str, ...]
    server_options: tuple[str, ...] = ()
    lender_options: tuple[str, ...] = ()
    timeout_s: float | None
    is_shared: bool = True  # by several processes; if not, it is nearer than all shared tiers

    @property
    def has_server(self) -> bool:
        return bool(self.server_options)


KINDS = {
    kind.scheme: kind
    for kind in (
        StoreKind(
            scheme="memory",
            example="memory:?size=1GiB",
            options=("size", "write"),
            timeout_s=None,
            is_shared=False,
        ),
        StoreKind(
            scheme="file",
            example="file:///path?size=8GiB",
            options=("size", "write", "timeout"),
            timeout_s=2.0,  # a busy disk answers within this time, an unreachable file server does not
        ),
        StoreKind(
            scheme="mooncake",
            example="mooncake://host:port",
            options=("write", "timeout", "lease", "protocol", "device", "ports", "admin"),
            server_options=("size", "port", "host"),
            lender_options=("protocol", "device", "ports"),
            timeout_s=TIMEOUT_S,
        ),
    )
}


def find_kind(tier: str) -> StoreKind | None:
    """Return the kind of one tier of a store's URL, None if the scheme is unknown; a path is a
    `file`."""
    parts = urlsplit(tier)
    return KINDS.get(parts.scheme or (parts.path if parts.path in KINDS else "file"))


def is_shared(url: str) -> bool:
    """Return whether several processes can share a tier of the store; an unknown scheme is taken to
    be shared."""
    return any(kind is None or kind.is_shared for kind in map(find_kind, url.split(",")))


def has_server(tier: str) -> bool:
    kind = find_kind(tier)
    return kind is not None and kind.has_server
