"""An asyncio loop with a virtual clock: it jumps to the next timer instead of waiting."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class _Skip(selectors.BaseSelector):
    """A selector that advances the clock `now_s` by the timeout instead of waiting. It polls sockets only
    when nothing else is left to do, so that a program without sockets pays nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._inner = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None:
            self.now_s += max(0.0, timeout)
            return []
        events = self._inner.select(0)
        assert events, "deadlock: nothing is ready and nothing is scheduled"
        return events

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:  # noqa: ANN401  as in selectors
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:  # noqa: ANN401  as in selectors
        return self._inner.unregister(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._inner.get_map()

    def close(self) -> None:
        self._inner.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that runs callbacks in the order of scheduling, so that equal programs run equally."""

    def __init__(self) -> None:
        self._skip = _Skip()
        super().__init__(self._skip)

    def time(self) -> float:
        return self._skip.now_s


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
