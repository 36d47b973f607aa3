"""Window pages: those that a lease needs for its next tokens, and those that it needs no more.

    tokens        0       P       2P      3P      4P      5P      6P
    pages         [   .   |   .   |   a   |   b   |   c   |   d   |
                                  ^ first_window    ^ committed   ^ reserved for the next step
                                  |<--- window ---->|

A lease has a run of window pages: those that its next token can see, and those that its next steps
write. A full window page never changes, so checkpoints share it with the lease, without a copy.
Leases pin it, checkpoints own it, and it is free when there are neither.
"""

from tidemill.kvstore.layout import Layout, WindowId
from tidemill.kvstore.memory.lease import Lease


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
