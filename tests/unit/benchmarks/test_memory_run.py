"""The memory benchmark as a whole: equal runs are equal, and each part leaves its figures."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from benchmarks.memory import arena as memory
from benchmarks.memory import workloads as memory_workloads
from benchmarks.memory.figures import usage
from benchmarks.memory.run import Setup, serve
from benchmarks.memory.schemes import SCHEMES, Scheme, split
from benchmarks.rows import read_rows

pytestmark = pytest.mark.slow

SMALL = Setup(num_extents=12, rows_max=16, tokens_max=2048)


@pytest.mark.parametrize("scheme", [None, split(0.5), *SCHEMES], ids=lambda scheme: scheme and scheme.name)
def test_equal_runs_are_equal_and_serve_everything(scheme: Scheme | None) -> None:
    workload = memory_workloads.long_generations(Random(0), prompts=12)
    setup = replace(SMALL, scheme=scheme, page_tokens=(scheme and scheme.page_tokens) or SMALL.page_tokens)
    outcome = serve(workload, setup)
    assert outcome.counters["generated_tokens"] == sum(item.max_tokens for item in workload.items)
    assert serve(workload, setup) == outcome
    times = [sample.at_s for sample in outcome.samples]
    assert times == sorted(times)
    assert all(0 < usage(sample.memory) <= 1 for sample in outcome.samples)


def test_elastic_arena_uses_memory_that_a_split_leaves_idle() -> None:
    workload = memory_workloads.long_generations(Random(0), prompts=12)
    elastic, static = serve(workload, SMALL), serve(workload, replace(SMALL, scheme=split(0.75)))
    assert elastic.figures()["in_flight_max"] > static.figures()["in_flight_max"]
    assert elastic.makespan_s < static.makespan_s


def test_command_writes_figures_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1500, "output_length": 9, "hash_ids": [1, 0, 3]}
    trace.write_text("\n".join(json.dumps(line) for _ in range(3)))
    assert memory.main(["--quick", "--trace", str(trace), "--output", str(tmp_path)]) == 0
    results = read_rows("memory", tmp_path)
    printed = capsys.readouterr().out
    for part, columns in memory.COLUMNS.items():
        of_part = [result for result in results if result["part"] == part]
        assert of_part
        assert part in printed
        for run in of_part:
            assert set(columns) <= run["figures"].keys()
            assert run["setup"]["num_extents"] > 0
    assert {result["workload"] for result in results} == {
        "long-prompts",
        "long-generations",
        "alternating",
        "mixed",
        "multi-turn",
        "shared-prefix",
        "mooncake-trace",
    }
    assert {result["setup"]["strategy"] for result in results if result["part"] == "overload"} == {
        "none",
        "double",
        "lazy",
    }
    assert (tmp_path / "memory-splits.png").stat().st_size > 0
