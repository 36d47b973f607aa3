"""The elastic arena compared with static splits and other schemes, `value` compared with `lru`, and overload.

python -m benchmarks.memory.arena [--quick] [--parts schemes ...] [--trace FILE] [--output FOLDER]

The engine is real, the model is a formula and time is virtual (served_model.py), so runs are
reproducible.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Literal, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.memory import workloads
from benchmarks.memory.figures import Outcome
from benchmarks.memory.plots import plot_splits
from benchmarks.memory.run import PAGE_TOKENS, Setup, serve
from benchmarks.memory.schemes import SCHEMES, split
from benchmarks.rows import RESULTS, VIRTUAL, read_rows, write_rows
from tidemill.cluster.bench.workloads import Workload
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.options import CheckpointStrategy

PAGE_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9)
SPLIT_EXTENTS = 96
HIT_CLIENTS = 8
HIT_EXTENTS = (32, 64, 128)
TRACE_EXTENTS = (64, 256, 1024)
TRACE_ONE_IN = 16
TRACE_PAGE_TOKENS = 512  # a block of the trace
OVERLOAD_EXTENTS = 24
QUICK = 0.02
"""The seed of the requests of a workload."""

Part = Literal["splits", "schemes", "hits", "slots", "overload"]

COLUMNS: dict[Part, tuple[str, ...]] = {
    "splits": (
        "output_tokens_per_s",
        "in_flight_mean",
        "in_flight_max",
        "preemptions",
        "token_hit_rate",
        "usage_mean",
    ),
    "schemes": ("output_tokens_per_s", "token_hit_rate", "in_flight_mean", "preemptions", "dead_ends"),
    "hits": ("token_hit_rate", "flops_saved_rate", "hit_without_state_tokens", "output_tokens_per_s"),
    "slots": ("slots_per_row", "in_flight_mean", "output_tokens_per_s", "usage_mean"),
    "overload": (
        "slots_per_row",
        "in_flight_mean",
        "output_tokens_per_s",
        "usage_mean",
        "time_full",
        "makespan_s",
        "preemptions",
        "preemptions_of_one_request_max",
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One run; the file has its `asdict`."""

    part: Part
    workload: str
    requests: int
    setup: Setup
    figures: dict[str, float]


class Benchmark:
    """Runs workloads and collects results; `quick` makes few and small runs."""

    def __init__(self, console: Console, *, quick: bool) -> None:
        self._quick = quick
        self._shares = PAGE_SHARES[::6] if quick else PAGE_SHARES
        self.results: list[Result] = []
        self._console = console

    def run(self, part: Part, workload: Workload, setup: Setup) -> Outcome:
        outcome = serve(workload, setup)
        self.results.append(Result(part, workload.name, len(workload.items), setup, outcome.figures()))
        self._console.print(f"{part}: {workload.name}, {setup.name}, {setup.policy}, {setup.strategy}")
        return outcome

    def splits(self, folder: Path) -> None:
        """Run and plot three workloads, each with the elastic arena and with each split."""
        throughput: dict[str, dict[float | None, float]] = {}
        for workload in self._scarce():
            setups: dict[float | None, Setup] = {None: Setup(num_extents=SPLIT_EXTENTS)}
            setups |= {share: Setup(num_extents=SPLIT_EXTENTS, scheme=split(share)) for share in self._shares}
            outcomes = {share: self.run("splits", workload, setup) for share, setup in setups.items()}
            throughput[workload.name] = {
                share: outcome.figures()["output_tokens_per_s"] for share, outcome in outcomes.items()
            }
        plot_splits(throughput, folder / "memory-splits.png")

    def schemes(self) -> None:
        """Compare the schemes of other engines, each with its owner's order of eviction and with ours."""
        crowded = [(workload, 1024, SPLIT_EXTENTS) for workload in self._scarce()]
        reused = [(workload, HIT_CLIENTS, size) for workload in self._reused() for size in HIT_EXTENTS[:2]]
        for workload, clients, size in crowded + reused:
            self.run("schemes", workload, Setup(num_extents=size, clients=clients))
            for scheme in SCHEMES:
                for policy in get_args(Policy):
                    setup = Setup(
                        num_extents=size,
                        scheme=scheme,
                        policy=policy,
                        clients=clients,
                        page_tokens=scheme.page_tokens or PAGE_TOKENS,
                    )
                    self.run("schemes", workload, setup)

    def hits(self, trace: Path | None) -> None:
        """Compare `value` with `lru` at three sizes of the cache."""
        cases: list[tuple[Workload, tuple[int, ...], int]]
        cases = [(workload, HIT_EXTENTS, PAGE_TOKENS) for workload in self._reused()]
        if trace is not None:
            lines = trace.read_text().splitlines()
            replayed = workloads.replay(lines[: self._count(len(lines))], one_in=TRACE_ONE_IN)
            cases.append((replayed, TRACE_EXTENTS, TRACE_PAGE_TOKENS))
        for workload, sizes, page_tokens in cases:
            for size in sizes[:1] if self._quick else sizes:
                for policy in get_args(Policy):
                    setup = Setup(
                        num_extents=size, policy=policy, clients=HIT_CLIENTS, page_tokens=page_tokens
                    )
                    self.run("hits", workload, setup)

    def slots(self) -> None:
        """Measure the slots of each checkpoint strategy with ample memory."""
        workload = workloads.long_generations(Random(0), prompts=self._count(24))
        for strategy in get_args(CheckpointStrategy):
            self.run("slots", workload, Setup(num_extents=SPLIT_EXTENTS, strategy=strategy, clients=8))

    def overload(self) -> None:
        """Run far more concurrent work than fits, with each checkpoint strategy."""
        workload = workloads.mixed(Random(0), prompts=self._count(300))
        for strategy in get_args(CheckpointStrategy):
            self.run("overload", workload, Setup(num_extents=OVERLOAD_EXTENTS, strategy=strategy))

    def _scarce(self) -> tuple[Workload, ...]:
        """Return workloads that have more work at a time than memory."""
        return (
            workloads.long_prompts(Random(0), documents=self._count(30)),
            workloads.long_generations(Random(0), prompts=self._count(300)),
            workloads.alternating(Random(0), documents=self._count(10), prompts=self._count(100)),
        )

    def _reused(self) -> tuple[Workload, ...]:
        """Return workloads whose prompts have prefixes in common."""
        return (
            workloads.multi_turn(Random(0), conversations=self._count(60)),
            workloads.shared_prefix(Random(0), prompts=self._count(300)),
        )

    def _count(self, full: int) -> int:
        return max(2, round(full * QUICK)) if self._quick else full


def table_of(part: Part, results: Sequence[Result]) -> Table:
    table = Table(title=part, box=None, title_justify="left")
    for name in ("workload", "extents", "arena", "policy", "strategy", *COLUMNS[part]):
        table.add_column(name.replace("_", " "), justify="right")
    for result in results:
        setup = result.setup
        table.add_row(
            result.workload,
            str(setup.num_extents),
            setup.name,
            setup.policy,
            setup.strategy,
            *(_text(result.figures, name) for name in COLUMNS[part]),
        )
    return table


def _text(figures: Mapping[str, float], name: str) -> str:
    value = figures[name]
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.arena")
    parser.add_argument("--quick", action="store_true", help="few and small runs: for tests")
    parser.add_argument(
        "--trace", type=Path, help="a Mooncake request trace (JSON lines) as a third workload"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of memory.jsonl and the plot")
    parser.add_argument("--parts", nargs="+", choices=get_args(Part), default=get_args(Part))
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    benchmark = Benchmark(Console(stderr=True), quick=options.quick)
    run: dict[Part, Callable[[], None]] = {
        "splits": lambda: benchmark.splits(options.output),
        "schemes": benchmark.schemes,
        "hits": lambda: benchmark.hits(options.trace),
        "slots": benchmark.slots,
        "overload": benchmark.overload,
    }
    for part in options.parts:
        run[part]()
    results = benchmark.results
    for part in options.parts:
        Console(width=170).print(table_of(part, [result for result in results if result.part == part]))
    kept = [row for row in read_rows("memory", options.output) if row["part"] not in options.parts]
    rows = [*kept, *map(asdict, results)]
    write_rows("memory", "python -m benchmarks.memory.arena", rows, options.output, VIRTUAL)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
