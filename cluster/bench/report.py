"""The figures of a run of a workload, with the names of `vllm bench serve`, and tables of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tidemill.cluster.bench.client import RequestResult
from tidemill.cluster.simulate.report import mean

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "between chunks",
    "e2el": "time to the last token",
}
SOURCES = ("prefilled", "replayed", "fetched", "reused")
ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """A run. `setup` is what the figures begin with; `goodput_ms` has the longest time of each metric."""

    results: tuple[RequestResult, ...]
    wall_s: float
    setup: Mapping[str, object] = field(default_factory=dict[str, object])
    percentiles: tuple[float, ...] = (50, 90, 99)
    goodput_ms: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def answered(self) -> list[RequestResult]:
        return [result for result in self.results if not result.error]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated as vLLM's; 0.0 of nothing."""
    return float(np.percentile(values, percent)) if values else 0.0


def is_good(result: RequestResult, goodput_ms: Mapping[str, float]) -> bool:
    """Return whether a request met all targets. `itl` bounds its longest gap, `tpot` the mean."""
    times_s = {
        "ttft": result.ttft_s,
        "tpot": result.tpot_s,
        "itl": max(result.gaps_s, default=0.0),
        "e2el": result.e2e_s,
    }
    return not result.error and all(1000 * times_s[name] <= most for name, most in goodput_ms.items())


def figures_of(run: BenchRun) -> dict[str, Any]:
    """Return all figures of a run; times in milliseconds, throughput per second."""
    answered = run.answered
    inputs = sum(result.prompt_tokens for result in answered)
    outputs = sum(result.output_tokens for result in answered)
    good = sum(is_good(result, run.goodput_ms) for result in answered)
    wall_s = max(run.wall_s, 1e-9)
    times_s: dict[str, list[float]] = {
        "ttft": [result.ttft_s for result in answered],
        "tpot": [result.tpot_s for result in answered if result.output_tokens > 1],
        "itl": [gap_s for result in answered for gap_s in result.gaps_s],
        "e2el": [result.e2e_s for result in answered],
    }
    return {
        **run.setup,
        "duration": run.wall_s,
        "completed": len(answered),
        "failed": len(run.results) - len(answered),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(answered) / wall_s,
        **(
            {"request_goodput": good / wall_s, "good_share": good / len(run.results)}
            if run.goodput_ms
            else {}
        ),
        "output_throughput": outputs / wall_s,
        "total_token_throughput": (inputs + outputs) / wall_s,
        **_spreads(times_s, run.percentiles),
        **_cache_figures(answered, inputs),
        "errors": dict(Counter(result.error for result in run.results if result.error).most_common()),
    }


def _spreads(times_s: Mapping[str, Sequence[float]], percentiles: Sequence[float]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for metric, values_s in times_s.items():
        figures[f"mean_{metric}_ms"] = 1000 * mean(values_s)
        figures[f"median_{metric}_ms"] = 1000 * percentile(values_s, 50)
        figures[f"std_{metric}_ms"] = 1000 * float(np.std(values_s)) if values_s else 0.0
        for percent in percentiles:
            figures[f"p{percent:g}_{metric}_ms"] = 1000 * percentile(values_s, percent)
    return figures


def _cache_figures(answered: Sequence[RequestResult], inputs: int) -> dict[str, Any]:
    """Return what prompts found in caches, as far as the server reports it, and by place in the group."""
    cached = sum(result.details.get("cached_tokens") or 0 for result in answered)
    shared = sum(result.item.shared_tokens for result in answered)
    parts = positions(answered)
    cold_s = percentile([result.ttft_s for result in parts.get("first", [])], 50)
    sources = {
        source: mean([result.details[f"{source}_tokens"] for result in answered])
        for source in SOURCES
        if answered and all(f"{source}_tokens" in result.details for result in answered)
    }
    return {
        "cached_token_ratio": cached / max(1, inputs),
        **({"cached_to_shared": cached / shared} if shared else {}),
        **({"tokens_per_request": sources} if sources else {}),
        **({"by_position": {name: _part(part, cold_s) for name, part in parts.items()}} if shared else {}),
    }


def positions(results: Sequence[RequestResult]) -> dict[str, list[RequestResult]]:
    """Return results by their place in their group; empty places are left out."""
    parts = {
        "first": [result for result in results if result.item.position == 0],
        "second": [result for result in results if result.item.position == 1],
        "rest": [result for result in results if result.item.position > 1],
    }
    return {name: part for name, part in parts.items() if part}


def shared_computed(result: RequestResult) -> int:
    """Return the tokens of the shared part that were computed again."""
    own = result.prompt_tokens - result.item.shared_tokens
    uncached = result.prompt_tokens - (result.details.get("cached_tokens") or 0)
    return max(0, uncached - own) if result.item.shared_tokens else 0


def _part(results: Sequence[RequestResult], cold_s: float) -> dict[str, float]:
    times_s = [result.ttft_s for result in results]
    again = [shared_computed(result) for result in results]
    return {
        "requests": len(results),
        "mean_ttft_ms": 1000 * mean(times_s),
        "median_ttft_ms": 1000 * percentile(times_s, 50),
        "ttft_to_first": percentile(times_s, 50) / cold_s if cold_s else 0.0,
        "shared_tokens_computed_mean": mean(again),
        "shared_tokens_computed_max": max(again),
    }


def summary(figures: Mapping[str, Any], run: BenchRun) -> Group:
    """Return what the command prints: a line, the times, and the other figures."""
    failed = f"{figures['failed']:,} failed"
    title = Text(f"{figures['completed']:,} requests answered in {figures['duration']:.1f} s, {failed}")
    columns = {"mean": "mean", **{f"p{percent:g}": f"p{percent:g}" for percent in run.percentiles}}
    times = Table("ms", *columns, box=None)
    for column in times.columns[1:]:
        column.justify = "right"
    for metric, name in METRICS.items():
        times.add_row(name, *[f"{figures[f'{column}_{metric}_ms']:,.2f}" for column in columns])
    rows = Table("", "", box=None, show_header=False)
    rows.columns[1].justify = "right"
    rows.add_row("requests per second", f"{figures['request_throughput']:,.2f}")
    if run.goodput_ms:
        targets = ", ".join(f"{name} {most:g} ms" for name, most in run.goodput_ms.items())
        good = f"{figures['request_goodput']:,.2f}"
        rows.add_row(f"requests per second within {targets}", good)
    rows.add_row("output tokens per second", f"{figures['output_throughput']:,.1f}")
    rows.add_row("input tokens", f"{figures['total_input_tokens']:,}")
    rows.add_row("output tokens", f"{figures['total_output_tokens']:,}")
    rows.add_row("prompt tokens that the server had cached", f"{figures['cached_token_ratio']:.1%}")
    for name, part in figures.get("by_position", {}).items():
        rows.add_row(
            f"time to first token, {name} of a group, ms",
            f"{part['median_ttft_ms']:,.2f} ({part['ttft_to_first']:.2f} of the first)",
        )
    errors = Table("", "", box=None, show_header=False)
    for error, count in list(figures["errors"].items())[:ERRORS_SHOWN]:
        errors.add_row(f"{count:,} failed", Text(error, style="red"))
    return Group(title, times, rows, errors)
