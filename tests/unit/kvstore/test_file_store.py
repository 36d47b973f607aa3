"""The file store in one process: restarts, use by time, full disks, hostile folders, and threads."""

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.unit.kvstore.store_process import body, page
from tidemill.kvstore import folder_bound
from tidemill.kvstore.errors import StoreError
from tidemill.kvstore.file_store import FileStore
from tidemill.kvstore.folder_bound import FolderBound, Usage
from tidemill.kvstore.object_folder import TOUCH_S, ObjectFolder
from tidemill.kvstore.seal import SEAL_BYTES
from tidemill.kvstore.store import Got, Put

BODY_BYTES = 1000
OBJECT_BYTES = BODY_BYTES + SEAL_BYTES
AMPLE_BYTES = 1 << 30


class Clock:
    """Moves when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def put(folder: ObjectFolder, *numbers: int) -> list[Put]:
    return folder.put([(page(number), memoryview(body(number, 1, BODY_BYTES))) for number in numbers])


def get(folder: ObjectFolder, number: int) -> Got:
    view = bytearray(BODY_BYTES)
    [outcome] = folder.get([(page(number), memoryview(view))])
    assert outcome is not Got.HIT or view == body(number, 1, BODY_BYTES)
    return outcome


def object_path(path: Path, number: int) -> Path:
    [found] = path.glob(f"objects/*/{page(number)}")
    return found


def age(path: Path, by_s: float) -> None:
    status = path.stat()
    os.utime(path, (status.st_atime, status.st_mtime - by_s))


def held_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("objects/*/*"))


def test_a_restart_keeps_the_cache_warm_and_knows_its_size(tmp_path: Path) -> None:
    put(ObjectFolder(tmp_path, AMPLE_BYTES), 1, 2, 3)
    reopened = ObjectFolder(tmp_path, AMPLE_BYTES)
    assert reopened.usage == (3, 3 * OBJECT_BYTES)
    assert get(reopened, 2) is Got.HIT


def test_a_smaller_capacity_is_obeyed_at_once(tmp_path: Path) -> None:
    put(ObjectFolder(tmp_path, AMPLE_BYTES), 1, 2, 3, 4)
    reopened = ObjectFolder(tmp_path, 2 * OBJECT_BYTES)
    assert held_bytes(tmp_path) == reopened.usage.bytes <= 2 * OBJECT_BYTES


def test_use_is_written_down_once_in_a_while_and_decides_who_goes(tmp_path: Path) -> None:
    clock = Clock()
    folder = ObjectFolder(tmp_path, 3 * OBJECT_BYTES, clock)
    put(folder, 1, 2, 3)
    for number, by_s in ((1, 0.6), (2, 0.4), (3, 0.2)):
        age(object_path(tmp_path, number), by_s)
    used = object_path(tmp_path, 1).stat().st_mtime_ns
    assert get(folder, 1) is Got.HIT
    assert object_path(tmp_path, 1).stat().st_mtime_ns == used, "a read of a recent object wrote"
    clock.now_s += TOUCH_S
    assert get(folder, 1) is Got.HIT
    assert object_path(tmp_path, 1).stat().st_mtime_ns > used
    put(folder, 4)
    assert [get(folder, number) for number in (1, 2, 4)] == [Got.HIT, Got.MISS, Got.HIT]


def test_a_restart_knows_what_was_used_last(tmp_path: Path) -> None:
    put(ObjectFolder(tmp_path, AMPLE_BYTES), 1, 2, 3)
    for number, by_s in ((1, 900.0), (2, 800.0), (3, 700.0)):
        age(object_path(tmp_path, number), by_s)
    assert get(ObjectFolder(tmp_path, AMPLE_BYTES), 1) is Got.HIT
    reopened = ObjectFolder(tmp_path, 3 * OBJECT_BYTES)
    put(reopened, 4)
    assert [get(reopened, number) for number in (1, 2, 4)] == [Got.HIT, Got.MISS, Got.HIT]


def test_what_is_read_all_the_time_outlives_a_store_that_is_replaced_within_seconds(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 32 * OBJECT_BYTES)
    for number in range(200):
        put(folder, number)
        for path in tmp_path.glob("objects/*/*"):
            age(path, TOUCH_S / 2)  # so much time passes
        assert get(folder, 0) is Got.HIT, number


def test_a_put_of_an_old_object_is_a_use(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 3 * OBJECT_BYTES)
    put(folder, 1, 2, 3)
    for number, by_s in ((1, 900.0), (2, 800.0), (3, 700.0)):
        age(object_path(tmp_path, number), by_s)
    assert put(folder, 1) == [Put.EXISTED]
    assert put(folder, 4) == [Put.STORED]
    assert [get(folder, number) for number in (1, 2)] == [Got.HIT, Got.MISS]


def test_evictions_come_in_bunches_so_that_counts_are_rare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[Path] = []
    list_files: Callable[[Path], object] = vars(folder_bound)["_files"]

    def counted(objects: Path) -> object:
        counts.append(objects)
        return list_files(objects)

    folder = ObjectFolder(tmp_path, 64 * OBJECT_BYTES)
    monkeypatch.setattr(folder_bound, "_files", counted)
    for number in range(128):
        put(folder, number)
        assert held_bytes(tmp_path) <= 64 * OBJECT_BYTES
    assert 0 < len(counts) <= 128 // 4


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_full_disk_refuses_from_there_on_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    writev, calls = os.writev, [0]

    def full(fd: int, parts: list[memoryview]) -> int:
        calls[0] += 1
        if calls[0] > fails_at:
            writev(fd, [memoryview(bytes(10))])
            raise OSError(errno.ENOSPC, "no space left on device")
        return writev(fd, parts)

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        assert put(folder, 1, 2, 3) == [Put.STORED] * fails_at + [Put.FULL] + [Put.SKIPPED] * (2 - fails_at)
    assert held_bytes(tmp_path) == folder.usage.bytes == fails_at * OBJECT_BYTES
    assert not list((tmp_path / "aside").iterdir())
    assert put(folder, 1, 2, 3) == [Put.EXISTED] * fails_at + [Put.STORED] * (3 - fails_at)


def test_a_disk_that_others_fill_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    for number in range(64):
        put(folder, number)
        age(object_path(tmp_path, number), 1000.0 - number)
    writev = os.writev

    def is_full() -> bool:
        return held_bytes(tmp_path) > 60 * OBJECT_BYTES

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
def test_whatever_the_system_refuses_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """And when it refuses no more, all is as if it never had."""
    path, capacity_bytes = tmp_path / "store", 4 * OBJECT_BYTES
    folder = ObjectFolder(path, capacity_bytes)
    put(folder, 1, 2, 3)
    real: Callable[..., object] = getattr(os, name)

    def refuses(target: object, *rest: object, **options: object) -> object:
        if isinstance(target, int) or str(path) in os.fspath(target):  # pyright: ignore[reportArgumentType] - a path
            raise OSError(number, os.strerror(number))
        return real(target, *rest, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, name, refuses)
        outcomes = put(folder, 1, 4, 5)
        assert outcomes == sorted(outcomes, key=lambda one: (not one.is_there, one is Put.SKIPPED))
        assert get(folder, 1) is not Got.TRUNCATED
        folder.contains([page(1)])
        folder.remove([page(9)])
        with suppress(StoreError):
            ObjectFolder(path, capacity_bytes)
    assert put(folder, 6, 7, 8) == [Put.STORED] * 3
    assert [get(folder, number) for number in (6, 7, 8)] == [Got.HIT] * 3
    reopened = ObjectFolder(path, capacity_bytes)
    assert held_bytes(path) == reopened.usage.bytes <= capacity_bytes
    assert not list((path / "aside").iterdir())


def test_what_follows_an_object_that_is_not_there_is_skipped_though_it_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, calls = os.writev, [0]

    def fails_once(fd: int, parts: list[memoryview]) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, "no space left on device")
        return writev(fd, parts)

    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    monkeypatch.setattr(os, "writev", fails_once)
    assert put(folder, 1, 2, 3) == [Put.STORED, Put.FULL, Put.SKIPPED]
    assert folder.contains([page(number) for number in (1, 2, 3)]) == [True, False, False]


def test_a_writer_knows_what_others_have_put(tmp_path: Path) -> None:
    capacity_bytes = 8 * OBJECT_BYTES
    one, other = ObjectFolder(tmp_path, capacity_bytes), ObjectFolder(tmp_path, capacity_bytes)
    put(one, 0)
    for number in range(1, 8):
        put(other, number)
    put(one, 8, 9)
    assert held_bytes(tmp_path) == one.usage.bytes <= capacity_bytes


def test_reads_and_writes_may_be_cut_short_by_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readv, writev = os.readv, os.writev

    def starts(parts: list[memoryview]) -> list[memoryview]:
        return [part[:37] for part in parts][:1]

    monkeypatch.setattr(os, "readv", lambda fd, parts: readv(fd, starts(parts)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] - setattr gives no types
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, starts(parts)))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType] - setattr gives no types
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    assert put(folder, 1) == [Put.STORED]
    assert get(folder, 1) is Got.HIT


@pytest.mark.parametrize(
    ("number", "outcome", "is_kept"), [(errno.EIO, Got.CORRUPT, False), (errno.ESTALE, Got.UNREACHABLE, True)]
)
def test_what_the_disk_cannot_read_is_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Got, *, is_kept: bool
) -> None:
    folder = ObjectFolder(tmp_path, AMPLE_BYTES)
    put(folder, 1)

    def broken(fd: int, parts: list[memoryview]) -> int:
        raise OSError(number, f"{fd} {len(parts)}")

    monkeypatch.setattr(os, "readv", broken)
    assert get(folder, 1) is outcome
    assert folder.contains([page(1)]) == [is_kept]


def test_what_dead_writers_left_is_cleared_by_the_next_count(tmp_path: Path) -> None:
    put(ObjectFolder(tmp_path, AMPLE_BYTES), 1)
    aside = tmp_path / "aside"
    dead, lost = "0" * 32 + "-7", "1" * 32 + "-0"
    for name in (dead, f"{dead}.new", f"{lost}.new", "notes.txt"):
        (aside / name).write_bytes(bytes(500))
    os.link(object_path(tmp_path, 1), aside / ("2" * 32 + "-3.new"))
    reopened = ObjectFolder(tmp_path, AMPLE_BYTES)
    assert [file.name for file in aside.iterdir()] == ["notes.txt"]
    assert reopened.usage == (1, OBJECT_BYTES)
    assert get(reopened, 1) is Got.HIT


def test_what_the_living_have_promised_is_counted_and_kept(tmp_path: Path) -> None:
    bound = FolderBound(tmp_path, 4 * OBJECT_BYTES, time.monotonic)
    promise = bound.promise(Usage(3, 3 * OBJECT_BYTES), keep=frozenset())
    folder = ObjectFolder(tmp_path, 4 * OBJECT_BYTES)
    assert folder.usage == (3, 3 * OBJECT_BYTES)
    assert put(folder, 1, 2) == [Put.FULL, Put.SKIPPED], "space that is promised was given away"
    assert put(folder, 1) == [Put.STORED]
    promise.reduce(Usage(1, OBJECT_BYTES))  # one is there, as far as anybody knows
    bound.end(promise)
    assert put(folder, 2, 3) == [Put.STORED, Put.STORED], "what was not written is still taken"
    assert folder.usage.bytes <= 4 * OBJECT_BYTES


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    stray = ("thesis.txt", "objects/thesis.txt", "objects/ab/thesis.txt", f"objects/00/{page(1)}.bak")
    mine = [tmp_path / name for name in stray]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5000))
        age(path, 1e6)
    folder = ObjectFolder(tmp_path, 2 * OBJECT_BYTES)
    for number in range(6):
        assert put(folder, number) == [Put.STORED]
    assert all(path.exists() for path in mine)
    assert {one.key for one in folder.held()} <= {page(number) for number in range(6)}


def test_a_folder_emptied_under_a_running_store_is_filled_again(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path / "store", AMPLE_BYTES)
    put(folder, 1)
    (tmp_path / "store").rename(tmp_path / "gone")
    assert get(folder, 1) is Got.MISS
    assert put(folder, 1) == [Put.STORED]
    assert get(folder, 1) is Got.HIT


@pytest.mark.parametrize("record", [b"", b"\xff" * 16, b"\x00" * 7])
def test_a_record_of_use_that_is_nonsense_is_counted_anew(tmp_path: Path, record: bytes) -> None:
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


def test_who_does_not_get_the_lock_is_refused_and_can_still_read(
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


def test_a_folder_that_cannot_be_used_is_named_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="ascii")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        with pytest.raises(StoreError, match="name a folder that this user may write to") as caught:
            ObjectFolder(path, AMPLE_BYTES)
        assert "\n" not in str(caught.value)


def test_a_file_system_without_links_is_named_when_the_store_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: str, target: Path) -> None:
        raise PermissionError(errno.EPERM, f"no links: {source} {target}")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreError, match="hard links"):
        ObjectFolder(tmp_path, AMPLE_BYTES)
    assert not list((tmp_path / "aside").iterdir())


class Gate:
    """Holds every read of a file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()
        self._readv = os.readv
        monkeypatch.setattr(os, "readv", self.read)

    def read(self, fd: int, parts: list[memoryview]) -> int:
        self.reached.release()
        self.opened.wait()
        return self._readv(fd, parts)


def test_a_cancelled_get_ends_when_its_transfer_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = bytearray(BODY_BYTES)

    async def scenario() -> None:
        store = FileStore(tmp_path, AMPLE_BYTES)
        await store.put([(page(1), memoryview(body(1, 1, BODY_BYTES)))])
        gate = Gate(monkeypatch)
        task = asyncio.ensure_future(store.get([(page(1), memoryview(memory))]))
        await asyncio.to_thread(gate.reached.acquire)
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        assert not any(memory)
        gate.opened.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert memory == body(1, 1, BODY_BYTES)
        assert store.stats().hits == 1
        await store.close()

    asyncio.run(scenario())


def test_the_event_loop_and_puts_go_on_while_reads_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        store = FileStore(tmp_path, AMPLE_BYTES)
        await store.put([(page(1), memoryview(body(1, 1, BODY_BYTES)))])
        gate = Gate(monkeypatch)
        reads = [
            asyncio.ensure_future(store.get([(page(1), memoryview(bytearray(BODY_BYTES)))])) for _ in range(9)
        ]
        await asyncio.to_thread(gate.reached.acquire)
        assert await store.put([(page(2), memoryview(body(2, 1, BODY_BYTES)))]) == [Put.STORED]
        assert not any(read.done() for read in reads)
        gate.opened.set()
        assert await asyncio.gather(*reads) == [[Got.HIT]] * 9
        await store.close()

    asyncio.run(scenario())


def test_closing_waits_for_the_transfers_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        store = FileStore(tmp_path, AMPLE_BYTES)
        await store.put([(page(1), memoryview(body(1, 1, BODY_BYTES)))])
        gate = Gate(monkeypatch)
        read = asyncio.ensure_future(store.get([(page(1), memoryview(bytearray(BODY_BYTES)))]))
        await asyncio.to_thread(gate.reached.acquire)
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        assert not closing.done()
        gate.opened.set()
        await closing
        assert await read == [Got.HIT]

    asyncio.run(scenario())
