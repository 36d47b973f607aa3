"""The file store among several real processes, and under kill -9."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.unit.kvstore.store_process import body, page
from tidemill.kvstore.object_folder import ObjectFolder
from tidemill.kvstore.seal import SEAL_BYTES
from tidemill.kvstore.store import Got

ROOT = Path(__file__).parents[3]
HANG_S = 120


def start(*args: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.unit.kvstore.store_process", *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finished(process: "subprocess.Popen[str]", told: str = "") -> list[str]:
    try:
        out, err = process.communicate(told, timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.splitlines()


def test_of_several_processes_one_wins_each_key(tmp_path: Path) -> None:
    num_keys, num_bytes, writers = 60, 20_000, (1, 2, 3)
    processes = [start("contend", tmp_path, writer, num_keys, num_bytes) for writer in writers]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [json.loads(finished(process)[-1]) for process in processes]
    folder = ObjectFolder(tmp_path, 1 << 30)
    for number in range(num_keys):
        told = [outcome[str(number)] for outcome in outcomes]
        assert Counter(told) == {"stored": 1, "existed": len(writers) - 1}
        view = bytearray(num_bytes)
        assert folder.get([(page(number), memoryview(view))]) == [Got.HIT]
        assert view == body(number, writers[told.index("stored")], num_bytes)
    assert folder.usage == (num_keys, num_keys * (num_bytes + SEAL_BYTES))
    assert not list((tmp_path / "aside").iterdir())


def test_the_bound_holds_within_a_batch_of_each_other_writer(tmp_path: Path) -> None:
    num_puts, num_bytes, writers = 60, 20_000, (1, 2, 3)
    batch_bytes = 2 * (num_bytes + SEAL_BYTES)
    capacity_bytes = 10 * batch_bytes
    processes = [start("fill", tmp_path, writer, num_puts, num_bytes, capacity_bytes) for writer in writers]
    seen: list[int] = []
    for _ in range(num_puts):
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline()
        seen.append(held_bytes(tmp_path))
    for process in processes:
        finished(process)
    seen.append(held_bytes(tmp_path))
    assert max(seen) <= capacity_bytes + (len(writers) - 1) * batch_bytes
    assert seen[-1] >= capacity_bytes // 2, "what was evicted was not needed"


def held_bytes(path: Path) -> int:
    total = 0
    for file in path.glob("objects/*/*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_a_crash_at_any_line_leaves_whole_objects_and_a_folder_that_works(tmp_path: Path) -> None:
    [lines] = finished(start("crash", tmp_path))
    assert int(lines) > 100, "the crashes were not where the store's code is"


def test_kill_9_of_a_writer_in_a_loop_leaves_whole_objects(tmp_path: Path) -> None:
    seen = [int(line) for line in finished(start("kill", tmp_path, 12))]
    assert len(seen) == 12
    assert seen == sorted(seen)
    assert seen[-1] > 0
