"""The figures of a run of a workload, and a table of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from rich.table import Table

from benchmarks.serving.workloads import Item

PERCENTILES = (50, 90, 99)
SOURCES = ("prefilled", "replayed", "fetched", "reused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One answered request. `gaps_s` are the times between the chunks of its stream."""

    item: Item
    ttft_s: float
    gaps_s: tuple[float, ...]
    e2e_s: float
    prompt_tokens: int
    output_tokens: int
    details: dict[str, int]  # prompt_tokens_details of the usage

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that some worker computed for this request."""
        return self.details["prefilled_tokens"] + self.details["replayed_tokens"]

    def shared_pages_computed(self, page_tokens: int) -> float:
        """Pages of the shared part that were computed again. What both workers computed counts twice."""
        own_tokens = len(self.item.tokens) - self.item.shared_tokens
        return max(0, self.computed_tokens - own_tokens) / page_tokens if self.item.shared_tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    workload: str
    concurrency: int
    seed: int
    page_tokens: int
    wall_s: float
    server_cpu_s: float
    samples: tuple[Sample, ...]
    server_pss_mib: float = 0.0
    hints: bool = False

    @property
    def findable_tokens(self) -> int:
        """Tokens in full pages that the prompt before in the group had too."""
        size = self.page_tokens
        return sum(sample.item.shared_tokens // size * size for sample in self.samples)


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def summary(run: Run) -> dict[str, Any]:
    """All figures of a run; times in milliseconds."""
    samples = run.samples
    gaps_s = [gap for sample in samples for gap in sample.gaps_s]
    prompt_tokens = sum(sample.prompt_tokens for sample in samples)
    cached_tokens = sum(sample.details["cached_tokens"] for sample in samples)
    output_tokens = sum(sample.output_tokens for sample in samples)
    return {
        "workload": run.workload,
        "concurrency": run.concurrency,
        "seed": run.seed,
        "hints": run.hints,
        "requests": len(samples),
        "wall_s": run.wall_s,
        "requests_per_s": len(samples) / run.wall_s,
        "output_tokens_per_s": output_tokens / run.wall_s,
        "ttft_ms": _percentiles([sample.ttft_s for sample in samples]),
        "itl_ms": _percentiles(gaps_s),
        "e2e_ms": _percentiles([sample.e2e_s for sample in samples]),
        "ttft_ms_mean": 1000 * mean([sample.ttft_s for sample in samples]),
        "cached_token_ratio": cached_tokens / prompt_tokens,
        "cached_to_findable": cached_tokens / run.findable_tokens if run.findable_tokens else 0.0,
        "tokens_per_request": {
            source: mean([sample.details[f"{source}_tokens"] for sample in samples]) for source in SOURCES
        },
        "server_cpu_ms_per_output_token": 1000 * run.server_cpu_s / output_tokens,
        "server_pss_mib": run.server_pss_mib,
        "by_position": {name: _part(part, run.page_tokens) for name, part in positions(samples).items()},
        "warm_to_cold_ttft": _warm_to_cold(samples),
    }


def positions(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples by their place in their group; empty places are left out."""
    parts = {
        "first": [sample for sample in samples if sample.item.position == 0],
        "second": [sample for sample in samples if sample.item.position == 1],
        "rest": [sample for sample in samples if sample.item.position > 1],
    }
    return {name: part for name, part in parts.items() if part}


def _part(samples: Sequence[Sample], page_tokens: int) -> dict[str, float]:
    shared = [sample.shared_pages_computed(page_tokens) for sample in samples]
    return {
        "requests": len(samples),
        "ttft_ms_mean": 1000 * mean([sample.ttft_s for sample in samples]),
        "ttft_ms_p50": 1000 * percentile([sample.ttft_s for sample in samples], 50),
        "computed_tokens_mean": mean([sample.computed_tokens for sample in samples]),
        "shared_pages_computed_mean": mean(shared),
        "shared_pages_computed_max": max(shared),
    }


def _warm_to_cold(samples: Sequence[Sample]) -> dict[str, float]:
    """Median time to first token of later requests of a group, relative to that of first ones."""
    parts = positions(samples)
    cold_s = percentile([sample.ttft_s for sample in parts.get("first", [])], 50)
    return {
        name: percentile([sample.ttft_s for sample in part], 50) / cold_s
        for name, part in parts.items()
        if name != "first" and cold_s
    }


def _percentiles(values_s: Sequence[float]) -> dict[str, float]:
    return {f"p{percent}": 1000 * percentile(values_s, percent) for percent in PERCENTILES}


def table_of(figures: dict[str, Any]) -> Table:
    """One row per figure."""
    table = Table(title=f"{figures['workload']}, concurrency {figures['concurrency']}", box=None)
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        for path, inner in _flat(name, value):
            table.add_row(path, _shown(inner))
    return table


def _shown(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _flat(name: str, value: object) -> list[tuple[str, object]]:
    """The leaves of nested figures, with the names that lead to them."""
    if not isinstance(value, dict):
        return [(name, value)]
    inner = cast("dict[str, object]", value)
    return [leaf for key, part in inner.items() for leaf in _flat(f"{name} {key}", part)]
