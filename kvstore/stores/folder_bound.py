"""How several processes keep one folder of objects within its size, without a server.

    folder/usage        objects and bytes that are held or promised, 8 bytes each; its lock guards the bound
    folder/aside/ID     a promise: what one put has yet to publish, in the same form; locked while it lasts
    folder/aside/ID.new the object that this put is writing
    folder/objects/ab/  objects, by the first digits of their names

A put promises what it will write before it writes: under the lock it adds that to `usage`. When it does not
fit, it counts what is promised and what is there, and deletes the least recently used until it does. An
object is published before its promise shrinks and promises are counted before objects, so that none is
counted less than once: objects and promises never exceed the capacity. Counted twice, it makes an eviction
come early. A promise that nobody has locked is that of a dead writer: a count deletes it, and what it wrote.
"""

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{4}\.[pcw]")  # an ObjectKey

_ASIDE_NAME = re.compile(r"([0-9a-f]{32}-[0-9]+)(\.new)?")
_LOCK_WAITS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, *[0.01] * 99)
_SLACK = 16
"""An eviction frees one part in so many of the limit beyond what is needed, so that counts are rare."""

_USAGE = struct.Struct("<QQ")


class FolderUsage(NamedTuple):
    """What a folder holds, seals included."""

    objects: int
    bytes: int


NOTHING = FolderUsage(0, 0)


class File(NamedTuple):
    used_ns: int
    path: str
    bytes: int


class Promise:
    """What one put may still publish. Everybody counts it while this process keeps it locked."""

    def __init__(self, path: str, left: FolderUsage) -> None:
        """The lock of the bound is held. Raises OSError."""
        self.left = left
        self.aside = f"{path}.new"
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(self._fd, _USAGE.pack(*left), 0)
        except OSError:
            self.end()
            raise

    def reduce(self, part: FolderUsage) -> None:
        """So much can be seen now, or will not be written."""
        self.left = _less(self.left, part)
        with suppress(OSError):  # it is counted twice then
            os.pwrite(self._fd, _USAGE.pack(*self.left), 0)

    def end(self) -> None:
        with suppress(OSError):
            unlink(self._path)
        os.close(self._fd)


class FolderBound:
    """For one thread at a time, except `now_s` and `files`.

    usage       as of the last promise of this process
    evicted     objects that this process deleted to make space
    """

    def __init__(self, path: Path, capacity_bytes: int, clock: Callable[[], float]) -> None:
        """Create or reopen the folder, clear what dead writers left, and count. Raises OSError."""
        self.usage = NOTHING
        self.evicted = 0
        self.objects = path / "objects"
        self.aside = path / "aside"
        self._names = map(f"{self.aside}/{uuid4().hex}-{{}}".format, count())
        self._usage_path = path / "usage"
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._make_folders()
        with self._locked() as usage_fd:
            self._count(usage_fd, capacity_bytes, keep=frozenset())
            _probe_links(next(self._names))

    def now_s(self) -> float:
        """Time of the file system, which dates the files; on a network it is not this machine's."""
        return self._ahead_s + self._clock()

    def promise(self, need: FolderUsage, keep: frozenset[str]) -> Promise:
        """Have `need` counted as held, evicting others than the paths `keep`; `end` it. Raises OSError:
        ENOSPC when it does not fit."""
        try:
            return self._promise(need, keep)
        except FileNotFoundError:  # somebody has emptied the folder
            self._make_folders()
            return self._promise(need, keep)

    def end(self, promise: Promise) -> None:
        """Take back what the put has not published. If that fails, the next count comes early."""
        try:
            if promise.left != NOTHING:
                with suppress(OSError), self._locked() as usage_fd:
                    usage = _read_usage(usage_fd)
                    if usage is not None:
                        self._write_usage(usage_fd, _less(usage, promise.left))
                    promise.reduce(promise.left)
        finally:
            promise.end()

    def give_way(self, num_bytes: int, keep: frozenset[str]) -> None:
        """The disk is full though the folder is not: evict so many bytes, as far as they go."""
        with suppress(OSError), self._locked() as usage_fd:
            usage = _read_usage(usage_fd)
            if usage is not None:
                self._count(usage_fd, usage.bytes - num_bytes, keep)

    def files(self) -> list[File]:
        """The objects that are there, least recently used first. Raises OSError."""
        return sorted(_files(self.objects))

    def _make_folders(self) -> None:
        for folder in (self.objects, self.aside):
            folder.mkdir(parents=True, exist_ok=True)

    def _promise(self, need: FolderUsage, keep: frozenset[str]) -> Promise:
        with self._locked() as usage_fd:
            usage = _read_usage(usage_fd)
            if usage is None or usage.bytes + need.bytes > self._capacity_bytes:
                usage = self._count(usage_fd, self._capacity_bytes - need.bytes, keep)
            if usage.bytes + need.bytes > self._capacity_bytes:
                raise OSError(errno.ENOSPC, "the store is full of what is being written")
            promise = Promise(next(self._names), need)
            self._write_usage(usage_fd, FolderUsage(usage.objects + need.objects, usage.bytes + need.bytes))
        return promise

    def _count(self, usage_fd: int, limit_bytes: int, keep: frozenset[str]) -> FolderUsage:
        """Count what is promised and what is there, and evict until that is within the limit. The lock is
        held."""
        os.utime(usage_fd)
        self._ahead_s = os.fstat(usage_fd).st_mtime_ns / 1e9 - self._clock()
        usage = _promised(self.aside)  # first: see above
        files = self.files()
        usage = FolderUsage(usage.objects + len(files), usage.bytes + sum(file.bytes for file in files))
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
                usage = _less(usage, FolderUsage(1, file.bytes))
        return usage

    def _write_usage(self, usage_fd: int, usage: FolderUsage) -> None:
        os.pwrite(usage_fd, _USAGE.pack(*usage), 0)
        self.usage = usage

    @contextmanager
    def _locked(self) -> Generator[int]:
        """The usage file, locked against all processes. Raises OSError, also when the lock stays taken."""
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
    """Raises OSError when files cannot be written or linked here."""
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


def _less(usage: FolderUsage, part: FolderUsage) -> FolderUsage:
    return FolderUsage(max(0, usage.objects - part.objects), max(0, usage.bytes - part.bytes))


def _files(objects: Path) -> Generator[File]:
    """Files named like objects; whatever else lies there is not ours to count or to delete."""
    for folder in _entries(objects):
        if folder.is_dir(follow_symlinks=False):
            for entry in _entries(folder):
                if OBJECT_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield File(status.st_mtime_ns, entry.path, status.st_size)


def _entries(folder: "os.PathLike[str]") -> Generator["os.DirEntry[str]"]:
    """None when somebody has deleted it."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        yield from entries


def _promised(aside: Path) -> FolderUsage:
    """What living writers have promised; what dead ones left is deleted. The lock of the bound is held, so
    that promises end but none begins."""
    total = NOTHING
    names = [match for entry in _entries(aside) if (match := _ASIDE_NAME.fullmatch(entry.name))]
    for path in {f"{aside}/{match[1]}" for match in names}:
        left = _promise_of_the_living(path)
        if left is None:
            unlink(f"{path}.new")
            unlink(path)
        else:
            total = FolderUsage(total.objects + left.objects, total.bytes + left.bytes)
    return total


def _promise_of_the_living(path: str) -> FolderUsage | None:
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
