"""Shows something of a server again and again until somebody leaves, also while the server is away."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tidemill.workers.messages import Unserved

_Found = TypeVar("_Found")

AWAY = "What is below is old."


def poll(look: Callable[[], _Found], pause: Callable[[], None]) -> Iterator[_Found | Unserved]:
    """What is found, or why nothing is, with a pause after each look. RequestError ends it: a wrong key stays
    wrong."""
    while True:
        found: _Found | Unserved
        try:
            found = look()
        except Unserved as error:
            found = error
        yield found
        pause()


def show_live(
    found: Iterable[_Found | Unserved], draw: Callable[[_Found], RenderableType], console: Console
) -> None:
    """Until Ctrl-C or SIGTERM. A terminal has its own screen meanwhile, anything else gets one after the
    other."""
    with (
        suppress(KeyboardInterrupt),
        Live(console=console, screen=console.is_terminal, auto_refresh=False) as screen,
    ):
        for shown in _drawn(found, draw):
            if console.is_terminal:
                screen.update(shown, refresh=True)
            else:
                console.print(shown)


def _drawn(
    found: Iterable[_Found | Unserved], draw: Callable[[_Found], RenderableType]
) -> Iterator[RenderableType]:
    """Of a server that is away: that, above what was seen last."""
    last: RenderableType | None = None
    for one in found:
        if not isinstance(one, Unserved):
            last = draw(one)
            yield last
            continue
        trouble = Text(f"{one}. Trying again.", style="red")
        yield trouble if last is None else Group(trouble, Text(AWAY, style="red"), "", last)
