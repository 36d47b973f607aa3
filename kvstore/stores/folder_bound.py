"""Keeps a folder of objects that several processes share within its size, without a server.

    folder/usage        objects and bytes on disk, stored or reserved, 8 bytes each; its lock guards them.
    folder/aside/ID     a reservation of one put, in the same format, locked while in use.
    folder/aside/ID.new the temporary file of the object that this put is writing.
    folder/objects/ab/  objects, by the first digits of their names.

A put reserves space before it writes: under the lock it adds the objects to `usage`. If they do not
fit, it recounts reservations and objects, and deletes the least recently used objects until they
fit.

An object is published before its reservation shrinks, and reservations are counted before objects.
So each object is counted at least once, and objects and reservations never exceed the capacity. An
object that is counted twice only makes an eviction early. A reservation without a lock belongs to a
crashed writer: a recount deletes it and its temporary file.
"""

import errno
import fcntl
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{4}\.[pcw]")  # an ObjectKey

_RESERVATION_NAME = re.compile(r"([0-9a-f]{32}-[0-9]+)(\.new)?")
_LOCK_WAITS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, *[0.01] * 99)
_SLACK = 16
"""An eviction frees another 1/16 of the limit, so that recounts are rare."""

BLOCK_BYTES = 4096
"""The unit in which a file system gives space, with few exceptions; a recount sees what files really take."""

_USAGE = struct.Struct("<QQ")


class FolderUsage(NamedTuple):
    """The number of objects and their bytes on disk, seals included."""

    objects: int
    bytes: int


NOTHING = FolderUsage(0, 0)


class File(NamedTuple):
    used_ns: int
    path: str
    bytes: int
    disk_bytes: int


def disk_bytes(num_bytes: int) -> int:
    """Return the bytes that a file of `num_bytes` takes on disk."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Reservation:
    """The space that one put may still use. All processes count it while this process locks it."""

    def __init__(self, path: str, left: FolderUsage) -> None:
        """Create and lock the file `path`; the caller holds the lock of the bound. Raises OSError."""
        self.left = left
        self.temporary = f"{path}.new"
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._fd, _USAGE.pack(*left), 0)
        except OSError:
            self.end()
            raise

    def reduce(self, part: FolderUsage) -> None:
        """Release `part`: it is published, or will not be written."""
        self.left = _subtract(self.left, part)
        with suppress(OSError):  # then it is counted twice
            os.pwrite(self._fd, _USAGE.pack(*self.left), 0)

    def end(self) -> None:
        with suppress(OSError):
            unlink(self._path)
        os.close(self._fd)


class FolderBound:
    """The size limit of one folder. Not thread-safe, except `now_s`, `files` and `read_usage`.

    usage       the usage as of the last reservation of this process, or of `read_usage`
    evicted     the number of objects that this process evicted
    """

    def __init__(self, path: Path, capacity_bytes: int, clock: Callable[[], float]) -> None:
        """Create or reopen the folder, remove files of crashed writers, and count. Raises OSError."""
        self.usage = NOTHING
        self.evicted = 0
        self.objects = path / "objects"
        self._reservations = path / "aside"
        self._names = map(f"{self._reservations}/{uuid4().hex}-{{}}".format, count())
        self._usage_path = path / "usage"
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._make_folders()
        with self._locked() as usage_fd:
            self._count(usage_fd, capacity_bytes, keep=frozenset())
            _probe_links(next(self._names))

    def now_s(self) -> float:
        """Return the time of the file system; on a network it is not the clock of this machine."""
        return self._ahead_s + self._clock()

    def read_usage(self) -> None:
        """Look at what all processes use."""
        with suppress(OSError):
            fd = os.open(self._usage_path, os.O_RDONLY)
            try:
                self.usage = _read_usage(fd) or self.usage
            finally:
                os.close(fd)

    def reserve(self, need: FolderUsage, keep: frozenset[str]) -> Reservation:
        """Reserve `need`, evicting objects other than the paths `keep`; the caller calls `end`. Raises
        OSError: ENOSPC if it does not fit."""
        try:
            return self._reserve(need, keep)
        except FileNotFoundError:  # the folder was emptied
            self._make_folders()
            return self._reserve(need, keep)

    def end(self, reservation: Reservation) -> None:
        """Release what the put has not published. If that fails, the next recount is early."""
        try:
            if reservation.left != NOTHING:
                with suppress(OSError), self._locked() as usage_fd:
                    usage = _read_usage(usage_fd)
                    if usage is not None:
                        self._write_usage(usage_fd, _subtract(usage, reservation.left))
                    reservation.reduce(reservation.left)
        finally:
            reservation.end()

    def make_room(self, num_bytes: int, keep: frozenset[str]) -> None:
        """Evict up to `num_bytes`, because the disk is full although the folder is not."""
        with suppress(OSError), self._locked() as usage_fd:
            usage = _read_usage(usage_fd)
            if usage is not None:
                self._count(usage_fd, usage.bytes - num_bytes, keep)

    def files(self) -> list[File]:
        """Return the files of objects, least recently used first. Raises OSError."""
        return sorted(_files(self.objects))

    def _make_folders(self) -> None:
        for folder in (self.objects, self._reservations):
            folder.mkdir(parents=True, exist_ok=True)

    def _reserve(self, need: FolderUsage, keep: frozenset[str]) -> Reservation:
        with self._locked() as usage_fd:
            usage = _read_usage(usage_fd)
            if usage is None or usage.bytes + need.bytes > self._capacity_bytes:
                usage = self._count(usage_fd, self._capacity_bytes - need.bytes, keep)
            if usage.bytes + need.bytes > self._capacity_bytes:
                raise OSError(errno.ENOSPC, "the store is full of objects that are being written")
            reservation = Reservation(next(self._names), need)
            self._write_usage(usage_fd, FolderUsage(usage.objects + need.objects, usage.bytes + need.bytes))
        return reservation

    def _count(self, usage_fd: int, limit_bytes: int, keep: frozenset[str]) -> FolderUsage:
        """Recount reservations and objects, and evict to the limit; the caller holds the lock."""
        os.utime(usage_fd)
        self._ahead_s = os.fstat(usage_fd).st_mtime_ns / 1e9 - self._clock()
        usage = _count_reservations(self._reservations)  # before the objects: see the top of this file
        files = self.files()
        usage = FolderUsage(usage.objects + len(files), usage.bytes + sum(file.disk_bytes for file in files))
        if usage.bytes > limit_bytes:
            usage = self._evict(usage, limit_bytes - limit_bytes // _SLACK, files, keep)
        self._write_usage(usage_fd, usage)
        return usage

    def _evict(
        self, usage: FolderUsage, limit_bytes: int, files: Sequence[File], keep: frozenset[str]
    ) -> FolderUsage:
        for file in files:
            if usage.bytes <= limit_bytes:
                break
            if file.path not in keep:
                unlink(file.path)
                self.evicted += 1
                usage = _subtract(usage, FolderUsage(1, file.disk_bytes))
        return usage

    def _write_usage(self, usage_fd: int, usage: FolderUsage) -> None:
        os.pwrite(usage_fd, _USAGE.pack(*usage), 0)
        self.usage = usage

    @contextmanager
    def _locked(self) -> Generator[int]:
        """Lock the usage file against all processes. Raises OSError, also when the lock stays taken."""
        usage_fd = os.open(self._usage_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            waits_s = iter(_LOCK_WAITS_S)
            while not _lock(usage_fd):
                wait_s = next(waits_s, None)
                if wait_s is None:
                    raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked")
                time.sleep(wait_s)
            yield usage_fd
        finally:
            os.close(usage_fd)


def unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - building a Path costs more than the call


def _probe_links(path: str) -> None:
    """Raise OSError if files cannot be written or linked here."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        os.link(path, f"{path}.new")
    finally:
        unlink(f"{path}.new")
        unlink(path)


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _subtract(usage: FolderUsage, part: FolderUsage) -> FolderUsage:
    return FolderUsage(max(0, usage.objects - part.objects), max(0, usage.bytes - part.bytes))


def _files(objects: Path) -> Generator[File]:
    """Yield the files that are named like objects; all else is neither counted nor deleted."""
    for folder in _entries(objects):
        if folder.is_dir(follow_symlinks=False):
            for entry in _entries(folder):
                if OBJECT_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            # A compressing file system may tell of fewer blocks, or later.
                            on_disk = max(status.st_blocks * 512, disk_bytes(status.st_size))
                            yield File(status.st_mtime_ns, entry.path, status.st_size, on_disk)


def _entries(folder: "os.PathLike[str]") -> Generator["os.DirEntry[str]"]:
    """Yield the entries of a folder, none if it was deleted."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def _count_reservations(folder: Path) -> FolderUsage:
    """Return the sum of all reservations, and delete files of crashed writers. The caller holds the lock of
    the bound, so reservations may end but none begins."""
    total = NOTHING
    names = [match for entry in _entries(folder) if (match := _RESERVATION_NAME.fullmatch(entry.name))]
    for path in {f"{folder}/{match[1]}" for match in names}:
        left = _read_reservation(path)
        if left is None:
            unlink(f"{path}.new")
            unlink(path)
        else:
            total = FolderUsage(total.objects + left.objects, total.bytes + left.bytes)
    return total


def _read_reservation(path: str) -> FolderUsage | None:
    """Return a reservation; None if its writer has ended or crashed."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return None if _lock(fd) else _read_usage(fd)
    finally:
        os.close(fd)


def _read_usage(fd: int) -> FolderUsage | None:
    record = os.pread(fd, _USAGE.size, 0)
    return FolderUsage(*_USAGE.unpack(record)) if len(record) == _USAGE.size else None
