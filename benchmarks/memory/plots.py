# pyright: basic
# matplotlib has incomplete types
"""The plots of the memory benchmark: bytes by class over time, and throughput by split."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.memory.figures import Sample

STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
CLASSES = {
    "pages_live": "#1f5fa8",
    "pages_cached": "#a9c9ea",
    "states_live": "#c0561a",
    "states_cached": "#f3c39f",
    "free": "#dddddd",
    "empty": "#eeeeee",
    "unmapped": "#ffffff",
}


def plot_series(series: Mapping[str, Sequence[Sample]], path: Path) -> None:
    """Plot a panel per run: the bytes of the budget by class, and the requests in flight."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.9 * len(series)), layout="constrained")
        panels = figure.subplots(len(series), 1, sharex=True, squeeze=False)[:, 0]
        for panel, (name, samples) in zip(panels, series.items(), strict=True):
            times = [sample.at_s for sample in samples]
            layers = [[getattr(sample.memory, part) / 2**30 for sample in samples] for part in CLASSES]
            labels = [part.replace("_", " ") for part in CLASSES]
            panel.stackplot(times, *layers, labels=labels, colors=list(CLASSES.values()), step="post")
            panel.set(title=name, ylabel="GiB", ylim=(0, None), xlim=(0, None))
            rows = panel.twinx()
            rows.plot(times, [sample.running for sample in samples], color="black", linewidth=0.8)
            rows.set(ylabel="requests in flight", ylim=(0, None))
            rows.spines["right"].set_visible(True)
        panels[-1].set_xlabel("virtual time, s")
        panels[0].legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.12), ncols=len(CLASSES))
        figure.savefig(path, dpi=130)


def plot_splits(throughput: Mapping[str, Mapping[float | None, float]], path: Path) -> None:
    """Plot tokens per second by the share of memory for pages; None is the elastic arena."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 2.9), layout="constrained")
        panels = figure.subplots(1, len(throughput), squeeze=False)[0]
        for panel, (workload, by_share) in zip(panels, throughput.items(), strict=True):
            static = {100 * share: value for share, value in by_share.items() if share is not None}
            panel.plot(list(static), list(static.values()), marker="o", label="static split")
            if None in by_share:
                panel.axhline(by_share[None], color="#c0561a", label="elastic")
            panel.set(title=workload, xlabel="pages, % of memory", ylim=(0, None), xlim=(0, 100))
        panels[0].set_ylabel("output tokens per virtual second")
        panels[0].legend(frameon=False)
        figure.savefig(path, dpi=130)
