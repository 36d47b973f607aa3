"""Open the page store of a URL: one store, or a chain of tiers, the nearest first.

    memory:                  memory of this process, for tests and as the nearest tier
    file:///path or a path   a folder, which several processes may share
    mooncake://host:port     the store of the Mooncake master at this address

Options follow, as in file:///path?size=8GiB&write=hits; docs/store.md describes them. A kind of
store is one row of `KINDS`, which cluster/processes/store_plan.py reads, too.
"""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.stores.circuit_breaker import TIMEOUT_S, GuardedStore
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.mooncake_store import Transport, open_mooncake
from tidemill.kvstore.stores.page_store import PageStore
from tidemill.kvstore.stores.remote_store import LEASE_S
from tidemill.kvstore.stores.seal import PLAIN, Sealing
from tidemill.kvstore.stores.tiered_store import Tier, TieredStore, Write


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """The facts about a kind of store; `options` are the options of a URL that a worker opens.

    `server_options` are the options of a URL for `tidemill serve`, which starts a server of the
    store or lends memory to one. Only a kind with a server has some. `lender_options` are those of
    `options` that the process that lends memory needs, too. `timeout_s` is the default timeout;
    None means that no operation can hang.
    """

    scheme: str
    example: str
    open: "Callable[[_TierUrl, Sealing], PageStore]"
    options: tuple[str, ...]
    server_options: tuple[str, ...] = ()
    lender_options: tuple[str, ...] = ()
    timeout_s: float | None
    is_shared: bool = True  # by several processes; if not, it is nearer than all shared tiers

    @property
    def has_server(self) -> bool:
        return bool(self.server_options)


_MEMORY_BYTES = 1 << 30
_FILE_BYTES_MAX = 8 << 30
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|)")


def find_kind(tier: str) -> StoreKind | None:
    """Return the kind of one tier of a store's URL, None if the scheme is unknown; a path is a `file`."""
    parts = urlsplit(tier)
    return KINDS.get(parts.scheme or (parts.path if parts.path in KINDS else "file"))


def is_shared(url: str) -> bool:
    """Return whether several processes can share a tier of the store; an unknown scheme is taken to be
    shared."""
    return any(kind is None or kind.is_shared for kind in map(find_kind, url.split(",")))


def has_server(tier: str) -> bool:
    kind = find_kind(tier)
    return kind is not None and kind.has_server


def open_store(url: str, sealing: Sealing = PLAIN) -> PageStore:
    """Open one tier, or several separated by commas. Blocking. Raises StoreError that names the fix. The
    default size is 1 GiB for memory, and for files 8 GiB or half of their file system if that is less."""
    urls = _parse(url)
    policies = [tier.write() for tier in urls]
    stores: dict[int, PageStore] = {}
    # A store with a server is opened last, because it would need closing if another one failed.
    for index in sorted(range(len(urls)), key=lambda index: urls[index].kind.has_server):
        stores[index] = urls[index].kind.open(urls[index], sealing)
    tiers = [Tier(stores[index], policy) for index, policy in enumerate(policies)]
    return tiers[0].store if policies == [Write.ALL] else TieredStore(tiers)


def check_url(url: str) -> None:
    """Raise the StoreError that `open_store` would raise for the text of the URL; open nothing."""
    for tier in _parse(url):
        tier.write()
        tier.size_bytes(0)
        if "timeout" in tier.kind.options:
            tier.timeout_s()
        if "lease" in tier.kind.options:
            tier.lease_s()
        if "protocol" in tier.kind.options:
            tier.transport()


def _parse(url: str) -> "list[_TierUrl]":
    tiers = [_TierUrl.parse(text) for text in url.split(",")]
    for tier in tiers[1:]:
        if not tier.kind.is_shared:
            raise tier.error(f"{tier.kind.scheme} is nearer than all other tiers: name it first")
    return tiers


@dataclass(frozen=True, slots=True)
class _TierUrl:
    """The parsed URL of one tier."""

    text: str
    kind: StoreKind
    parts: SplitResult
    options: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> "_TierUrl":
        parts = urlsplit(text)
        kind = find_kind(text)
        options = parse_qsl(parts.query, keep_blank_values=True)
        if kind is None or (text and not parts.scheme and kind.scheme == "file" and "/" not in parts.path):
            *examples, last = (known.example for known in KINDS.values())
            fix = f"use {', '.join(examples)} or {last}"
            raise StoreError(f"store {text}: there is no store {parts.scheme or text!r}: {fix}")
        url = cls(text, kind, parts, dict(options))
        unknown = [name for name, _ in options if name not in kind.options]
        if set(kind.server_options) & set(unknown):
            *names, last = kind.server_options
            raise url.error(f"{', '.join(names)} and {last} are for those who start it: tidemill serve")
        if unknown:
            raise url.error(f"there is no option {unknown[0]!r}: {kind.scheme} has {', '.join(kind.options)}")
        duplicates = [name for name in url.options if [given for given, _ in options].count(name) > 1]
        if duplicates:
            raise url.error(f"{duplicates[0]} is given twice: leave one")
        return url

    def error(self, fix: str) -> StoreError:
        return StoreError(f"store {self.text}: {fix}")

    def size_bytes(self, default: int) -> int:
        try:
            return parse_bytes(self.options["size"]) if "size" in self.options else default
        except ValueError as error:
            raise self.error(str(error)) from error

    def write(self) -> Write:
        given = self.options.get("write", Write.ALL.value)
        policies = [policy.value for policy in Write]
        if given not in policies:
            raise self.error(f"write is one of {', '.join(policies)}, not {given!r}")
        return Write(given)

    def timeout_s(self) -> float:
        assert self.kind.timeout_s is not None
        return self._seconds("timeout", self.kind.timeout_s)

    def lease_s(self) -> float:
        return self._seconds("lease", LEASE_S)

    def transport(self) -> Transport:
        protocol, ports = self._one_of("protocol", "tcp", "rdma"), self._one_of("ports", "kept", "open")
        return Transport(protocol, self.options.get("device", ""), is_open=ports == "open")

    def _one_of(self, name: str, *choices: str) -> str:
        """Return the value of an option, by default the first choice."""
        given = self.options.get(name, choices[0])
        if given not in choices:
            raise self.error(f"{name} is {' or '.join(choices)}, not {given!r}")
        return given

    def _seconds(self, name: str, default: float) -> float:
        if name not in self.options:
            return default
        match = _SECONDS.fullmatch(self.options[name])
        seconds = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else 0.0
        if seconds <= 0:
            raise self.error(f"{name} is a time: write it like 250ms or 2s")
        return seconds


def _open_memory(url: _TierUrl, sealing: Sealing) -> PageStore:
    return MemoryStore(url.size_bytes(_MEMORY_BYTES), sealing)


def _open_file(url: _TierUrl, sealing: Sealing) -> PageStore:
    parts = url.parts
    if parts.netloc or parts.fragment or not parts.path:
        raise url.error("a folder is written with three slashes: file:///path?size=8GiB")
    folder = Path(unquote(parts.path) if parts.scheme else parts.path)
    timeout_s, size_bytes = url.timeout_s(), url.size_bytes(_default_bytes(folder))
    return GuardedStore(FileStore(folder, size_bytes, sealing=sealing), timeout_s)


def _open_mooncake(url: _TierUrl, sealing: Sealing) -> PageStore:
    if not url.parts.netloc:
        raise url.error(
            "only tidemill serve starts a master: join one with mooncake://host:port, or use file:///path"
        )
    timeout_s = url.timeout_s()
    store = open_mooncake(
        url.parts.netloc,
        transport=url.transport(),
        admin=url.options.get("admin", ""),
        lease_s=url.lease_s(),
        sealing=sealing,
    )
    return GuardedStore(store, timeout_s)


def _default_bytes(folder: Path) -> int:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return min(_FILE_BYTES_MAX, shutil.disk_usage(existing).total // 2)


KINDS = {
    kind.scheme: kind
    for kind in (
        StoreKind(
            scheme="memory",
            example="memory:?size=1GiB",
            open=_open_memory,
            options=("size", "write"),
            timeout_s=None,
            is_shared=False,
        ),
        StoreKind(
            scheme="file",
            example="file:///path?size=8GiB",
            open=_open_file,
            options=("size", "write", "timeout"),
            timeout_s=2.0,  # a busy disk answers within this time, an unreachable file server does not
        ),
        StoreKind(
            scheme="mooncake",
            example="mooncake://host:port",
            open=_open_mooncake,
            options=("write", "timeout", "lease", "protocol", "device", "ports", "admin"),
            server_options=("size", "port", "host"),
            lender_options=("protocol", "device", "ports"),
            timeout_s=TIMEOUT_S,
        ),
    )
}
