"""Opens a page store on Mooncake, and lends it memory of this host. The one file that imports the library.

A worker is a client that lends nothing, so that its death loses no page; memory is lent by owners, processes
that do nothing else (segment_owner.py). RDMA is a matter of `protocol="rdma"` and `devices="mlx5_0"`; nothing
that this was developed on has it, so it is untested.
"""

import asyncio
import ctypes
import importlib
import importlib.util
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores.bind_filter import listening_only_at
from tidemill.kvstore.stores.mooncake_admin import list_objects
from tidemill.kvstore.stores.mooncake_client import MooncakeClient, Native
from tidemill.kvstore.stores.remote_store import LEASE_S, RemoteStore
from tidemill.kvstore.stores.seal import PLAIN, Sealing

LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""What the wheel does not bring along, and the Debian package of each."""

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",  # INFO is ten lines to standard error for each client
    "MC_RPC_TIMEOUT_MS": "3000",  # 30 s otherwise: as long as a call hangs on a master that is stopped
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",  # 30 s: on one whose host is gone
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",  # 30 s: as long as a get or put hangs on an owner that is stopped
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",  # 30 s: the same, for the last answer of a transfer
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # 20, of 4.5 s each without a master
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else a connection for each part of an object: a tenth of the CPU
    "MC_TCP_SLICE_SIZE": str(2 << 20),  # 64 KiB
}
"""What the library reads once when it is loaded and can be told in no other way; what is set already stays.
A master that is dead and not stopped costs 4.3 s a call, and nothing shortens that: see guard.py."""

ADMIN_PORT = 9003
SEGMENT_BYTES_MIN = 16 << 20  # the library refuses less
CONNECT_S = 1.0
_MEANWHILE = "--store file:///path works without"
SOFT_PIN_MS = 60_000  # older objects go before one that may still be on its way to its first reader


@dataclass(frozen=True, slots=True)
class Transport:
    """How bytes move between hosts."""

    protocol: str = "tcp"  # or rdma
    devices: str = ""  # of RDMA: mlx5_0,mlx5_1
    is_open: bool = (
        False  # whether ports may be open to everybody where the kernel does not let us filter them
    )


TCP = Transport()


def check_library() -> None:
    """Raises StoreError that names everything that is missing, in one line. Loads nothing of Mooncake."""
    if importlib.util.find_spec("mooncake") is None:
        raise StoreError(f"the Mooncake library is missing: pip install 'tidemill[mooncake]'; {_MEANWHILE}")
    missing = [package for name, package in LIBRARIES.items() if not _loads(name)]
    if missing:
        raise StoreError(
            f"Mooncake needs {', '.join(missing)}: apt-get install {' '.join(missing)}; {_MEANWHILE}"
        )


def is_there(master: str) -> bool:
    """Whether something listens at `HOST:PORT`."""
    try:
        _connected(master).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def open_mooncake(
    master: str,
    *,
    transport: Transport = TCP,
    admin: str = "",
    host: str = "",
    lease_s: float = LEASE_S,
    sealing: Sealing = PLAIN,
) -> RemoteStore:
    """Join the store of the master at `HOST:PORT`. `admin` is where its HTTP server is, `host` what this host
    is called, `lease_s` what the master grants. Blocking. Raises StoreError, also when there is no master,
    and then soon."""
    site = _reach(master, host, transport)
    library = load_library()
    config = library.ReplicateConfig()
    config.soft_pin_action = library.SoftPinAction.ENABLE
    config.soft_pin_ttl_ms = SOFT_PIN_MS
    config.preferred_segment = site.segment
    client = MooncakeClient(site.join(library), config, stages=transport.protocol != "tcp")
    page = admin or f"{master.rpartition(':')[0]}:{ADMIN_PORT}"
    return RemoteStore(
        client,
        sealing=sealing,
        lease_s=lease_s,
        executor=client.readers,
        listing=lambda: asyncio.to_thread(list_objects, page),
    )


def lend_memory(master: str, num_bytes: int, host: str = "", transport: Transport = TCP) -> Callable[[], int]:
    """Lend memory of this process to the store; what is returned takes it back. The library lends it again to
    a master that was restarted. Blocking. Raises StoreError."""
    if num_bytes < SEGMENT_BYTES_MIN:
        raise StoreError(
            f"Mooncake takes {SEGMENT_BYTES_MIN >> 20} MiB of memory or more, not {num_bytes} bytes"
        )
    return _reach(master, host, transport).join(load_library(), num_bytes).close


@dataclass(frozen=True, slots=True)
class _MemorySegment:
    """Where a process of this host joins a store."""

    master: str  # HOST:PORT
    host: str  # the IPv4 address of this host, as its peers know it
    transport: Transport

    @property
    def segment(self) -> str:
        """What the memory of this host is called in the store, so that writers here can prefer it."""
        return f"{self.host}:{self.master.rpartition(':')[2]}"

    def join(self, library: ModuleType, lent_bytes: int = 0) -> Native:
        """Raises StoreError. Over TCP nobody connects to who lends nothing, so it hears nothing: strangers
        could read and write all memory that it registers. Others hear what is sent to their address."""
        native: Native = library.MooncakeDistributedStore()
        name = self.segment if lent_bytes else self.host
        protocol, devices = self.transport.protocol, self.transport.devices
        deaf = protocol == "tcp" and not lent_bytes
        code = -1
        try:
            with listening_only_at(None if deaf else self.host):
                code = native.setup(name, "P2PHANDSHAKE", lent_bytes, 0, protocol, devices, self.master)
        except OSError as error:
            if not self.transport.is_open:
                native.close()
                raise StoreError(
                    f"the ports of Mooncake cannot be kept to {self.host} ({error}; newer kernels want "
                    "CAP_NET_ADMIN for it): run as root or, where a NetworkPolicy or a firewall keeps "
                    f"others from them, give the store ports=open; {_MEANWHILE}"
                ) from error
        if code != 0:
            native.close()
            raise StoreError(
                f"the Mooncake master at {self.master} does not take {name} in (code {code}): is it a "
                f"mooncake_master of the version of this client, and protocol {protocol} what both have?"
            )
        return native


def _reach(master: str, host: str, transport: Transport) -> _MemorySegment:
    """Raises StoreError unless something listens at `master`."""
    try:
        with _connected(master) as connection:
            address = socket.gethostbyname(host) if host else connection.getsockname()[0]
    except (OSError, ValueError, OverflowError) as error:
        raise StoreError(
            f"no Mooncake master answers at {master!r} ({error}): check its address, "
            "or leave it to --store mooncake?size=8GiB to start one"
        ) from error
    return _MemorySegment(master, address, transport)


def _connected(master: str) -> socket.socket:
    host, _, port = master.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CONNECT_S)


def load_library() -> ModuleType:
    """mooncake.store. Raises StoreError."""
    check_library()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreError(f"the Mooncake library does not load: {error}; {_MEANWHILE}") from error


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
