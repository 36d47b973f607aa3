"""Sealed objects as files of one folder that several processes share; blocking, knows no event loop.

    folder/objects/ab/abcdef....0000.p      seal, then body

An object is written aside and appears under its name by a hard link, which fails if the name exists: whole
or not at all, and the first writer wins. Nothing is synced to the disk: after a power failure the seal finds
what is torn. folder_bound.py keeps the folder within its size.

Last use is a file's modification time, renewed by a read once it is older than TOUCH_S: most reads cost no
write.
"""

import errno
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.folder_bound import ASIDE_PREFIX, FolderBound, Usage
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.seal import SEAL_BYTES, seal, verify
from tidemill.kvstore.store import Got, Put, fitting

TOUCH_S = 60.0


class ObjectFolder:
    """`put` is for one thread at a time, `get` and `contains` run beside it in any number."""

    def __init__(self, path: Path, capacity_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Create or reopen; `clock` counts seconds from anywhere. Raises StoreError that names the fix."""
        self._capacity_bytes = capacity_bytes
        try:
            self._bound = FolderBound(path, capacity_bytes, clock)
            self._objects = str(self._bound.objects)
            _probe(self._bound.aside)
        except OSError as error:
            raise StoreError(
                f"file store {path}: {error.strerror}: name a folder that this user may write to, on a file"
                " system with hard links and locks (file:///path?size=8GiB)"
            ) from error

    @property
    def usage(self) -> Usage:
        """As of the last put of this process."""
        return self._bound.usage

    @property
    def evicted(self) -> int:
        """Objects that this process deleted to make space."""
        return self._bound.evicted

    def put(self, objects: Sequence[tuple[ObjectKey, memoryview]]) -> list[Put]:
        count = fitting([SEAL_BYTES + body.nbytes for _, body in objects], self._capacity_bytes)
        batch = [(self._file(key), key, body) for key, body in objects[:count]]
        missing = {path: SEAL_BYTES + body.nbytes for path, _, body in batch if not self._renew(path)}
        promised = Usage(len(missing), sum(missing.values()))
        outcomes: list[Put] = []
        if self._bound.promise(promised, keep=frozenset(path for path, _, _ in batch)):
            stored = Usage(0, 0)
            for path, key, body in batch:
                outcomes.append(self._store(path, key, body) if path in missing else Put.EXISTED)
                if outcomes[-1] is Put.REFUSED:
                    break
                if outcomes[-1] is Put.STORED:
                    stored = Usage(stored.objects + 1, stored.bytes + SEAL_BYTES + body.nbytes)
            self._bound.take_back(Usage(promised.objects - stored.objects, promised.bytes - stored.bytes))
        return outcomes + [Put.REFUSED] * (len(objects) - len(outcomes))

    def get(self, wanted: Sequence[tuple[ObjectKey, memoryview]]) -> list[Got]:
        return [self._load(key, view) for key, view in wanted]

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [os.access(self._file(key), os.F_OK) for key in keys]

    def _store(self, path: str, key: ObjectKey, body: memoryview) -> Put:
        try:
            fd, name = tempfile.mkstemp(prefix=ASIDE_PREFIX, dir=self._bound.aside)
            try:
                try:
                    _write(fd, [memoryview(seal(key, body)), body])
                finally:
                    os.close(fd)
                _publish(name, path)
            finally:
                _unlink(name)
        except FileExistsError:
            return Put.EXISTED
        except OSError:
            return Put.REFUSED
        return Put.STORED

    def _load(self, key: ObjectKey, view: memoryview) -> Got:
        path = self._file(key)
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            return Got.MISS
        try:
            status = os.fstat(fd)
            found = bytearray(SEAL_BYTES)
            whole = status.st_size == SEAL_BYTES + view.nbytes and _read(fd, [memoryview(found), view])
            if whole and verify(key, view, found):
                self._touch(fd, status)
                return Got.HIT
        except OSError as error:
            if error.errno != errno.EIO:
                return Got.MISS
        finally:
            os.close(fd)
        with suppress(OSError):
            _unlink(path)
        return Got.CORRUPT

    def _file(self, key: ObjectKey) -> str:
        name = str(key)
        return f"{self._objects}/{name[:2]}/{name}"

    def _renew(self, path: str) -> bool:
        """Whether the object exists; counts as a use of it."""
        try:
            self._touch(path, os.stat(path))  # noqa: PTH116 - building a Path costs more than the call
        except OSError:
            return False
        return True

    def _touch(self, file: str | int, status: os.stat_result) -> None:
        if self._bound.now_s() - status.st_mtime > TOUCH_S:
            with suppress(OSError):
                os.utime(file)


def _publish(aside: str, path: str) -> None:
    """Raises FileExistsError when another writer was first, and OSError."""
    try:
        os.link(aside, path)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.link(aside, path)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - building a Path costs more than the call


def _probe(aside: Path) -> None:
    """Raises OSError when objects cannot be written or linked here."""
    fd, name = tempfile.mkstemp(prefix=ASIDE_PREFIX, dir=aside)
    os.close(fd)
    linked = Path(f"{name}.linked")
    try:
        os.link(name, linked)
    finally:
        linked.unlink(missing_ok=True)
        Path(name).unlink(missing_ok=True)


def _write(fd: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(fd, parts))


def _read(fd: int, parts: list[memoryview]) -> bool:
    """Fill `parts` from the file; False when it ends before."""
    while parts:
        num_bytes = os.readv(fd, parts)
        if num_bytes == 0:
            return False
        parts = _after(parts, num_bytes)
    return True


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `parts` after their first `num_bytes`."""
    left: list[memoryview] = []
    for part in parts:
        if num_bytes < part.nbytes:
            left.append(part[num_bytes:])
        num_bytes = max(0, num_bytes - part.nbytes)
    return left
