"""How far the start of a cluster is: a bar for each worker on a terminal, lines of the log elsewhere."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from tidemill.cluster.worker.worker_process import Failed, Loading, Ready, State

log = logging.getLogger(__name__)

TELL_S = 10.0

Show = Callable[[str, State | None], None]
"""What of whom; None is the end of it."""


@contextmanager
def shown(console: Console, clock: Callable[[], float]) -> Generator[Show]:
    """Bars are gone at the end of the block; lines come while weights load, at most one in `TELL_S`."""
    if not console.is_terminal:
        yield ProgressLog(log.info, clock).show
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
                    text = _of(done_bytes, total_bytes) if total_bytes else "starting"
                    progress.update(bars[name], total=total_bytes or None, completed=done_bytes, state=text)
                case Ready():
                    progress.update(bars[name], total=1, completed=1, state="ready")
                case Failed():
                    progress.update(bars[name], state="failed")

        yield show


class ProgressLog:
    """Says who still loads how much."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._due_s = clock() + TELL_S
        self._loading: dict[str, Loading] = {}

    def show(self, name: str, state: State | None) -> None:
        if not isinstance(state, Loading) or not state.total_bytes:
            self._loading.pop(name, None)
            return
        self._loading[name] = state
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + TELL_S
            each = (f"{one} {_of(at.done_bytes, at.total_bytes)}" for one, at in self._loading.items())
            self._say(f"loading weights: {', '.join(each)}")


def _of(done_bytes: int, total_bytes: int) -> str:
    return f"{done_bytes / 1e6:,.0f} of {total_bytes / 1e6:,.0f} MB"
