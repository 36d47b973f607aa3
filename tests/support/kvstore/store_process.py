"""The processes that tests of the file store start with `python -m`."""

import fcntl
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tests.support.kvstore.objects import page
from tidemill.kvstore.stores import folder_bound, object_folder
from tidemill.kvstore.stores.folder_bound import BLOCK_BYTES
from tidemill.kvstore.stores.object_folder import ObjectFolder
from tidemill.kvstore.stores.page_store import Got
from tidemill.kvstore.stores.seal import SEAL_BYTES

TRACED = {object_folder.__file__, folder_bound.__file__}
CRASH_BODY_BYTES = 2 * BLOCK_BYTES - SEAL_BYTES
CRASH_LINES_MAX = 2000
STORM_BYTES_MAX = 100_000
STORM_KEYS = 200
STORM_WRITERS = 3


def body(number: int, writer: int, num_bytes: int) -> bytes:
    """Return a body that identifies its number and writer in each half."""
    return Random(number * 100 + writer).randbytes(64).ljust(num_bytes, bytes([writer]))


def crash_at_each_line(folder: Path) -> None:
    """Open a full folder and put objects; crash before the n-th line of the store, for every n."""
    capacity_bytes = 3 * (CRASH_BODY_BYTES + SEAL_BYTES)
    for line in range(1, CRASH_LINES_MAX):
        path = folder / str(line)  # a new folder each time: leftovers of a crash would add lines
        put(ObjectFolder(path, capacity_bytes), [0, 1, 2])
        pid = os.fork()
        if pid == 0:
            sys.settrace(killer(line))
            put(ObjectFolder(path, capacity_bytes), [2, 3, 4])
            sys.settrace(None)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        check(path, range(5), CRASH_BODY_BYTES)
        put(ObjectFolder(path, 2 * capacity_bytes), [5])
        assert check(path, range(5, 6), CRASH_BODY_BYTES) == 1, "a crash made the folder useless"
        if os.waitstatus_to_exitcode(status) == 0:
            print(line)  # noqa: T201 - output for the test
            return
    sys.exit(f"no end after {CRASH_LINES_MAX} lines")


def killer(line: int) -> Any:  # noqa: ANN401 - a trace function returns itself
    lines = count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:  # noqa: ANN401 - the same
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def put(folder: ObjectFolder, numbers: list[int]) -> None:
    folder.put([(page(number), memoryview(body(number, 1, CRASH_BODY_BYTES))) for number in numbers])


def storm(folder: Path, kills: int) -> None:
    """Kill writers that fill the folder at random moments, while a reader verifies objects. Print the bytes
    in the folder at moments when no process could evict."""
    rng, capacity_bytes = Random(7), 20 * STORM_BYTES_MAX
    reader = fork(lambda: read_forever(folder, capacity_bytes))
    writers = [fork(lambda: write_forever(folder, 1, capacity_bytes))]
    while kills or len(writers) < STORM_WRITERS:
        writers.append(fork(lambda: write_forever(folder, len(writers) + 1, capacity_bytes)))
        for _ in range(rng.randrange(1, 20)):
            print(locked_bytes(folder))  # noqa: T201 - output for the test
        if kills and len(writers) == STORM_WRITERS:
            kill(writers.pop(rng.randrange(STORM_WRITERS)))
            kills -= 1
    assert os.waitpid(reader, os.WNOHANG) == (0, 0), "the reader has seen a part of an object"
    for pid in (reader, *writers):
        kill(pid)
    folder_after = ObjectFolder(folder, capacity_bytes)
    print(folder_after.usage.bytes, locked_bytes(folder))  # noqa: T201 - output for the test


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(1)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def write_forever(folder: Path, writer: int, capacity_bytes: int) -> None:
    store, rng = ObjectFolder(folder, capacity_bytes), Random(os.getpid())
    while True:
        numbers = rng.sample(range(STORM_KEYS), rng.randrange(1, 5))
        store.put(
            [(page(number), memoryview(body(number, writer, storm_bytes(number)))) for number in numbers]
        )


def read_forever(folder: Path, capacity_bytes: int) -> None:
    """Read until an object is neither whole nor missing."""
    store, rng, got = ObjectFolder(folder, capacity_bytes), Random(3), Got.MISS
    while got in {Got.HIT, Got.MISS}:
        number = rng.randrange(STORM_KEYS)
        view = bytearray(storm_bytes(number))
        [got] = store.get([(page(number), memoryview(view))])
        assert got is Got.MISS or view == body(number, view[-1], len(view))


def storm_bytes(number: int) -> int:
    return STORM_BYTES_MAX // (1 + number % 7) - SEAL_BYTES


def locked_bytes(folder: Path) -> int:
    """Return the bytes on disk of published and temporary files while no process can evict."""
    folder.mkdir(exist_ok=True)
    with (folder / "usage").open("ab") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        files: dict[int, int] = {}  # an object has two names briefly
        for path in (*folder.glob("aside/*.new"), *folder.glob("objects/*/*")):
            with suppress(FileNotFoundError):
                status = path.stat()
                files[status.st_ino] = status.st_blocks * 512
        return sum(files.values())


def check(folder: Path, numbers: range, num_bytes: int) -> int:
    """Assert that each existing object is whole, and return their number. Opens the folder again."""
    reader = ObjectFolder(folder, 1 << 30)
    hits = 0
    for number in numbers:
        view = bytearray(num_bytes)
        [outcome] = reader.get([(page(number), memoryview(view))])
        assert outcome is not Got.CORRUPT, number
        assert outcome is Got.MISS or view == body(number, 1, num_bytes), number
        hits += outcome is Got.HIT
    return hits


if __name__ == "__main__":
    action, path, *numbers = sys.argv[1:]
    match action, [int(number) for number in numbers]:
        case "crash", []:
            crash_at_each_line(Path(path))
        case "storm", [kills]:
            storm(Path(path), kills)
        case _:
            sys.exit(f"unknown: {sys.argv[1:]}")
