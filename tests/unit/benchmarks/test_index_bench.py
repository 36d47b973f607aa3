"""The index benchmark: a quick run ends, and its figures are there."""

from pathlib import Path

import pytest
from benchmarks.memory import index
from benchmarks.rows import read_rows

pytestmark = pytest.mark.slow


def test_command_writes_its_figures(tmp_path: Path) -> None:
    assert index.main(["--quick", "--output", str(tmp_path)]) == 0
    speeds = read_rows("index", tmp_path)
    assert {speed["policy"] for speed in speeds} == {"lru", "value"}
    assert all(speed[f"{name}_pages_per_s"] > 0 for speed in speeds for name in index.OPERATIONS)
    assert all(speed["bytes_per_entry"] > 0 for speed in speeds)
