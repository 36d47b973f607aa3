"""The file store in one process: restarts, order of use, several threads."""

import asyncio
import os
import threading
from collections.abc import Callable
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
from tidemill.kvstore.stores import folder_bound, page_store
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.object_folder import TOUCH_S, ObjectFolder
from tidemill.kvstore.stores.page_store import Got, Put


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_file_store_shares_its_folder_with_others_and_later_processes(tmp_path: Path) -> None:
    one, other = ObjectFolder(tmp_path, AMPLE_BYTES), ObjectFolder(tmp_path, AMPLE_BYTES)
    put(one, 1, 2, 3, 4)
    for folder in (other, ObjectFolder(tmp_path, AMPLE_BYTES)):
        assert folder.contains([page(1)]) == [True]
        assert folder.usage == (4, 4 * OBJECT_BYTES)
        assert get(folder, 2) is Got.HIT
    smaller = ObjectFolder(tmp_path, 2 * OBJECT_BYTES)
    assert stored_bytes(tmp_path) == smaller.usage.bytes <= 2 * OBJECT_BYTES


@pytest.mark.parametrize("use", [get, put])
def test_file_store_keeps_the_order_of_use_after_a_restart(
    tmp_path: Path, use: Callable[[ObjectFolder, int], object]
) -> None:
    put(ObjectFolder(tmp_path, AMPLE_BYTES), 1, 2, 3)
    for number, by_s in ((1, 900.0), (2, 800.0), (3, 700.0)):
        age(object_path(tmp_path, number), by_s)
    assert use(ObjectFolder(tmp_path, AMPLE_BYTES), 1) in (Got.HIT, [Put.EXISTED])
    reopened = ObjectFolder(tmp_path, 3 * OBJECT_BYTES)
    put(reopened, 4)
    assert [get(reopened, number) for number in (1, 2, 4)] == [Got.HIT, Got.MISS, Got.HIT]


def test_file_store_records_use_at_intervals_and_evicts_by_it(tmp_path: Path) -> None:
    clock = Clock()
    folder = ObjectFolder(tmp_path, 3 * OBJECT_BYTES, clock)
    put(folder, 1, 2, 3)
    for number, by_s in ((1, 0.6), (2, 0.4), (3, 0.2)):
        age(object_path(tmp_path, number), by_s)
    used = object_path(tmp_path, 1).stat().st_mtime_ns
    assert get(folder, 1) is Got.HIT
    assert object_path(tmp_path, 1).stat().st_mtime_ns == used, "a read of a recent object changed its time"
    clock.now_s += TOUCH_S
    assert get(folder, 1) is Got.HIT
    assert object_path(tmp_path, 1).stat().st_mtime_ns > used
    put(folder, 4)
    assert [get(folder, number) for number in (1, 2, 4)] == [Got.HIT, Got.MISS, Got.HIT]


def test_file_store_keeps_a_frequently_read_object_under_fast_turnover(tmp_path: Path) -> None:
    folder = ObjectFolder(tmp_path, 32 * OBJECT_BYTES)
    for number in range(200):
        put(folder, number)
        for path in tmp_path.glob("objects/*/*"):
            age(path, TOUCH_S / 2)  # time passes
        assert get(folder, 0) is Got.HIT, number


@pytest.mark.parametrize("by_s", [4e7, -4e7])
def test_file_store_goes_on_when_the_wall_clock_has_jumped(tmp_path: Path, by_s: float) -> None:
    """Files that were used before the jump keep their order, whether their times are now in the future or
    long ago."""
    folder = ObjectFolder(tmp_path, 3 * OBJECT_BYTES)
    put(folder, 1, 2, 3)
    for number, age_s in ((1, 0.0), (2, 100.0), (3, 200.0)):
        age(object_path(tmp_path, number), by_s + age_s)
    assert get(folder, 2) is Got.HIT
    for number in range(4, 12):
        assert put(folder, number) == [Put.STORED]
        assert get(folder, number) is Got.HIT
        assert stored_bytes(tmp_path) <= 3 * OBJECT_BYTES
    assert get(folder, 3) is Got.MISS


def test_file_store_evicts_in_batches_so_that_recounts_are_rare(
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
        assert stored_bytes(tmp_path) <= 64 * OBJECT_BYTES
    assert 0 < len(counts) <= 128 // 4


def test_file_store_counts_objects_of_other_writers(tmp_path: Path) -> None:
    capacity_bytes = 8 * OBJECT_BYTES
    one, other = ObjectFolder(tmp_path, capacity_bytes), ObjectFolder(tmp_path, capacity_bytes)
    put(one, 0)
    for number in range(1, 8):
        put(other, number)
    put(one, 8, 9)
    assert stored_bytes(tmp_path) == one.usage.bytes <= capacity_bytes


class Gate:
    """Blocks every read of a file until the test opens it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()
        self._readv = os.readv
        monkeypatch.setattr(os, "readv", self.read)

    def read(self, fd: int, parts: list[memoryview]) -> int:
        self.reached.release()
        self.opened.wait()
        return self._readv(fd, parts)


async def test_file_store_cancelled_get_waits_for_its_transfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = bytearray(BODY_BYTES)
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


async def test_file_store_puts_continue_and_close_waits_while_reads_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path, AMPLE_BYTES)
    await store.put([(page(1), memoryview(body(1, 1, BODY_BYTES)))])
    gate = Gate(monkeypatch)
    reads = [
        asyncio.ensure_future(store.get([(page(1), memoryview(bytearray(BODY_BYTES)))])) for _ in range(9)
    ]
    await asyncio.to_thread(gate.reached.acquire)
    assert await store.put([(page(2), memoryview(body(2, 1, BODY_BYTES)))]) == [Put.STORED]
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    assert not any(waits.done() for waits in (closing, *reads))
    gate.opened.set()
    await closing
    assert await asyncio.gather(*reads) == [[Got.HIT]] * 9


@pytest.mark.parametrize("count", [0, 1, 3, 8, 9, 19])
def test_file_store_reads_a_large_batch_on_several_threads_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(page_store, "SHARE_BYTES_MIN", 2 * BODY_BYTES)
    put(ObjectFolder(tmp_path, AMPLE_BYTES), *range(0, count, 2))
    views = [memoryview(bytearray(BODY_BYTES)) for _ in range(count)]

    async def scenario() -> list[Got]:
        store = FileStore(tmp_path, AMPLE_BYTES)
        outcomes = await store.get([(page(number), view) for number, view in enumerate(views)])
        await store.close()
        return outcomes

    assert asyncio.run(scenario()) == [Got.MISS if number % 2 else Got.HIT for number in range(count)]
    for number, view in enumerate(views):
        assert number % 2 or view == body(number, 1, BODY_BYTES)
