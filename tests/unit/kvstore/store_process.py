"""What the tests of the file store run in processes of their own, as `python -m`."""

import asyncio
import json
import os
import signal
import sys
from itertools import count
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tidemill.kvstore import folder_bound, object_folder
from tidemill.kvstore.file_store import FileStore
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.object_folder import ObjectFolder
from tidemill.kvstore.seal import SEAL_BYTES
from tidemill.kvstore.store import Got

TRACED = {object_folder.__file__, folder_bound.__file__}
CRASH_BODY_BYTES = 5000
CRASH_LINES_MAX = 2000
KILL_BODY_BYTES = 1 << 20


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


async def fill(folder: Path, writer: int, num_puts: int, num_bytes: int, capacity_bytes: int) -> None:
    """Put two new objects at a time, far beyond the capacity."""
    store = FileStore(folder, capacity_bytes)
    for index in range(num_puts):
        numbers = [writer * 1_000_000 + 2 * index, writer * 1_000_000 + 2 * index + 1]
        await store.put([(page(number), memoryview(body(number, writer, num_bytes))) for number in numbers])
        print(index, flush=True)  # noqa: T201 - the test looks at the folder after each
    await store.close()


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


def kill_in_a_loop(folder: Path, rounds: int) -> None:
    """Kill a writer at some moment after some of its puts, again and again."""
    rng = Random(7)
    for _ in range(rounds):
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            asyncio.run(write_on(folder, tell))
        for _ in range(rng.randrange(1, 6)):
            os.read(told, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(told)
        os.close(tell)
        print(check(folder, range(200), KILL_BODY_BYTES), flush=True)  # noqa: T201 - the answer


async def write_on(folder: Path, tell: int) -> None:
    store = FileStore(folder, 1 << 30)
    for number in range(200):
        await store.put([(page(number), memoryview(body(number, 1, KILL_BODY_BYTES)))])
        os.write(tell, b".")


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
        case "fill", [writer, num_puts, num_bytes, capacity_bytes]:
            asyncio.run(fill(Path(path), writer, num_puts, num_bytes, capacity_bytes))
        case "crash", []:
            crash_at_each_line(Path(path))
        case "kill", [rounds]:
            kill_in_a_loop(Path(path), rounds)
        case _:
            sys.exit(f"unknown: {sys.argv[1:]}")
