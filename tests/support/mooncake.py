"""A real Mooncake on free loopback ports, for tests and benchmarks: a master and memory owners.

If only root may filter sockets, its ports are open to other hosts while it runs.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil

from tests.support.sockets import free_port
from tests.support.waits import eventually
from tidemill.kvstore.stores.mooncake_store import Transport, check_library, load_library

HOST = "127.0.0.1"
LENT_BYTES = 64 << 20
TRANSPORT = Transport(is_open=True)


class Mooncake:
    """A master with `flags`, and owners. Their standard error goes to `log`."""

    def __init__(self, log: Path, lent_bytes: int = LENT_BYTES, flags: Sequence[str] = ()) -> None:
        check_library()
        self.lent_bytes = lent_bytes
        self.port, self._admin_port = free_port(), free_port()
        self.owners: list[subprocess.Popen[str]] = []
        self._flags = flags
        self._log = log.open("a")
        try:
            self.start_master()
            self.start_owner()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def admin(self) -> str:
        return f"{HOST}:{self._admin_port}"

    def start_master(self) -> None:
        options = (
            f"--rpc_address={HOST}",
            f"--rpc_port={self.port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={self._admin_port}",
            "--enable_metric_reporting=false",
        )
        self.master = self._run("mooncake.cli", *options, *self._flags)
        eventually(self._answers)

    def start_owner(self) -> None:
        """Start an owner and wait until its memory is lent."""
        options = (self.address, str(self.lent_bytes), "--ports=open")
        self.owners.append(self._run("tidemill.kvstore.stores.mooncake_memory_owner", *options))
        stdout = self.owners[-1].stdout
        assert stdout is not None
        assert stdout.readline().startswith("lent")

    def ask(self, path: str) -> str:
        with urlopen(f"http://{self.admin}{path}") as answer:
            return answer.read().decode()

    def flip(self, name: str, offset: int) -> None:
        """Flip one bit of an object in the memory of its owner."""
        found = json.loads(self.ask(f"/batch_query_keys?keys={name}"))["data"][name]["values"][0]
        with Path(f"/proc/{self.owners[-1].pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(found["buffer_address_"] + offset)
            [byte] = memory.read(1)
            memory.seek(found["buffer_address_"] + offset)
            memory.write(bytes([byte ^ 4]))

    def stop(self) -> None:
        for process in (*self.owners, self.master):
            end(process)
        self._log.close()

    def _run(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE if module.startswith("tidemill") else self._log,
            stderr=self._log,
            text=True,
        )

    def _answers(self) -> bool:
        assert self.master.poll() is None, "the master ended: read its log"
        try:
            return "ok" in self.ask("/health")
        except OSError:
            return False


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process, also a stopped one."""
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


@contextmanager
def frozen(process: subprocess.Popen[str]) -> Generator[None]:
    """Stop all threads of a child for the block; on a busy machine that takes a while."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)  # unless it was killed in the block


@contextmanager
def slowed(process: subprocess.Popen[str]) -> Generator[None]:
    """Stop a child, and let it run for 20 ms every 2 s: operations end late, within the library's limits."""
    moment = f"sleep 2; kill -CONT {process.pid}; sleep 0.02; kill -STOP {process.pid}"
    with frozen(process), subprocess.Popen(["/bin/sh", "-c", f"while {moment}; do :; done"]) as moments:
        try:
            yield
        finally:
            moments.kill()


def is_asked(process: subprocess.Popen[str]) -> bool:
    """Return whether a stopped child has not read what has arrived at its ports."""
    sockets = psutil.Process(process.pid).net_connections("tcp")
    ports = {f"{found.laddr.port:04X}" for found in sockets if found.status == psutil.CONN_LISTEN}
    tables = [Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return any(row[1][-4:] in ports and row[4].partition(":")[2].strip("0") for row in rows)


@contextmanager
def mooncake(log: Path, lent_bytes: int = LENT_BYTES, flags: Sequence[str] = ()) -> Generator[Mooncake]:
    service = Mooncake(log, lent_bytes, flags)
    try:
        yield service
    finally:
        service.stop()


class PlainClient:
    """Mooncake's own client, which reads and writes objects bypassing our store."""

    def __init__(self, service: Mooncake) -> None:
        self.native: Any = load_library().MooncakeDistributedStore()
        assert self.native.setup(HOST, "P2PHANDSHAKE", 0, 0, "tcp", "", service.address) == 0

    def read(self, name: str) -> bytes:
        [replica] = self.native.batch_get_replica_desc([name])[name]
        found = np.empty(replica.get_memory_descriptor().buffer_descriptor.size, np.uint8)
        assert self.native.batch_get_into([name], [found.ctypes.data], [found.nbytes]) == [found.nbytes]
        return found.tobytes()

    def write(self, name: str, body: bytes) -> None:
        """Replace the object of that name."""
        self.native.batch_remove([name], force=True)
        memory = np.frombuffer(body, np.uint8)
        assert self.native.batch_put_from([name], [memory.ctypes.data], [memory.nbytes]) == [0]

    def clear(self) -> None:
        self.native.remove_all(force=True)

    def close(self) -> None:
        self.native.close()


class Shared:
    """A native client that several stores use one after another, because closing takes a second."""

    def __init__(self, client: PlainClient) -> None:
        self._native = client.native

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return getattr(self._native, name)

    def close(self) -> int:
        return 0
