"""Faults of the folder of a file store: full disks, crashed writers, foreign files."""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.kvstore.folders import (
    AMPLE_BYTES,
    BODY_BYTES,
    OBJECT_BYTES,
    age,
    get,
    object_path,
    put,
    stored_bytes,
)
from tests.support.kvstore.objects import page
from tests.support.kvstore.store_process import body
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.stores import folder_bound
from tidemill.kvstore.stores.folder_bound import BLOCK_BYTES, FolderBound, FolderUsage
from tidemill.kvstore.stores.object_folder import ObjectFolder
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.kvstore.stores.seal import PLAIN, SEAL_BYTES


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_object_folder_on_a_full_disk_refuses_the_rest_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    writev, calls = os.writev, [0]

    def full(fd: int, parts: list[memoryview]) -> int:
        calls[0] += 1
        if calls[0] == fails_at + 1:  # later ones would succeed
            writev(fd, [memoryview(bytes(10))])
            raise OSError(errno.ENOSPC, "no space left on device")
        return writev(fd, parts)

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        assert put(folder, 1, 2, 3) == [Put.STORED] * fails_at + [Put.FULL] + [Put.SKIPPED] * (2 - fails_at)
    assert stored_bytes(tmp_path) == folder.usage.bytes == fails_at * OBJECT_BYTES
    assert not list((tmp_path / "aside").iterdir())
    assert put(folder, 1, 2, 3) == [Put.EXISTED] * fails_at + [Put.STORED] * (3 - fails_at)


def test_object_folder_evicts_when_other_files_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    for number in range(64):
        put(folder, number)
        age(object_path(tmp_path, number), 1000.0 - number)
    writev = os.writev

    def is_full() -> bool:
        return stored_bytes(tmp_path) > 60 * OBJECT_BYTES

    def full(fd: int, parts: list[memoryview]) -> int:
        if is_full():
            raise OSError(errno.ENOSPC, "no space left on device")
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", full)
    tries = 0
    while put(folder, 64) == [Put.FULL]:
        tries += 1
        assert tries < 10
    assert tries > 0
    assert not is_full()
    assert [get(folder, number) for number in (0, 63, 64)] == [Got.MISS, Got.HIT, Got.HIT]


CALLS = ("open", "link", "unlink", "writev", "readv", "pwrite", "pread", "mkdir", "utime", "stat", "scandir")
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOENT)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("number", ERRORS)
def test_object_folder_returns_an_outcome_for_each_system_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """Afterwards the folder works as before."""
    path, capacity_bytes = tmp_path / "store", 4 * OBJECT_BYTES
    folder = ObjectFolder(path, capacity_bytes)
    put(folder, 1, 2, 3)
    real: Callable[..., object] = getattr(os, name)

    def refuses(target: int | str | os.PathLike[str], *rest: object, **options: object) -> object:
        if isinstance(target, int) or str(path) in os.fspath(target):
            raise OSError(number, os.strerror(number))
        return real(target, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuses)
        outcomes = put(folder, 1, 4, 5)
        assert outcomes == sorted(
            outcomes, key=lambda outcome: (not outcome.is_there, outcome is Put.SKIPPED)
        )
        assert get(folder, 1) is not Got.TRUNCATED
        folder.contains([page(1)])
        folder.remove([page(9)])
        with suppress(StoreError):
            ObjectFolder(path, capacity_bytes)
    assert put(folder, 6, 7, 8) == [Put.STORED] * 3
    assert [get(folder, number) for number in (6, 7, 8)] == [Got.HIT] * 3
    reopened = ObjectFolder(path, capacity_bytes)
    assert stored_bytes(path) == reopened.usage.bytes <= capacity_bytes
    assert not list((path / "aside").iterdir())


def test_object_folder_second_concurrent_writer_has_not_stored_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ObjectFolder(tmp_path, AMPLE_BYTES), ObjectFolder(tmp_path, AMPLE_BYTES)
    writev, outcomes = os.writev, list[Put]()

    def meanwhile(fd: int, parts: list[memoryview]) -> int:
        monkeypatch.setattr(os, "writev", writev)
        outcomes.extend(other.put([(page(1), memoryview(body(1, 2, BODY_BYTES)))]))
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", meanwhile)
    assert put(one, 1) == [Put.EXISTED]
    assert outcomes == [Put.STORED]
    view = bytearray(BODY_BYTES)
    assert one.get([(page(1), memoryview(view))]) == [Got.HIT]
    assert view == body(1, 2, BODY_BYTES)
    assert put(one, 2) == [Put.STORED]
    assert one.usage == (2, 2 * OBJECT_BYTES), "an object that was not stored is counted"


def test_object_folder_continues_short_reads_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv, writev = os.readv, os.writev

    def starts(parts: list[memoryview]) -> list[memoryview]:
        return [part[:37] for part in parts][:1]

    monkeypatch.setattr(os, "readv", lambda fd, parts: readv(fd, starts(parts)))
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, starts(parts)))
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    assert put(folder, 1) == [Put.STORED]
    assert get(folder, 1) is Got.HIT


@pytest.mark.parametrize(
    ("number", "outcome", "is_stored"),
    [
        (errno.EIO, Got.CORRUPT, False),
        (errno.ESTALE, Got.MISS, True),
        (errno.EACCES, Got.UNREACHABLE, True),
    ],
)
def test_object_folder_reports_unreadable_files_as_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Got, *, is_stored: bool
) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    put(folder, 1)

    def broken(fd: int, parts: list[memoryview]) -> int:
        raise OSError(number, f"{fd} {len(parts)}")

    monkeypatch.setattr(os, "readv", broken)
    assert get(folder, 1) is outcome
    assert folder.contains([page(1)]) == [is_stored]


def test_folder_bound_removes_files_of_crashed_writers(tmp_path: Path) -> None:
    put(ObjectFolder(tmp_path, AMPLE_BYTES), 1)
    reservations = tmp_path / "aside"
    crashed, lost = "0" * 32 + "-7", "1" * 32 + "-0"
    for name in (crashed, f"{crashed}.new", f"{lost}.new", "notes.txt"):
        (reservations / name).write_bytes(bytes(500))
    os.link(object_path(tmp_path, 1), reservations / ("2" * 32 + "-3.new"))
    reopened = ObjectFolder(tmp_path, AMPLE_BYTES)
    assert [file.name for file in reservations.iterdir()] == ["notes.txt"]
    assert reopened.usage == (1, OBJECT_BYTES)
    assert get(reopened, 1) is Got.HIT


def test_folder_bound_counts_and_keeps_reservations_of_live_writers(tmp_path: Path) -> None:
    bound = FolderBound(tmp_path, 4 * OBJECT_BYTES, time.monotonic)
    reservation = bound.reserve(FolderUsage(3, 3 * OBJECT_BYTES), keep=frozenset())
    folder = ObjectFolder(tmp_path, 4 * OBJECT_BYTES)
    assert folder.usage == (3, 3 * OBJECT_BYTES)
    assert put(folder, 1, 2) == [Put.FULL, Put.SKIPPED], "reserved space was used"
    assert put(folder, 1) == [Put.STORED]
    reservation.reduce(FolderUsage(1, OBJECT_BYTES))  # one object counts as published
    bound.end(reservation)
    assert put(folder, 2, 3) == [Put.STORED, Put.STORED], "the rest of the reservation was not released"
    assert folder.usage.bytes <= 4 * OBJECT_BYTES


def test_folder_bound_neither_counts_nor_deletes_foreign_files(tmp_path: Path) -> None:
    stray = ("thesis.txt", "objects/thesis.txt", "objects/ab/thesis.txt", f"objects/00/{page(1)}.bak")
    foreign = [tmp_path / name for name in stray]
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5000))
        age(path, 1e6)
    folder = ObjectFolder(tmp_path, 2 * OBJECT_BYTES)
    for number in range(6):
        assert put(folder, number) == [Put.STORED]
    assert all(path.exists() for path in foreign)
    assert {stored.key for stored in folder.list_objects()} <= {page(number) for number in range(6)}


@pytest.mark.parametrize("body_bytes", [1, BLOCK_BYTES - SEAL_BYTES + 1, 2 * BLOCK_BYTES])
def test_folder_bound_counts_whole_blocks(tmp_path: Path, body_bytes: int) -> None:
    """Pages of 8 KiB take 12 KiB each with their seals."""
    capacity_bytes = 64 * BLOCK_BYTES
    folder = ObjectFolder(tmp_path, capacity_bytes)
    stored: set[int] = set()
    for number in range(80):
        assert folder.put([(page(number), memoryview(bytearray(body_bytes)))]) == [Put.STORED]
        stored.add(stored_bytes(tmp_path))
        assert stored_bytes(tmp_path) == folder.usage.bytes
    assert max(stored) <= capacity_bytes
    assert max(stored) > capacity_bytes - 4 * BLOCK_BYTES, "space is left"
    too_many = [(page(number), memoryview(bytearray(body_bytes))) for number in range(100, 165)]
    assert Put.STORED in (outcomes := folder.put(too_many))
    assert outcomes[-1] is not Put.STORED
    assert stored_bytes(tmp_path) <= capacity_bytes


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    """Link to a file that would be a hit."""
    target = path.parent.parent / "target"
    found = body(1, 1, BODY_BYTES)
    target.write_bytes(PLAIN.seal(page(1), memoryview(found)) + found)
    path.symlink_to(target)


@pytest.mark.parametrize("make", [make_fifo, make_link])
def test_object_folder_reads_regular_files_only(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """Anything else under the name of an object is removed; a pipe would block its reader."""
    folder = ObjectFolder(tmp_path, 2 * OBJECT_BYTES)
    put(folder, 1)
    path = object_path(tmp_path, 1)
    path.unlink()
    make(path)
    assert get(folder, 1) is Got.CORRUPT
    assert get(folder, 1) is Got.MISS
    assert put(folder, 1) == [Put.STORED]
    assert get(folder, 1) is Got.HIT


def test_object_folder_serves_beside_a_folder_with_the_name_of_an_object(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 2 * OBJECT_BYTES)
    put(folder, 1)
    path = object_path(tmp_path, 1)
    path.unlink()
    path.mkdir()
    assert get(folder, 1) is Got.CORRUPT
    for number in range(2, 8):
        assert put(folder, number) == [Put.STORED]
        assert get(folder, number) is Got.HIT
    assert path.is_dir()


def test_object_folder_recovers_when_its_folder_is_emptied(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path / "store", AMPLE_BYTES)
    put(folder, 1)
    (tmp_path / "store").rename(tmp_path / "gone")
    assert get(folder, 1) is Got.MISS
    assert put(folder, 1) == [Put.STORED]
    assert get(folder, 1) is Got.HIT


@pytest.mark.parametrize("record", [b"", b"\xff" * 16, b"\x00" * 7])
def test_folder_bound_recounts_when_the_usage_file_is_invalid(tmp_path: Path, record: bytes) -> None:
    folder = ObjectFolder(tmp_path, 4 * OBJECT_BYTES)
    put(folder, 1, 2)
    (tmp_path / "usage").write_bytes(record)
    assert put(folder, 3) == [Put.STORED]
    assert folder.usage == (3, 3 * OBJECT_BYTES)


@contextmanager
def locked_by_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(folder_bound, "_LOCK_WAITS_S", (0.0,))
    with (path / "usage").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        yield


def test_object_folder_without_the_lock_refuses_puts_and_still_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    put(folder, 1)
    with locked_by_another(tmp_path, monkeypatch):
        assert put(folder, 1, 2, 3) == [Put.EXISTED, Put.UNREACHABLE, Put.SKIPPED]
        assert get(folder, 1) is Got.HIT
        with pytest.raises(StoreError, match="another process keeps it locked"):
            ObjectFolder(tmp_path, AMPLE_BYTES)
    assert put(folder, 2) == [Put.STORED]


def test_object_folder_names_the_fix_for_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="ascii")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(StoreError, match="name a folder that this user may write to") as caught:
            ObjectFolder(path, AMPLE_BYTES)
        assert "\n" not in str(caught.value)


def test_object_folder_names_a_file_system_without_links_when_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: Path) -> None:
        raise PermissionError(errno.EPERM, f"no links: {source} {target}")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match="hard links"):
        ObjectFolder(tmp_path, AMPLE_BYTES)
    assert not list((tmp_path / "aside").iterdir())
