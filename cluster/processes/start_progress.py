"""Show the progress of a cluster start: a bar for each worker on a terminal, log lines elsewhere."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from tidemill.cluster.worker.worker_process import Failed, Loading, Ready, State

log = logging.getLogger(__name__)

LOG_PERIOD_S = 10.0

Show = Callable[[str, State | None], None]
"""Shows the state of the component of this name; None removes it."""


@contextmanager
def show_progress(console: Console, clock: Callable[[], float]) -> Generator[Show]:
    """Yield a function that shows states. Bars disappear at the end of the block. Log lines are written while
    weights load, at most one per `LOG_PERIOD_S`."""
    if not console.is_terminal:
        yield _logged(log.info, clock)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
    )
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, transient=True) as progress:

        def show(name: str, state: State | None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name, total=None, state="starting")
            match state:
                case None:
                    progress.remove_task(bars.pop(name))
                case Loading(done_bytes, total_bytes):
                    text = _fraction(done_bytes, total_bytes) if total_bytes else "starting"
                    progress.update(bars[name], total=total_bytes or None, completed=done_bytes, state=text)
                case Ready():
                    progress.update(bars[name], total=1, completed=1, state="ready")
                case Failed():
                    progress.update(bars[name], state="failed")

        yield show


def _logged(write: Callable[[str], None], clock: Callable[[], float]) -> Show:
    """Return a function that writes log lines with the bytes that each worker has loaded."""
    due_s = clock() + LOG_PERIOD_S
    loading: dict[str, Loading] = {}

    def show(name: str, state: State | None) -> None:
        nonlocal due_s
        if not isinstance(state, Loading) or not state.total_bytes:
            loading.pop(name, None)
            return
        loading[name] = state
        if (now_s := clock()) >= due_s:
            due_s = now_s + LOG_PERIOD_S
            parts = (f"{worker} {_fraction(at.done_bytes, at.total_bytes)}" for worker, at in loading.items())
            write(f"loading weights: {', '.join(parts)}")

    return show


def _fraction(done_bytes: int, total_bytes: int) -> str:
    return f"{done_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB"
