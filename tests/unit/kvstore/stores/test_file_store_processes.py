"""The file store with several real processes, and under kill -9."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.support.kvstore.objects import page
from tests.support.kvstore.store_process import STORM_BYTES_MAX, body
from tidemill.kvstore.stores.folder_bound import BLOCK_BYTES
from tidemill.kvstore.stores.object_folder import ObjectFolder
from tidemill.kvstore.stores.page_store import Got
from tidemill.kvstore.stores.seal import SEAL_BYTES

ROOT = Path(__file__).parents[4]
HANG_S = 120


def start(*args: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tests.support.kvstore.store_process", *map(str, args)]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]", stdin: str = "") -> list[str]:
    try:
        out, err = process.communicate(stdin, timeout=HANG_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out.splitlines()


def test_file_store_one_of_several_processes_wins_each_key(tmp_path: Path) -> None:
    num_keys, num_bytes, writers = 60, 5 * BLOCK_BYTES - SEAL_BYTES, (1, 2, 3)
    processes = [start("contend", tmp_path, writer, num_keys, num_bytes) for writer in writers]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [json.loads(finish(process)[-1]) for process in processes]
    folder = ObjectFolder(tmp_path, 1 << 30)
    for number in range(num_keys):
        stdin = [outcome[str(number)] for outcome in outcomes]
        assert Counter(stdin) == {"stored": 1, "existed": len(writers) - 1}
        view = bytearray(num_bytes)
        assert folder.get([(page(number), memoryview(view))]) == [Got.HIT]
        assert view == body(number, writers[stdin.index("stored")], num_bytes)
    assert folder.usage == (num_keys, num_keys * (num_bytes + SEAL_BYTES))
    assert not list((tmp_path / "aside").iterdir())


def test_file_store_survives_a_crash_at_any_line(tmp_path: Path) -> None:
    [lines] = finish(start("crash", tmp_path))
    assert int(lines) > 100, "the crashes were not in the code of the store"


def test_file_store_stays_whole_and_bounded_when_writers_are_killed(tmp_path: Path) -> None:
    *lines, last = finish(start("storm", tmp_path, 40))
    seen = [int(line) for line in lines]
    assert len(seen) > 100
    assert 15 * STORM_BYTES_MAX < max(seen) <= 20 * STORM_BYTES_MAX
    known_bytes, stored_bytes = map(int, last.split())
    assert known_bytes == stored_bytes <= 20 * STORM_BYTES_MAX, "crashed writers are still counted"
    assert not list((tmp_path / "aside").iterdir())
