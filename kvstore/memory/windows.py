"""Window pages: the users of each page, and the pages that a lease needs for its next tokens.

    tokens        0       P       2P      3P      4P      5P      6P
    pages         [   .   |   .   |   a   |   b   |   c   |   d   |
                                  ^ first_window    ^ committed   ^ reserved for the next step
                                  |<--- window ---->|

A lease has a run of window pages: those that its next token can see, and those that its next steps
write. A full window page never changes, so checkpoints share it with the lease, without a copy.
Leases pin it, checkpoints cache it, and it is free when there are neither.
"""

from collections import Counter
from collections.abc import Iterable

from tidemill.kvstore.layout import Layout, WindowId
from tidemill.kvstore.memory.arena import Pool
from tidemill.kvstore.memory.lease import Lease


class WindowCounts:
    """The number of pins and the number of checkpoints of each window page."""

    def __init__(self, pool: Pool[WindowId]) -> None:
        self._pool = pool
        self._pinned = Counter[WindowId]()
        self._cached = Counter[WindowId]()

    def pin_new(self, window: WindowId) -> None:
        """Count the first pin of a window page that was taken from the pool."""
        assert not self._pinned[window]
        assert not self._cached[window]
        self._pinned[window] = 1

    def pin(self, windows: Iterable[WindowId]) -> None:
        for window in windows:
            if not self._pinned[window]:
                self._pool.pin(window)
            self._pinned[window] += 1

    def unpin(self, windows: Iterable[WindowId]) -> None:
        """Remove one pin of each; free those without pins and checkpoints."""
        for window in windows:
            assert self._pinned[window] > 0
            self._pinned[window] -= 1
            if self._pinned[window]:
                continue
            del self._pinned[window]
            if self._cached[window]:
                self._pool.unpin(window)
            else:
                self._pool.free(window)

    def cache(self, windows: Iterable[WindowId]) -> None:
        """Add a checkpoint to each of them; they are pinned."""
        for window in windows:
            assert self._pinned[window]
            self._cached[window] += 1

    def drop(self, windows: Iterable[WindowId]) -> None:
        """Remove one checkpoint of each; free those without pins and checkpoints."""
        for window in windows:
            assert self._cached[window] > 0
            self._cached[window] -= 1
            if self._cached[window]:
                continue
            del self._cached[window]
            if not self._pinned[window]:
                self._pool.free(window)

    def check(self, pinned: Counter[WindowId], cached: Counter[WindowId]) -> None:
        assert pinned == self._pinned, "a window page is pinned without a reason"
        assert cached == self._cached, "a window page is cached without a checkpoint"


def count_missing(layout: Layout, lease: Lease, end: int) -> int:
    """Return the number of window pages that a lease lacks for steps up to `end`."""
    if not layout.has_windows or not lease.runs:
        return 0
    return max(0, -(-end // layout.page_tokens) - lease.windows_end)


def pop_out_of_window(layout: Layout, lease: Lease, depth: int) -> list[WindowId]:
    """Remove from the lease and return the window pages that no token from `depth` on can see."""
    count = min(max(0, layout.first_visible_window(depth) - lease.first_window), len(lease.windows))
    popped = lease.windows[:count]
    if popped:
        del lease.windows[:count]
        lease.first_window += count
        lease.rebuild_window_table()
    return popped


def last_window(layout: Layout, lease: Lease, depth: int) -> tuple[WindowId, ...]:
    """Return the window pages of a checkpoint at `depth`, a page boundary up to `committed`."""
    positions = layout.last_window(depth // layout.page_tokens)
    first = positions.start - lease.first_window
    found = lease.windows[first : first + len(positions)]
    assert first >= 0 or not positions
    assert len(found) == len(positions), "a window page was freed while it can be seen"
    return tuple(found)
