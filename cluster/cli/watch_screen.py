"""Poll a server and show each view until Ctrl-C, also while the server is away."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tidemill.workers.messages import Unserved

_View = TypeVar("_View")

OUTDATED = "The view below is outdated."


def poll(fetch: Callable[[], _View], pause: Callable[[], None]) -> Iterator[_View | Unserved]:
    """Yield views, or the error while the server is away, with a pause after each. RequestError ends the
    iteration, for a wrong key stays wrong."""
    while True:
        view: _View | Unserved
        try:
            view = fetch()
        except Unserved as error:
            view = error
        yield view
        pause()


def show_live(
    views: Iterable[_View | Unserved], draw: Callable[[_View], RenderableType], console: Console
) -> None:
    """Show each view until Ctrl-C or SIGTERM: on a terminal in its own screen, elsewhere one after
    another."""
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as screen,
    ):
        for rendered in _render(views, draw):
            if console.is_terminal:
                screen.update(rendered, refresh=True)
            else:
                console.print(rendered)


def _render(
    views: Iterable[_View | Unserved], draw: Callable[[_View], RenderableType]
) -> Iterator[RenderableType]:
    """Draw each view; while the server is away, draw the error above the last view."""
    last: RenderableType | None = None
    for view in views:
        if not isinstance(view, Unserved):
            last = draw(view)
            yield last
            continue
        problem = Text(f"{view}. Trying again.", style="red")
        yield problem if last is None else Group(problem, Text(OUTDATED, style="red"), "", last)
