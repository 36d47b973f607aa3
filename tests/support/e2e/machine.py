"""Faults of the machine: full file systems, memory limits, exhausted file descriptors. Most need root."""

import asyncio
import os
import resource
import subprocess
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.support.e2e.faults import Run, run, wait_until_quiet
from tests.support.e2e.history import Ask, Call, broken
from tests.support.e2e.server import Server

REMOUNTS_MAX = 500

WORKERS = frozenset(("prefill-0", "decode-0"))

GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""The folders where memory is limited, of version 1 and of version 2."""

IN_OWN_SHM = (
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size="$1" shm /dev/shm && shift && exec "$@"',
    "sh",
)
"""A command that runs another one in a /dev/shm of its own, of the size that follows."""


def check_during(
    server: Server,
    asked: Sequence[Ask],
    calm: Sequence[Call],
    salt: str,
    fault: Callable[[], object] = lambda: None,
    width: int | None = None,
    *,
    then_quiet: bool = False,
) -> list[Call]:
    """Run `asked` under a new salt, `width` at a time, and cause `fault` after a moment. Every call must be
    like the calm one; `then_quiet`: and then no worker may hold memory."""

    async def main() -> Run:
        running = asyncio.create_task(run(server, asked, salt, width=width))
        await asyncio.sleep(0.4)
        await asyncio.to_thread(fault)
        return await running

    calls = asyncio.run(main()).calls
    found = [broken(*pair) for pair in zip(calls, calm, strict=True)]
    assert not any(found), found
    if then_quiet:
        wait_until_quiet(server, WORKERS)
    return calls


def fill(folder: Path) -> Path:
    """Write a file until the file system of the folder is full; return its path."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1))
    return path


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


@contextmanager
def mounted(folder: Path, size: str) -> Generator[Path]:
    """Mount a new file system in memory of this size; skip the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tidemill-test", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {ended.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S607 - whichever there is


def remount(folder: Path, mode: str) -> None:
    """Make a mounted file system `ro` or `rw`."""
    command = ["mount", "-o", f"remount,{mode}", str(folder)]
    for _ in range(REMOUNTS_MAX):  # it is refused while a file is open for writing
        if subprocess.run(command, check=False).returncode == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"{folder} is always busy")


@contextmanager
def no_more_memory(process: psutil.Process) -> Generator[None]:
    """Let the kernel kill a process when it needs another page of memory. Skip the test where that is not
    allowed."""
    base = next((group for group in GROUPS if (group / "cgroup.procs").exists()), None)
    if base is None or not os.access(base, os.W_OK):
        pytest.skip("no control group for memory is writable here")
    group = base / f"tidemill-test-{process.pid}"
    group.mkdir()
    try:
        limit = next(name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
        (group / limit).write_text(str(resource.getpagesize()))
        (group / "cgroup.procs").write_text(str(process.pid))
        yield
    finally:
        while members := (group / "cgroup.procs").read_text().split():
            for pid in members:
                with suppress(OSError):
                    (base / "cgroup.procs").write_text(pid)
        group.rmdir()


def file_limit(process: psutil.Process, soft: int) -> int:
    """Set the limit of open files of a process; return the one before."""
    before, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    return before
