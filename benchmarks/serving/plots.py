# pyright: basic
# matplotlib has no complete types
"""The plots of a run of a workload."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.serving.report import Run, mean, percentile, positions


def plot(run: Run, path: Path) -> None:
    """Times to first token by place in the group, gaps between tokens, and who computed the prompts."""
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        first, gaps, sources = figure.subplots(1, 3)
        for name, part in positions(run.samples).items():
            first.ecdf([1000 * sample.ttft_s for sample in part], label=name)
        first.set(
            xlabel="time to first token, ms",
            ylabel="share of requests, by place",
            xlim=(0, None),
            ylim=(0, 1.02),
        )
        first.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3)
        gaps_ms = sorted(1000 * gap for sample in run.samples for gap in sample.gaps_s)
        gaps.hist([gap for gap in gaps_ms if gap <= percentile(gaps_ms, 99)], bins=40)
        gaps.set(xlabel="between tokens, ms (up to p99)", ylabel="tokens")
        bottoms = dict.fromkeys(positions(run.samples), 0.0)
        for source in ("prefilled", "replayed", "cached"):
            means = {
                name: mean([sample.details[f"{source}_tokens"] for sample in part])
                for name, part in positions(run.samples).items()
            }
            sources.bar(list(means), list(means.values()), bottom=list(bottoms.values()), label=source)
            bottoms = {name: bottoms[name] + means[name] for name in means}
        sources.set(ylabel="tokens per request", xlabel="place in the group")
        sources.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.12), ncols=3)
        figure.suptitle(f"{run.workload}, concurrency {run.concurrency}, seed {run.seed}")
        figure.savefig(path, dpi=150)
