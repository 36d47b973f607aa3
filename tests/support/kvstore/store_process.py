"""What the tests of the file store run in processes of their own, as `python -m`."""

import asyncio
import fcntl
import json
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

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores import folder_bound, object_folder
from tidemill.kvstore.stores.file_store import FileStore
from tidemill.kvstore.stores.object_folder import ObjectFolder
from tidemill.kvstore.stores.page_store import Got
from tidemill.kvstore.stores.seal import SEAL_BYTES

TRACED = {object_folder.__file__, folder_bound.__file__}
CRASH_BODY_BYTES = 5000
CRASH_LINES_MAX = 2000
STORM_BYTES_MAX = 100_000
STORM_KEYS = 200
STORM_WRITERS = 3


def page(number: int) -> ObjectKey:
    return ObjectKey(Kind.PAGE, PageKey(number.to_bytes(16, "big")))


def body(number: int, writer: int, num_bytes: int) -> bytes:
    """Whoever reads one half of it knows the other."""
    return Random(number * 100 + writer).randbytes(64).ljust(num_bytes, bytes([writer]))


async def contend(folder: Path, writer: int, num_keys: int, num_bytes: int) -> None:
    """Put every key, in another order than other writers, and print the outcome of each."""
    store = FileStore(folder, 1 << 30)
    order = Random(writer).sample(range(num_keys), num_keys)
    print("open", flush=True)  # noqa: T201 - the test starts all writers at once
    sys.stdin.readline()
    outcomes = {
        number: (await store.put([(page(number), memoryview(body(number, writer, num_bytes)))]))[0].value
        for number in order
    }
    await store.close()
    print(json.dumps(outcomes))  # noqa: T201 - the answer


def crash_at_each_line(folder: Path) -> None:
    """Open a full folder and put, killed before the n-th line of the store's code, for every n there is."""
    capacity_bytes = 3 * (CRASH_BODY_BYTES + SEAL_BYTES)
    for line in range(1, CRASH_LINES_MAX):
        path = folder / str(line)  # a new one each time: what a crash leaves behind adds lines to the next
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
            print(line)  # noqa: T201 - the answer
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
    """Writers put at the edge of the capacity, and one after the other is killed at some moment, while a
    reader looks. Prints what the folder held at moments at which nobody could evict."""
    rng, capacity_bytes = Random(7), 20 * STORM_BYTES_MAX
    reader = forked(lambda: read_for_ever(folder, capacity_bytes))
    writers = [forked(lambda: write_for_ever(folder, 1, capacity_bytes))]
    while kills or len(writers) < STORM_WRITERS:
        writers.append(forked(lambda: write_for_ever(folder, len(writers) + 1, capacity_bytes)))
        for _ in range(rng.randrange(1, 20)):
            print(locked_bytes(folder))  # noqa: T201 - the answer
        if kills and len(writers) == STORM_WRITERS:
            kill(writers.pop(rng.randrange(STORM_WRITERS)))
            kills -= 1
    assert os.waitpid(reader, os.WNOHANG) == (0, 0), "the reader has seen half an object"
    for pid in (reader, *writers):
        kill(pid)
    folder_after = ObjectFolder(folder, capacity_bytes)
    print(folder_after.usage.bytes, locked_bytes(folder))  # noqa: T201 - the answer


def forked(work: Callable[[], None]) -> int:
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


def write_for_ever(folder: Path, writer: int, capacity_bytes: int) -> None:
    store, rng = ObjectFolder(folder, capacity_bytes), Random(os.getpid())
    while True:
        numbers = rng.sample(range(STORM_KEYS), rng.randrange(1, 5))
        store.put(
            [(page(number), memoryview(body(number, writer, storm_bytes(number)))) for number in numbers]
        )


def read_for_ever(folder: Path, capacity_bytes: int) -> None:
    """Ends when an object is neither whole nor missing."""
    store, rng, got = ObjectFolder(folder, capacity_bytes), Random(3), Got.MISS
    while got in {Got.HIT, Got.MISS}:
        number = rng.randrange(STORM_KEYS)
        view = bytearray(storm_bytes(number))
        [got] = store.get([(page(number), memoryview(view))])
        assert got is Got.MISS or view == body(number, view[-1], len(view))


def storm_bytes(number: int) -> int:
    return STORM_BYTES_MAX // (1 + number % 7) - SEAL_BYTES


def locked_bytes(folder: Path) -> int:
    """What is in the folder and what is being written, at a moment at which nobody evicts."""
    folder.mkdir(exist_ok=True)
    with (folder / "usage").open("ab") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        files: dict[int, int] = {}  # an object has two names for a moment
        for path in (*folder.glob("aside/*.new"), *folder.glob("objects/*/*")):
            with suppress(FileNotFoundError):
                status = path.stat()
                files[status.st_ino] = status.st_size
        return sum(files.values())


def check(folder: Path, numbers: range, num_bytes: int) -> int:
    """Every object that can be seen is whole; how many there are. Reads the files as a new process would."""
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
        case "contend", [writer, num_keys, num_bytes]:
            asyncio.run(contend(Path(path), writer, num_keys, num_bytes))
        case "crash", []:
            crash_at_each_line(Path(path))
        case "storm", [kills]:
            storm(Path(path), kills)
        case _:
            sys.exit(f"unknown: {sys.argv[1:]}")
