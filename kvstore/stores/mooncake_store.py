"""Opens a page store on Mooncake, and lends it memory. Only this file imports the library.

A worker is a client that lends no memory, so that its crash loses no page. Separate processes lend
memory (mooncake_memory_owner.py). RDMA needs `protocol="rdma"` and `devices="mlx5_0"`; it is
untested.
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
from tidemill.kvstore.stores.bind_filter import restrict_listeners
from tidemill.kvstore.stores.mooncake_admin import list_objects
from tidemill.kvstore.stores.mooncake_client import MooncakeClient, NativeStore
from tidemill.kvstore.stores.remote_store import LEASE_S, RemoteStore
from tidemill.kvstore.stores.seal import PLAIN, Sealing

LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""The libraries that the wheel does not contain, and the Debian package of each."""

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",  # INFO writes ten lines to standard error per client
    "MC_RPC_TIMEOUT_MS": "3000",  # default 30 s: a call hangs this long on a stopped master
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",  # default 30 s: on a master whose host is gone
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",  # default 30 s: a get or put hangs this long on a stopped owner
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",  # default 30 s: the same for the last reply of a transfer
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # default 20, each 4.5 s without a master
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",  # else one connection per part of an object, 10 % of the CPU
    "MC_TCP_SLICE_SIZE": str(2 << 20),  # default 64 KiB
}
"""Settings that the library reads from the environment when it is loaded. Set ones stay.

A call to a master that has crashed (not stopped) takes 4.3 s, and no setting shortens that: see
circuit_breaker.py.
"""

ADMIN_PORT = 9003
SEGMENT_BYTES_MIN = 16 << 20  # the library refuses less
CONNECT_S = 1.0
_ALTERNATIVE = "--store file:///path works without it"
SOFT_PIN_MS = 60_000  # a new object is not evicted before its first reader had time to get it


@dataclass(frozen=True, slots=True)
class Transport:
    """The transport of bytes between hosts. `is_open` permits unfiltered ports if the kernel refuses
    filters."""

    protocol: str = "tcp"  # or rdma
    devices: str = ""  # for RDMA: mlx5_0,mlx5_1
    is_open: bool = False


TCP = Transport()


def check_library() -> None:
    """Raise StoreError that names everything that is missing. Loads nothing of Mooncake."""
    if importlib.util.find_spec("mooncake") is None:
        raise StoreError(f"the Mooncake library is missing: pip install 'tidemill[mooncake]'; {_ALTERNATIVE}")
    missing = [package for name, package in LIBRARIES.items() if not _loads(name)]
    if missing:
        raise StoreError(
            f"Mooncake needs {', '.join(missing)}: apt-get install {' '.join(missing)}; {_ALTERNATIVE}"
        )


def is_listening(master: str) -> bool:
    """Return whether a process listens at `HOST:PORT`."""
    try:
        _connect(master).close()
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
    """Join the store of the master at `HOST:PORT`. Blocking.

    `admin` is the address of its HTTP server, `host` the name of this host, `lease_s` the lease
    that the master grants. Raises StoreError, without a long wait if there is no master.
    """
    segment = _memory_segment(master, host, transport)
    library = load_library()
    config = library.ReplicateConfig()
    config.soft_pin_action = library.SoftPinAction.ENABLE
    config.soft_pin_ttl_ms = SOFT_PIN_MS
    config.preferred_segment = segment.name
    client = MooncakeClient(segment.join(library), config, stages=transport.protocol != "tcp")
    admin = admin or f"{master.rpartition(':')[0]}:{ADMIN_PORT}"
    return RemoteStore(
        client,
        sealing=sealing,
        lease_s=lease_s,
        executor=client.readers,
        listing=lambda: asyncio.to_thread(list_objects, admin),
    )


def lend_memory(master: str, num_bytes: int, host: str = "", transport: Transport = TCP) -> Callable[[], int]:
    """Lend memory of this process to the store, and return the function that takes it back. The library lends
    it again to a master that was restarted. Blocking. Raises StoreError."""
    if num_bytes < SEGMENT_BYTES_MIN:
        raise StoreError(
            f"Mooncake takes {SEGMENT_BYTES_MIN >> 20} MiB of memory or more, not {num_bytes} bytes"
        )
    return _memory_segment(master, host, transport).join(load_library(), num_bytes).close


@dataclass(frozen=True, slots=True)
class _MemorySegment:
    """The memory of this host in the store of one master."""

    master: str  # HOST:PORT
    host: str  # the IPv4 address at which peers reach this host
    transport: Transport

    @property
    def name(self) -> str:
        """The name of this memory in the store, so that writers on this host can prefer it."""
        return f"{self.host}:{self.master.rpartition(':')[2]}"

    def join(self, library: ModuleType, lent_bytes: int = 0) -> NativeStore:
        """Join the store, lending `lent_bytes`. Raises StoreError.

        Over TCP a client that lends nothing needs no incoming connections, and strangers could read
        and write all memory that it registers. So its ports receive nothing, those of others only
        what is sent to their address.
        """
        native: NativeStore = library.MooncakeDistributedStore()
        name = self.name if lent_bytes else self.host
        protocol, devices = self.transport.protocol, self.transport.devices
        is_closed = protocol == "tcp" and not lent_bytes
        code = -1
        try:
            with restrict_listeners(None if is_closed else self.host):
                code = native.setup(name, "P2PHANDSHAKE", lent_bytes, 0, protocol, devices, self.master)
        except OSError as error:
            if not self.transport.is_open:
                native.close()
                raise StoreError(
                    f"the ports of Mooncake cannot be restricted to {self.host} ({error}; newer kernels want "
                    "CAP_NET_ADMIN for it): run as root or, where a NetworkPolicy or a firewall keeps "
                    f"others from them, give the store ports=open; {_ALTERNATIVE}"
                ) from error
        if code != 0:
            native.close()
            raise StoreError(
                f"the Mooncake master at {self.master} does not accept {name} (code {code}): is it a "
                f"mooncake_master of the version of this client, and do both have protocol {protocol}?"
            )
        return native


def _memory_segment(master: str, host: str, transport: Transport) -> _MemorySegment:
    """Return the memory of this host. Raises StoreError unless a process listens at `master`."""
    try:
        with _connect(master) as connection:
            address = socket.gethostbyname(host) if host else connection.getsockname()[0]
    except (OSError, ValueError, OverflowError) as error:
        raise StoreError(
            f"no Mooncake master answers at {master!r} ({error}): check its address, "
            "or leave it to --store mooncake?size=8GiB to start one"
        ) from error
    return _MemorySegment(master, address, transport)


def _connect(master: str) -> socket.socket:
    host, _, port = master.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=CONNECT_S)


def load_library() -> ModuleType:
    """Import mooncake.store. Raises StoreError."""
    check_library()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise StoreError(f"the Mooncake library does not load: {error}; {_ALTERNATIVE}") from error


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
