"""From the text of an option to an open page store: one, or a chain of tiers, the nearest first.

    memory:                  inside this process: for tests, and as the nearest tier
    file:///path or a path   a folder, which several processes may share
    mooncake://host:port     the store of the Mooncake master there

Options follow, as in file:///path?size=8GiB&write=hits; docs/store.md says what they are for.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.stores.circuit_breaker import GuardedStore
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.kvstore.stores.mooncake_store import Transport, open_mooncake
from tidemill.kvstore.stores.page_store import PageStore
from tidemill.kvstore.stores.remote_store import LEASE_S
from tidemill.kvstore.stores.seal import PLAIN, Sealing
from tidemill.kvstore.stores.store_kinds import KINDS, StoreKind, find_kind
from tidemill.kvstore.stores.tiered_store import Tier, TieredStore, Write

_MEMORY_BYTES = 1 << 30
_FILE_BYTES_MAX = 8 << 30
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|)")


def open_store(url: str, sealing: Sealing = PLAIN) -> PageStore:
    """One tier, or several with commas between them. Blocking. Raises StoreError that names the fix.

    Without a size, memory is 1 GiB, and files are 8 GiB or half of their file system, whichever is less.
    """
    texts = _texts(url)
    policies = [text.write() for text in texts]
    opened: dict[int, PageStore] = {}
    for index in sorted(range(len(texts)), key=lambda index: texts[index].kind.has_server):
        opened[index] = _open(texts[index], sealing)  # what would need closing if another fails comes last
    tiers = [Tier(opened[index], policy) for index, policy in enumerate(policies)]
    return tiers[0].store if policies == [Write.ALL] else TieredStore(tiers)


def check_url(url: str) -> None:
    """Raises the StoreError that `open_store` would, as far as the text alone tells; opens nothing."""
    for text in _texts(url):
        text.write()
        text.size_bytes(0)
        if "timeout" in text.kind.options:
            text.timeout_s()
        if "lease" in text.kind.options:
            text.lease_s()
        if "protocol" in text.kind.options:
            text.transport()


def _texts(url: str) -> "list[_Text]":
    texts = [_Text.of(tier) for tier in url.split(",")]
    for text in texts[1:]:
        if not text.kind.is_shared:
            raise text.error(f"{text.kind.scheme} is nearer than all other tiers: name it first")
    return texts


@dataclass(frozen=True, slots=True)
class _Text:
    """What a person has written about one tier."""

    text: str
    kind: StoreKind
    parts: SplitResult
    options: Mapping[str, str]

    @classmethod
    def of(cls, text: str) -> "_Text":
        parts = urlsplit(text)
        kind = find_kind(text)
        options = parse_qsl(parts.query, keep_blank_values=True)
        if kind is None or (text and not parts.scheme and kind.scheme == "file" and "/" not in parts.path):
            *examples, last = (known.example for known in KINDS.values())
            fix = f"use {', '.join(examples)} or {last}"
            raise StoreError(f"store {text}: there is no store {parts.scheme or text!r}: {fix}")
        made = cls(text, kind, parts, dict(options))
        unknown = [name for name, _ in options if name not in kind.options]
        if set(kind.server_options) & set(unknown):
            *names, last = kind.server_options
            raise made.error(f"{', '.join(names)} and {last} are for those who start it: tidemill serve")
        if unknown:
            raise made.error(
                f"there is no option {unknown[0]!r}: {kind.scheme} has {', '.join(kind.options)}"
            )
        twice = [name for name in made.options if [given for given, _ in options].count(name) > 1]
        if twice:
            raise made.error(f"{twice[0]} is given twice: leave one")
        return made

    def error(self, fix: str) -> StoreError:
        return StoreError(f"store {self.text}: {fix}")

    def size_bytes(self, otherwise: int) -> int:
        try:
            size_bytes = parse_bytes(self.options["size"]) if "size" in self.options else otherwise
        except ValueError as error:
            raise self.error(str(error)) from error
        return size_bytes

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
        """The first one where nothing is given."""
        given = self.options.get(name, choices[0])
        if given not in choices:
            raise self.error(f"{name} is {' or '.join(choices)}, not {given!r}")
        return given

    def _seconds(self, name: str, otherwise: float) -> float:
        if name not in self.options:
            return otherwise
        match = _SECONDS.fullmatch(self.options[name])
        seconds = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else 0.0
        if seconds <= 0:
            raise self.error(f"{name} is a time: write it like 250ms or 2s")
        return seconds


def _open(text: _Text, sealing: Sealing) -> PageStore:
    match text.kind.scheme:
        case "memory":
            return MemoryStore(text.size_bytes(_MEMORY_BYTES), sealing)
        case "file":
            parts = text.parts
            if parts.netloc or parts.fragment or not parts.path:
                raise text.error("a folder is written with three slashes: file:///path?size=8GiB")
            folder = Path(unquote(parts.path) if parts.scheme else parts.path)
            timeout_s, size_bytes = text.timeout_s(), text.size_bytes(_default_bytes(folder))
            return GuardedStore(FileStore(folder, size_bytes, sealing=sealing), timeout_s)
        case _:
            return _open_mooncake(text, sealing)


def _open_mooncake(text: _Text, sealing: Sealing) -> PageStore:
    if not text.parts.netloc:
        raise text.error(
            "only tidemill serve starts a master: join one with mooncake://host:port, or use file:///path"
        )
    timeout_s = text.timeout_s()
    store = open_mooncake(
        text.parts.netloc,
        transport=text.transport(),
        admin=text.options.get("admin", ""),
        lease_s=text.lease_s(),
        sealing=sealing,
    )
    return GuardedStore(store, timeout_s)


def _default_bytes(folder: Path) -> int:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    return min(_FILE_BYTES_MAX, shutil.disk_usage(there).total // 2)
