"""The plot of the memory benchmark: throughput by split."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


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
