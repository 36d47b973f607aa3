"""What `serve --store URL` starts for a store, and the URL that its workers get. Decides, starts nothing.

    mooncake[?size=8GiB&port=N&host=H]  a master and an owner of memory here
    mooncake://h:p                      joins the master at h:p
    mooncake://h:p?size=4GiB[&host=H]   joins it and lends memory of this host

`host` is an address or an interface of this machine, where they listen. All other options are for whoever
opens the store, and stay in the URL; so do tiers of other kinds.
"""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

import psutil

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.stores.mooncake_store import SEGMENT_BYTES_MIN

KIND = "mooncake"
LOOPBACK = "127.0.0.1"
SIZE_BYTES_MAX = 8 << 30
"""Without a size: this, or a quarter of the machine's memory if that is less."""

OURS = ("size", "port", "host")
"""Options that end here."""

TRANSPORT = ("protocol", "device", "ports")
"""Options of the URL that an owner needs as much as the users of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """The ports are free now, and stay the same for all its lives."""

    host: str
    port: int
    admin_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOwner:
    """The process that lends `num_bytes` of this machine to the master at `master`."""

    master: str  # host:port
    host: str  # where it listens itself; empty: at the address from which it reaches the master
    num_bytes: int
    transport: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """`url` opens the store; `joined` is the master that must be there already."""

    url: str
    master: Master | None = None
    owner: MemoryOwner | None = None
    joined: str = ""  # HOST:PORT

    @property
    def has_mooncake(self) -> bool:
        return self.master is not None or self.joined != ""


def plan_store(url: str) -> StorePlan:
    """Raises StoreError with one line that names the fix."""
    tiers = url.split(",")
    ours = [index for index, tier in enumerate(tiers) if _is_mooncake(tier)]
    if not ours:
        return StorePlan(url=url)
    if len(ours) > 1:
        raise StoreError(f"store {url}: one tier can be Mooncake, here are {len(ours)}: leave one")
    plan = _plan_tier(tiers[ours[0]])
    tiers[ours[0]] = plan.url
    return StorePlan(url=",".join(tiers), master=plan.master, owner=plan.owner, joined=plan.joined)


def check_shared(url: str) -> None:
    """Raises StoreError for one that its users cannot share."""
    if all(tier.startswith("memory") for tier in url.split(",")):
        raise StoreError("store memory: is inside one process: give workers a folder, file:///path?size=8GiB")


def other_tiers(url: str) -> str:
    """The tiers of `url` that are not Mooncake; they can be opened and closed for a look."""
    return ",".join(tier for tier in url.split(",") if not _is_mooncake(tier))


def _is_mooncake(tier: str) -> bool:
    return tier.partition("?")[0].partition(":")[0] == KIND


def _plan_tier(tier: str) -> StorePlan:
    parts = urlsplit(tier)
    if parts.scheme and not parts.netloc and parts.path:
        raise StoreError(f"store {tier}: a master that runs is written mooncake://host:port")
    options = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in options if name in OURS}
    left = [(name, value) for name, value in options if name not in OURS]
    if len(ours) + len(left) < len(options):
        raise StoreError(f"store {tier}: {', '.join(OURS)} are given once")
    host = _host(tier, ours.get("host"))
    master, joined = None, ""
    if parts.netloc:
        address = joined = _joined(tier, ours)
    else:
        host = host or LOOPBACK
        master = Master(
            host=host, port=_port(tier, ours.get("port"), host), admin_port=_free_port(tier, host)
        )
        address = f"{host}:{master.port}"
    if joined and "host" in ours and "size" not in ours:
        raise StoreError(f"store {tier}: host is where an owner of memory listens: give it a size= to lend")
    owner = None
    if "size" in ours or master is not None:
        owner = MemoryOwner(
            master=address,
            host=host or "",
            num_bytes=_size(tier, ours.get("size")),
            transport=tuple((name, value) for name, value in left if name in TRANSPORT),
        )
    if master is not None:
        left.append(("admin", f"{host}:{master.admin_port}"))
    query = urlencode(left, safe="/:")
    url = f"{KIND}://{address}" + (f"?{query}" if query else "")
    return StorePlan(url=url, master=master, owner=owner, joined=joined)


def _joined(tier: str, ours: Mapping[str, str]) -> str:
    parts = urlsplit(tier)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or "port" in ours:
        raise StoreError(f"store {tier}: a master that runs is written mooncake://host:port")
    return f"{parts.hostname}:{port}"


def _size(tier: str, text: str | None) -> int:
    memory_bytes = psutil.virtual_memory().total
    if text is None:
        return min(SIZE_BYTES_MAX, memory_bytes // 4)
    try:
        size_bytes = parse_bytes(text)
    except ValueError as error:
        raise StoreError(f"store {tier}: {error}") from error
    if not SEGMENT_BYTES_MIN <= size_bytes <= memory_bytes:
        least, most = SEGMENT_BYTES_MIN >> 20, memory_bytes >> 20
        raise StoreError(
            f"store {tier}: size is of memory: {least} MiB or more, and this machine has {most} MiB"
        )
    return size_bytes


def _host(tier: str, text: str | None) -> str | None:
    """The address that `text` is, or that the interface `text` has."""
    if text is None:
        return None
    interface = psutil.net_if_addrs().get(text, [])
    address = next((one.address for one in interface if one.family == socket.AF_INET), text)
    try:
        usable = not ipaddress.IPv4Address(address).is_unspecified
    except ValueError:
        usable = False
    if not usable:
        raise StoreError(
            f"store {tier}: host {text} is no IPv4 address and no interface that workers can connect to"
        )
    return address


def _port(tier: str, text: str | None, host: str) -> int:
    if text is None:
        return _free_port(tier, host)
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise StoreError(f"store {tier}: port {text} is no port: leave it out, and a free one is taken")
    return _free_port(tier, host, int(text))


def _free_port(tier: str, host: str, port: int = 0) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StoreError(
                f"store {tier}: cannot listen on {host}:{port} ({error}): give another port= or host="
            ) from error
        return probe.getsockname()[1]
