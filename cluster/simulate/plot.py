"""The plot of a simulated run."""

from pathlib import Path
from typing import Any

from tidemill.cluster.simulate.report import Outcome, mean
from tidemill.kvstore.errors import TidemillError

BINS = 60


class NoPictures(TidemillError):
    """matplotlib is not installed, or the file cannot be written."""


def new_figure() -> Any:  # noqa: ANN401  a matplotlib Figure
    """Return an empty figure. Raises NoPictures, before a long run."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  optional
    except ImportError as error:
        raise NoPictures("--plot needs matplotlib: pip install 'tidemill[plot]'") from error
    return Figure(figsize=(11, 3.4), layout="constrained")


def plot(outcome: Outcome, figure: Any, path: Path) -> None:  # noqa: ANN401  a matplotlib Figure
    """Plot times to first token, their mean over the run, and worker load. Raises NoPictures."""
    first, over, busy = figure.subplots(1, 3)
    first.ecdf([max(1e-3, request.ttft_s) for request in outcome.served])
    first.set(xlabel="time to first token, s", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    width_s = max(outcome.makespan_s / BINS, 1e-9)
    bins: dict[int, list[float]] = {}
    for request in outcome.served:
        bins.setdefault(int(request.at_s / width_s), []).append(request.ttft_s)
    over.plot([number * width_s for number in sorted(bins)], [mean(bins[number]) for number in sorted(bins)])
    over.set(xlabel="arrival, s", ylabel="mean time to first token, s", ylim=(0, None))
    for role, seconds in outcome.busy_s.items():
        shares = (busy_s / max(outcome.makespan_s, 1e-9) for busy_s in seconds)
        busy.plot(sorted(shares, reverse=True), label=role)
    busy.set(xlabel="worker, the busiest first", ylabel="share of time busy", ylim=(0, 1.02))
    busy.legend(frameon=False)
    save(figure, path)


def save(figure: Any, path: Path) -> None:  # noqa: ANN401  a matplotlib Figure
    """Write a picture. Raises NoPictures."""
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise NoPictures(f"--plot {path}: {error}") from error
