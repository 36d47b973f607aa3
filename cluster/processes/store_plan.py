"""Decide what `serve --store URL` starts for a store, and which URL its workers get. Starts nothing
itself.

    mooncake[?size=8GiB&port=N&host=H]  start a master and a process that lends it memory, both here
    mooncake://h:p                      join the master at h:p
    mooncake://h:p?size=4GiB[&host=H]   join it and lend it memory of this host

`host` is an address or an interface of this machine to listen on. Options for the users of the
store stay in the URL, as do tiers without a server.
"""

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from urllib.parse import parse_qsl, urlencode, urlsplit

import psutil

from tidemill.cluster.settings import StoreProgram, authority
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.sizes import parse_bytes
from tidemill.kvstore.stores.mooncake_store import SEGMENT_BYTES_MIN
from tidemill.kvstore.stores.open_store import KINDS, has_server, is_shared

MOONCAKE = KINDS["mooncake"]
LOOPBACK = "127.0.0.1"
SIZE_BYTES_MAX = 8 << 30
"""The lent memory if the URL has no size, or a quarter of the machine's memory if that is less."""

MASTER_PORTS = range(30_000, 32_000)
"""No ports of routers, and Linux gives none of them to a connection, which could have a master's port while
it restarts."""


MASTER_OPTIONS = ("--enable_metric_reporting=false", "--logtostderr", "--minloglevel=2", "--client_ttl=4")
"""The memory of an owner that was lost is offered for 4 s more, not for 10: puts that pick it hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """The URL for workers and the programs to run, a master, and an owner that lends it memory of this
    machine; `joined` is the master that must run already."""

    url: str
    programs: tuple[StoreProgram, ...] = ()
    joined: str = ""  # HOST:PORT

    @property
    def has_mooncake(self) -> bool:
        return bool(self.programs or self.joined)


def plan_store(url: str) -> StorePlan:
    """Plan the store of `url`. Raises StoreError with one line that names the fix."""
    tiers = url.split(",")
    served = [index for index, tier in enumerate(tiers) if has_server(tier)]
    if not served:
        return StorePlan(url=url)
    if len(served) > 1:
        raise StoreError(f"store {url}: only one tier can be Mooncake, this has {len(served)}: leave one")
    plan = _plan_tier(tiers[served[0]])
    tiers[served[0]] = plan.url
    return replace(plan, url=",".join(tiers))


def check_shared(url: str) -> None:
    """Raise StoreError if the processes of a server cannot share the store."""
    if not is_shared(url):
        raise StoreError("store memory: is inside one process: give workers a folder, file:///path?size=8GiB")


def other_tiers(url: str) -> str:
    """Return the tiers of `url` without a server, which can be opened and closed as a check."""
    return ",".join(tier for tier in url.split(",") if not has_server(tier))


def _plan_tier(tier: str) -> StorePlan:
    parts = urlsplit(tier)
    if parts.scheme and not parts.netloc and parts.path:
        raise StoreError(f"store {tier}: a running master is written mooncake://host:port")
    options = parse_qsl(parts.query, keep_blank_values=True)
    given = {name: value for name, value in options if name in MOONCAKE.server_options}
    passed = [(name, value) for name, value in options if name not in MOONCAKE.server_options]
    if len(given) + len(passed) < len(options):
        raise StoreError(f"store {tier}: {', '.join(MOONCAKE.server_options)} are given once")
    return _join(tier, given, passed) if parts.netloc else _start(tier, given, passed)


def _start(tier: str, given: Mapping[str, str], passed: Sequence[tuple[str, str]]) -> StorePlan:
    host = _host(tier, given.get("host")) or LOOPBACK
    port = _port(tier, given.get("port"), host)
    admin_port = _free_port(tier, host, (other for other in _shuffled() if other != port))
    address = authority(host, port)
    owner = _owner(address, _size(tier, given.get("size")), [("host", host), *passed])
    return StorePlan(
        url=_url(address, [*passed, ("admin", authority(host, admin_port))]),
        programs=(master_program(host, port, admin_port), owner),
    )


def _join(tier: str, given: Mapping[str, str], passed: Sequence[tuple[str, str]]) -> StorePlan:
    host = _host(tier, given.get("host"))
    address = _joined(tier, given)
    if host is not None and "size" not in given:
        raise StoreError(f"store {tier}: host is where this machine's memory is lent: add the size= to lend")
    lent = [given["size"]] if "size" in given else []
    here = [] if host is None else [("host", host)]
    owners = (_owner(address, _size(tier, size), [*here, *passed]) for size in lent)
    return StorePlan(url=_url(address, passed), programs=tuple(owners), joined=address)


def master_program(host: str, port: int, admin_port: int) -> StoreProgram:
    """Return the program of a master, on ports that are free now and stay the same over restarts. Mooncake
    would listen on every interface, so each socket gets an address."""
    arguments = (
        f"--rpc_address={host}",
        f"--rpc_port={port}",
        f"--metrics_host={host}",
        f"--metrics_port={admin_port}",
        f"--http_metadata_server_host={host}",
        *MASTER_OPTIONS,
    )
    return StoreProgram(
        name="Mooncake master", arguments=("-m", "mooncake.cli", *arguments), port=authority(host, port)
    )


def _owner(master: str, num_bytes: int, options: Sequence[tuple[str, str]]) -> StoreProgram:
    """Return the program that lends memory to the master at HOST:PORT. Without a host among the options it
    listens on the address from which it reaches the master."""
    known = {"host", *MOONCAKE.lender_options}
    given = (f"--{name}={value}" for name, value in options if name in known and value)
    return StoreProgram(
        name="owner of Mooncake's memory",
        arguments=("-m", "tidemill.kvstore.stores.mooncake_memory_owner", master, str(num_bytes), *given),
    )


def _url(address: str, options: Sequence[tuple[str, str]]) -> str:
    query = urlencode(options, safe="/:")
    return f"{MOONCAKE.scheme}://{address}" + (f"?{query}" if query else "")


def _joined(tier: str, given: Mapping[str, str]) -> str:
    parts = urlsplit(tier)
    try:
        port = parts.port
    except ValueError:
        port = None
    if not parts.hostname or not port or "port" in given:
        raise StoreError(f"store {tier}: a running master is written mooncake://host:port")
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
            f"store {tier}: size is the memory to lend: use {least} to {most} MiB, this machine's memory"
        )
    return size_bytes


def _host(tier: str, text: str | None) -> str | None:
    """Return the address `text`, or the address of the interface `text`."""
    if text is None:
        return None
    interface = psutil.net_if_addrs().get(text, [])
    address = next((entry.address for entry in interface if entry.family == socket.AF_INET), text)
    try:
        usable = not ipaddress.IPv4Address(address).is_unspecified
    except ValueError:
        usable = False
    if not usable:
        raise StoreError(
            f"store {tier}: host {text} is neither an IPv4 address nor an interface that workers can reach"
        )
    return address


def _port(tier: str, text: str | None, host: str) -> int:
    if text is None:
        return _free_port(tier, host, _shuffled())
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise StoreError(f"store {tier}: port {text} is no port: leave it out to use a free one")
    return _free_port(tier, host, [int(text)])


def _shuffled() -> list[int]:
    return Random().sample(MASTER_PORTS, len(MASTER_PORTS))  # noqa: S311 - no secret


def _free_port(tier: str, host: str, ports: Iterable[int]) -> int:
    """Return the first one that is free. Raises StoreError."""
    reason = ""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                reason = f"cannot listen on {authority(host, port)} ({error})"
            else:
                return port
    raise StoreError(f"store {tier}: {reason}: give another port= or host=")
