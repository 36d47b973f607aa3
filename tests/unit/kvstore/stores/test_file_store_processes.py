"""The file store with several real processes, and under kill -9."""

import subprocess
import sys
from pathlib import Path

from tests.support.kvstore.store_process import STORM_BYTES_MAX

ROOT = Path(__file__).parents[4]
HANG_S = 120


def run(*args: object) -> list[str]:
    command = [sys.executable, "-m", "tests.support.kvstore.store_process", *map(str, args)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_file_store_survives_a_crash_at_any_line(tmp_path: Path) -> None:
    [lines] = run("crash", tmp_path)
    assert int(lines) > 100, "the crashes were not in the code of the store"


def test_file_store_stays_whole_and_bounded_when_writers_are_killed(tmp_path: Path) -> None:
    *lines, last = run("storm", tmp_path, 40)
    seen = [int(line) for line in lines]
    assert len(seen) > 100
    assert 15 * STORM_BYTES_MAX < max(seen) <= 20 * STORM_BYTES_MAX
    known_bytes, stored_bytes = map(int, last.split())
    assert known_bytes == stored_bytes <= 20 * STORM_BYTES_MAX, "crashed writers are still counted"
    assert not list((tmp_path / "aside").iterdir())
