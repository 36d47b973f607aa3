"""Sealed objects as files of one folder that several processes share. Blocking.

    folder/objects/ab/abcdef....0000.p      seal, then body

An object is written to a temporary file and published under its name by a hard link, which fails if
the name exists. So a reader sees it whole or not at all, and the first writer wins. Files are not
synced to disk: the seal detects files torn by a power failure. folder_bound.py keeps the folder
within its size.

The modification time of a file is its last use. A read renews it when it is older than TOUCH_S, so
that most reads cost no write. The order of last use survives a restart.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.keys import ObjectKey
from tidemill.kvstore.stores.folder_bound import FolderBound, FolderUsage, Reservation, disk_bytes, unlink
from tidemill.kvstore.stores.page_store import Got, Objects, Put, StoredObject, count_fitting, full_after
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES, Sealing

TOUCH_S = 1.0
GONE = {errno.ENOENT, errno.ESTALE}  # evicted; ESTALE: by another host of a network file system
NO_FILE = {errno.ELOOP, errno.ENXIO}  # a symbolic link, a socket


class ObjectFolder:
    """One thread at a time may call `put`; `get` and `contains` run concurrently in any number."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        sealing: Sealing = PLAIN,
    ) -> None:
        """Create or reopen. `clock` is monotonic, in seconds. Raises StoreError that names the fix."""
        self._capacity_bytes = capacity_bytes
        self._sealing = sealing
        try:
            self._bound = FolderBound(path, capacity_bytes, clock)
            self._objects = str(self._bound.objects)
        except OSError as error:
            raise StoreError(
                f"file store {path}: {error.strerror}: name a folder that this user may write to, on a file"
                " system with hard links and locks (file:///path?size=8GiB)"
            ) from error

    @property
    def usage(self) -> FolderUsage:
        """The usage as of the last put of this process."""
        return self._bound.usage

    @property
    def evicted(self) -> int:
        """The number of objects that this process evicted."""
        return self._bound.evicted

    def put(self, objects: Objects) -> list[Put]:
        count = count_fitting([_disk_bytes(body) for _, body in objects], self._capacity_bytes)
        batch = [(self._file(key), key, body) for key, body in objects[:count]]
        missing = {path: _disk_bytes(body) for path, _, body in batch if not self._renew(path)}
        outcomes = [Put.EXISTED for _ in takewhile(lambda item: item[0] not in missing, batch)]
        if missing:
            keep = frozenset(path for path, _, _ in batch)
            try:
                reservation = self._bound.reserve(FolderUsage(len(missing), sum(missing.values())), keep)
            except OSError as error:
                outcomes.append(_outcome(error))
            else:
                try:
                    outcomes += self._store(batch[len(outcomes) :], set(missing), reservation)
                finally:
                    left_bytes = reservation.left.bytes
                    self._bound.end(reservation)
                if outcomes[-1] is Put.FULL:  # despite the reservation: other files fill the disk
                    self._bound.make_room(left_bytes, keep)
        if outcomes and not outcomes[-1].is_there:
            return outcomes + [Put.SKIPPED] * (len(objects) - len(outcomes))
        return outcomes + full_after(outcomes, objects)

    def get(self, wanted: Objects) -> list[Got]:
        return [self._load(key, view) for key, view in wanted]

    def contains(self, keys: Sequence[ObjectKey]) -> list[bool]:
        self._bound.read_usage()
        return [os.access(self._file(key), os.F_OK) for key in keys]

    def remove(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            with suppress(OSError):
                unlink(self._file(key))

    def demote(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            with suppress(OSError):
                os.utime(self._file(key), ns=(0, 0))

    def list_objects(self) -> list[StoredObject]:
        """List all objects, least recently used first. Raises OSError."""
        now_s = self._bound.now_s()
        found = [(ObjectKey.parse(Path(file.path).name), file) for file in self._bound.files()]
        return [StoredObject(key, file.bytes, max(0.0, now_s - file.used_ns / 1e9)) for key, file in found]

    def _store(
        self, batch: Sequence[tuple[str, ObjectKey, memoryview]], missing: set[str], reservation: Reservation
    ) -> list[Put]:
        """Publish missing objects in order; return the outcomes up to the first failure."""
        outcomes: list[Put] = []
        for path, key, body in batch:
            outcome = Put.EXISTED
            if path in missing:
                missing.remove(path)  # the same key may occur again
                parts = [memoryview(self._sealing.seal(key, body)), body]
                try:
                    is_first = _publish(reservation.temporary, path, parts)
                except OSError as error:
                    return [*outcomes, _outcome(error)]
                if is_first:
                    outcome = Put.STORED
                    reservation.reduce(FolderUsage(1, _disk_bytes(body)))
            outcomes.append(outcome)
        return outcomes

    def _load(self, key: ObjectKey, view: memoryview) -> Got:
        path = self._file(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would block without
        except OSError as error:
            if error.errno in NO_FILE:
                with suppress(OSError):
                    unlink(path)
                return Got.CORRUPT
            return Got.MISS if error.errno in GONE else Got.UNREACHABLE
        try:
            status = os.fstat(fd)
            found = bytearray(SEAL_BYTES)
            got = Got.TRUNCATED
            if not stat.S_ISREG(status.st_mode):
                got = Got.CORRUPT
            elif status.st_size == SEAL_BYTES + view.nbytes and _read(fd, [memoryview(found), view]):
                got = self._sealing.verify(key, view, found)
            if got is Got.HIT:
                self._touch(fd, status)
                return got
        except OSError as error:
            if error.errno in GONE:
                return Got.MISS
            if error.errno != errno.EIO:
                return Got.UNREACHABLE
            got = Got.CORRUPT
        finally:
            os.close(fd)
        with suppress(OSError):
            unlink(path)
        return got

    def _file(self, key: ObjectKey) -> str:
        name = str(key)
        return f"{self._objects}/{name[:2]}/{name}"

    def _renew(self, path: str) -> bool:
        """Return whether the object exists, and count that as a use."""
        try:
            status = os.lstat(path)
        except OSError:
            return False
        if is_file := stat.S_ISREG(status.st_mode):
            self._touch(path, status)
        return is_file

    def _touch(self, file: str | int, status: os.stat_result) -> None:
        if self._bound.now_s() - status.st_mtime > TOUCH_S:
            with suppress(OSError):
                os.utime(file)


def _disk_bytes(body: memoryview) -> int:
    return disk_bytes(SEAL_BYTES + body.nbytes)


def _outcome(error: OSError) -> Put:
    return Put.FULL if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG} else Put.UNREACHABLE


def _publish(temporary: str, path: str, parts: list[memoryview]) -> bool:
    """Write `parts` to the new file `temporary` and link it as `path`. Raises OSError. Return False if
    another writer was first."""
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            _write(fd, parts)
        finally:
            os.close(fd)  # before the link: on a network file system closing sends the bytes
        return _link(temporary, path)
    finally:
        unlink(temporary)


def _link(temporary: str, path: str) -> bool:
    try:
        try:
            os.link(temporary, path)
        except FileNotFoundError:  # the first object of its folder
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            os.link(temporary, path)
    except FileExistsError:
        return False
    return True


def _write(fd: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(fd, parts))


def _read(fd: int, parts: list[memoryview]) -> bool:
    """Fill `parts` from the file; return False if it ends too early."""
    while parts:
        num_bytes = os.readv(fd, parts)
        if num_bytes == 0:
            return False
        parts = _after(parts, num_bytes)
    return True


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return `parts` without their first `num_bytes`."""
    left: list[memoryview] = []
    for part in parts:
        if num_bytes < part.nbytes:
            left.append(part[num_bytes:])
        num_bytes = max(0, num_bytes - part.nbytes)
    return left
