"""How several processes keep one folder of objects within its size, without a server.

    folder/usage        objects and bytes that are held or promised, 8 bytes each; its lock guards the bound
    folder/aside/       objects being written
    folder/objects/ab/  objects, by the first digits of their names

A writer adds what it will write to `usage` before it writes. When that does not fit, it holds the lock,
counts the files, and deletes the least recently used until it fits. A count misses what others have promised
but not begun to write, so each other writer can exceed the bound by one batch until the next count. A writer
that dies leaves its promise behind: the next count comes earlier. The lock is held for microseconds or for
one count; who cannot get it in time is refused.
"""

import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

STALE_S = 600.0
"""A file aside that was not written to for so long belongs to a writer that died."""

OBJECT_NAME = re.compile(r"[0-9a-f]{32}\.[0-9A-Za-z]+\.[a-z]")
ASIDE_PREFIX = "object-"

_LOCK_TRIES = 200
_LOCK_RETRY_S = 0.01
_SLACK = 16
"""An eviction frees one part in so many of the capacity beyond what is needed, so that counts are rare."""

_USAGE = struct.Struct("<QQ")


class Usage(NamedTuple):
    """What a folder holds, seals included."""

    objects: int
    bytes: int


class _File(NamedTuple):
    used_ns: int
    path: str
    bytes: int


class FolderBound:
    """For one thread at a time, except `now_s`.

    usage       as of the last promise of this process
    evicted     objects that this process deleted to make space
    """

    def __init__(self, path: Path, capacity_bytes: int, clock: Callable[[], float]) -> None:
        """Create or reopen the folder, clear what dead writers left, and count. Raises OSError."""
        self.usage = Usage(0, 0)
        self.evicted = 0
        self.objects = path / "objects"
        self.aside = path / "aside"
        self._usage_path = path / "usage"
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        with self._locked() as usage_fd:
            self._recount(usage_fd, need_bytes=0, keep=frozenset())

    def now_s(self) -> float:
        """Time of the file system, which dates the files; on a network it is not this machine's."""
        return self._ahead_s + self._clock()

    def promise(self, need: Usage, keep: frozenset[str]) -> bool:
        """Have `need` counted as held, evicting others than the paths `keep`; False if it does not fit."""
        if need.objects == 0:
            return True
        try:
            with self._locked() as usage_fd:
                usage = _read_usage(usage_fd)
                if usage is None or usage.bytes + need.bytes > self._capacity_bytes:
                    usage = self._recount(usage_fd, need.bytes, keep)
                if usage.bytes + need.bytes > self._capacity_bytes:
                    return False
                self._write_usage(usage_fd, Usage(usage.objects + need.objects, usage.bytes + need.bytes))
        except OSError:
            return False
        return True

    def take_back(self, unused: Usage) -> None:
        """The part of a promise that was not written."""
        if unused.objects == 0:
            return
        with suppress(OSError), self._locked() as usage_fd:
            usage = _read_usage(usage_fd)
            if usage is not None:
                objects, num_bytes = usage.objects - unused.objects, usage.bytes - unused.bytes
                self._write_usage(usage_fd, Usage(max(0, objects), max(0, num_bytes)))

    def _recount(self, usage_fd: int, need_bytes: int, keep: frozenset[str]) -> Usage:
        """Count what is there and, if `need_bytes` more do not fit, evict. The lock is held."""
        os.utime(usage_fd)
        now_ns = os.fstat(usage_fd).st_mtime_ns
        self._ahead_s = now_ns / 1e9 - self._clock()
        files = sorted(_files(self.objects))
        objects = len(files)
        used_bytes = sum(file.bytes for file in files) + _sweep(self.aside, now_ns)
        if used_bytes + need_bytes > self._capacity_bytes:
            slack_bytes = self._capacity_bytes // _SLACK
            for file in files:
                if used_bytes + need_bytes + slack_bytes <= self._capacity_bytes:
                    break
                if file.path not in keep:
                    Path(file.path).unlink(missing_ok=True)
                    self.evicted += 1
                    objects, used_bytes = objects - 1, used_bytes - file.bytes
        usage = Usage(objects, used_bytes)
        self._write_usage(usage_fd, usage)
        return usage

    def _write_usage(self, usage_fd: int, usage: Usage) -> None:
        os.pwrite(usage_fd, _USAGE.pack(*usage), 0)
        self.usage = usage

    @contextmanager
    def _locked(self) -> Generator[int]:
        """The usage file, locked against all processes. Raises OSError, also when the lock stays taken."""
        for folder in (self.objects, self.aside):  # somebody may have emptied the folder meanwhile
            folder.mkdir(parents=True, exist_ok=True)
        usage_fd = os.open(self._usage_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for _ in range(_LOCK_TRIES):
                with suppress(BlockingIOError):
                    fcntl.flock(usage_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                time.sleep(_LOCK_RETRY_S)
            else:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked")
            yield usage_fd
        finally:
            os.close(usage_fd)


def _files(objects: Path) -> Generator[_File]:
    """Files named like objects; whatever else lies there is not ours to count or to delete."""
    for folder in os.scandir(objects):
        if folder.is_dir(follow_symlinks=False):
            for entry in os.scandir(folder.path):
                if OBJECT_NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield _File(status.st_mtime_ns, entry.path, status.st_size)


def _sweep(aside: Path, now_ns: int) -> int:
    """Delete what dead writers left; bytes of the files still being written."""
    writing_bytes = 0
    for entry in os.scandir(aside):
        if entry.name.startswith(ASIDE_PREFIX):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                published = status.st_nlink > 1
                if published or now_ns - status.st_mtime_ns > STALE_S * 1e9:
                    Path(entry.path).unlink()
                else:
                    writing_bytes += status.st_size
    return writing_bytes


def _read_usage(usage_fd: int) -> Usage | None:
    record = os.pread(usage_fd, _USAGE.size, 0)
    return Usage(*_USAGE.unpack(record)) if len(record) == _USAGE.size else None
