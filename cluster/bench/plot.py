"""The plot of a run of a workload."""

from pathlib import Path
from typing import Any

from tidemill.cluster.bench.report import BenchRun, percentile, positions
from tidemill.cluster.simulate.plot import save


def plot(run: BenchRun, figure: Any, path: Path) -> None:  # noqa: ANN401  a matplotlib Figure
    """Plot times to first token by place in the group and over the run, and gaps. Raises NoPictures."""
    first, over, gaps = figure.subplots(1, 3)
    for name, part in positions(run.answered).items():
        first.ecdf([1000 * result.ttft_s for result in part], label=name)
    first.set(xlabel="time to first token, ms", ylabel="share of requests", xlim=(0, None), ylim=(0, 1.02))
    first.legend(frameon=False, title="place in its group")
    starts_s = [result.start_s for result in run.answered]
    over.plot(starts_s, [1000 * result.ttft_s for result in run.answered], ".", markersize=3)
    over.set(xlabel="sent after the start, s", ylabel="time to first token, ms", ylim=(0, None))
    gaps_ms = [1000 * gap_s for result in run.answered for gap_s in result.gaps_s]
    most_ms = percentile(gaps_ms, 99)
    gaps.hist([gap_ms for gap_ms in gaps_ms if gap_ms <= most_ms], bins=40)
    gaps.set(xlabel="between chunks, ms (up to p99)", ylabel="chunks")
    figure.suptitle(", ".join(f"{name} {value}" for name, value in run.setup.items() if value is not None))
    save(figure, path)
