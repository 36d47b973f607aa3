"""Window pages: who has each of them, and those that a lease needs for the next tokens.

    tokens        0       P       2P      3P      4P      5P      6P
    pages         [   .   |   .   |   a   |   b   |   c   |   d   |
                                  ^ first_window    ^ committed   ^ reserved for the next step
                                  |<--- window ---->|

A lease has a run of them: what its next token can see, and what its next steps write. A full one never
changes, so the checkpoints whose last window it is in share it with the lease, without a copy: leases hold
it, checkpoints keep it, and it is free when nobody does.
"""

from collections import Counter
from collections.abc import Iterable

from tidemill.kvstore.layout import Layout, WindowId
from tidemill.kvstore.memory.arena import Pool
from tidemill.kvstore.memory.lease import Lease


class WindowCounts:
    """How many hold, and how many keep, each page of the pool."""

    def __init__(self, pool: Pool[WindowId]) -> None:
        self._pool = pool
        self._pinned = Counter[WindowId]()
        self._cached = Counter[WindowId]()

    def taken(self, window: WindowId) -> None:
        """It comes from the pool: its first holder has it."""
        assert not self._pinned[window]
        assert not self._cached[window]
        self._pinned[window] = 1

    def pin(self, windows: Iterable[WindowId]) -> None:
        for window in windows:
            if not self._pinned[window]:
                self._pool.pin(window)
            self._pinned[window] += 1

    def unpin(self, windows: Iterable[WindowId]) -> None:
        """One holder less; what nobody keeps either is free."""
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
        """A checkpoint has them too; they are held."""
        for window in windows:
            assert self._pinned[window]
            self._cached[window] += 1

    def drop(self, windows: Iterable[WindowId]) -> None:
        """One checkpoint less; what nobody holds either is free."""
        for window in windows:
            assert self._cached[window] > 0
            self._cached[window] -= 1
            if self._cached[window]:
                continue
            del self._cached[window]
            if not self._pinned[window]:
                self._pool.free(window)

    def check(self, holders: Counter[WindowId], keepers: Counter[WindowId]) -> None:
        assert holders == self._pinned, "a window page is held without a reason"
        assert keepers == self._cached, "a window page is kept without a checkpoint"


def lacking(layout: Layout, lease: Lease, end: int) -> int:
    """How many window pages a lease needs so that its steps can run up to `end`."""
    if not layout.has_windows or not lease.runs:
        return 0
    return max(0, -(-end // layout.page_tokens) - lease.windows_end)


def out_of_sight(layout: Layout, lease: Lease, depth: int) -> list[WindowId]:
    """Take from the lease the window pages that nobody with `depth` tokens or more can see."""
    count = min(max(0, layout.first_seen(depth) - lease.first_window), len(lease.windows))
    gone = lease.windows[:count]
    if gone:
        del lease.windows[:count]
        lease.first_window += count
        lease.count_windows()
    return gone


def last_window(layout: Layout, lease: Lease) -> tuple[WindowId, ...]:
    """The window pages of a checkpoint at `committed`, a page boundary."""
    places = layout.last_window(lease.committed // layout.page_tokens)
    first = places.start - lease.first_window
    found = lease.windows[first : first + len(places)]
    assert first >= 0 or not places
    assert len(found) == len(places), "a window page was given back while it can be seen"
    return tuple(found)
