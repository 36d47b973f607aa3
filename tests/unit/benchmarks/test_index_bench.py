"""The index benchmark: a quick run ends, and its figures are there."""

from pathlib import Path
from random import Random

import pytest
from benchmarks.memory import index
from benchmarks.memory.index import Forest, full_forest
from benchmarks.rows import read_rows

pytestmark = pytest.mark.slow


def is_prefix_of_another(forest: Forest) -> bool:
    return any(path[0] == other[0] for path in forest.paths for other in forest.paths if path is not other)


def test_forest_is_full_seeded_and_shares_prefixes() -> None:
    forest = full_forest(2_000, "value", Random(0))
    cache = forest.cache
    assert 2_000 <= len(cache.index) < 3_000
    assert forest.paths == full_forest(2_000, "value", Random(0)).paths
    assert is_prefix_of_another(forest)
    assert cache.arena.num_empty == 0
    cache.check(())


def test_command_writes_its_figures(tmp_path: Path) -> None:
    assert index.main(["--quick", "--output", str(tmp_path)]) == 0
    speeds = read_rows("index", tmp_path)
    assert {speed["policy"] for speed in speeds} == {"lru", "value"}
    assert all(speed[f"{name}_pages_per_s"] > 0 for speed in speeds for name in index.OPERATIONS)
    assert all(speed["bytes_per_entry"] > 0 for speed in speeds)
