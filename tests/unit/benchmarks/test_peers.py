"""Runs that `python -m benchmarks.peers` keeps, and its table."""

from itertools import pairwise
from typing import Any

from benchmarks.peers.__main__ import merged, table
from benchmarks.peers.cases import CASES
from benchmarks.peers.models import NAMES
from benchmarks.peers.works import METRICS, works_of


def row(server: str, work: str, run: int, wall_s: float) -> dict[str, Any]:
    return {
        "cpu": "a CPU", "cores": 1, "arrangement": "--mixed 1", "servers": "vllm, llama.cpp, tidemill",
        "server": server, "model": "dense",
        "work": work, "run": run, "wall_s": wall_s, "ttft_s": wall_s / 10, "cpu_s": wall_s,
        "cached_tokens": 0,
    }  # fmt: skip


def test_runs_replace_those_of_the_same_work_alone() -> None:
    kept = [row("vllm", "c=1", run, 5.0) for run in range(3)] + [row("llama.cpp", "c=1", 0, 6.0)]
    kept += [row("vllm", "c=8", 0, 7.0), row("vllm", "c=1", 0, 8.0) | {"cores": 2}]
    kept += [row("vllm", "c=1", 0, 9.0) | {"servers": "vllm, tidemill"}]
    new = [row(server, "c=1", 0, 4.0) for server in ("vllm", "llama.cpp", "tidemill")]
    assert merged(kept, new) == [*kept[4:], *new]


def test_the_table_has_medians_and_spread_beside_each_peer() -> None:
    rows = [row("tidemill", "c=1", run, wall_s) for run, wall_s in enumerate((3.0, 1.0, 2.0))]
    rows += [row("vllm", "c=1", 0, 4.0), row("llama.cpp", "c=1", 0, 1.0)]
    _, _, *lines = table(rows)
    assert [line.split(" | ")[2:6] for line in lines] == [
        ["2.00 (1.00 to 3.00)", "vllm", "4.00 (4.00 to 4.00)", "0.50"],
        ["2.00 (1.00 to 3.00)", "llama.cpp", "1.00 (1.00 to 1.00)", "2.00"],
    ]


def test_first_tokens_are_compared_by_their_own_time() -> None:
    rows = [
        row(server, "first token of 2,048", 0, wall_s) for server, wall_s in (("tidemill", 5), ("vllm", 10))
    ]
    *_, line = table(rows)
    assert "| 0.50 (0.50 to 0.50) | vllm | 1.00 (1.00 to 1.00) | 0.50 |" in line


def test_turns_of_an_agent_grow_and_the_first_one_does_not_count() -> None:
    work = works_of(0)[-1]
    assert (work.name, work.metric, work.from_turn) == ("agent session", "ttft_s", 1)
    assert [len(item.tokens) for item in work.items] == [24_000, 24_180, 25_780, 26_020, 26_920, 27_340]
    assert all(b.tokens[: len(a.tokens)] == a.tokens for a, b in pairwise(work.items))


def test_cases_name_works_and_models_that_exist() -> None:
    for case in CASES:
        assert case.model in NAMES
        assert METRICS.keys() >= case.goals.keys()
