"""The index benchmark: a quick run ends, and its figures are there."""

import json
from pathlib import Path
from random import Random

import pytest
from benchmarks.memory import index
from benchmarks.memory.index import Forest, full_forest

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
    cache.check([], [])


def test_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index.main(["--quick", "--kernels", "reference", "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "index.json").read_text())
    assert {result["policy"] for result in results["speeds"]} == {"lru", "value"}
    assert all(result[f"{name}_pages_per_s"] > 0 for result in results["speeds"] for name in index.OPERATIONS)
    assert results["growth"].keys() == results["bytes_per_entry"].keys() == {"lru", "value"}
    for result in results["overhead"]:
        assert result["model_ms"] > result["engine_ms"] >= 0
        assert result["evicted_pages"] >= 0
        assert result["keys_ms"] + sum(result["parts_ms"].values()) > 0
    assert "finds nothing" in capsys.readouterr().out
