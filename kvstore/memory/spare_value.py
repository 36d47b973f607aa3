"""The value of a spare checkpoint, from how often prompts leave earlier ones inside.

    earlier prompt   | page | page | page | page | page | page |
    this prompt      | page | page | page | page | page | own  |    a junction after 5 pages; it resumes at 0:
                                                     ^               a spare checkpoint after 4 was missed

The pages of an earlier prompt stay when its spare checkpoints are gone, or were never kept. So a worker sees
which of them would have been used. A junction counts only if its checkpoint would still be there. In between
the clock of the index has advanced by what memory costs, and a credit below that is gone.

The rate of junctions is the largest one that proves itself: at least this number of junctions a page would
have found their checkpoint if its credit was by this rate. It is computed as the h-index of an author is.
"""

from collections import deque
from collections.abc import Sequence

from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.entry import Entry
from tidemill.kvstore.memory.prefix_index import PrefixIndex

GRID_PAGES = 4
"""The number of pages between the spare checkpoints of a prompt."""

PROMPTS_MAX = 64
"""The latest prompts, from which the rate is computed."""


def roundness(depth_pages: int) -> int:
    """Return the largest power of two that divides `depth_pages`."""
    return depth_pages & -depth_pages


class SpareValue:
    """The rate of junctions over the latest prompts, and the credit of spare checkpoints by it.

    junctions_per_page      0 until a spare checkpoint was used or missed
    """

    def __init__(self, index: PrefixIndex, layout: Layout) -> None:
        self.junctions_per_page = 0.0
        self._index = index
        self._layout = layout
        self._prompts: deque[tuple[int, float | None]] = deque(maxlen=PROMPTS_MAX)

    def credit(self, start: int, depth: int) -> float:
        """Return the credit of a spare checkpoint at `depth` by the present rate: the FLOPs that it will save
        for each byte of it. Both are in pages, and the path has a checkpoint at `start`.

        One that is as round as `width` serves the junctions in as many pages behind it, and saves as many
        before it: rounder ones are on both sides.
        """
        return self.junctions_per_page * self._per_rate(start, depth)

    def add_prompt(self, path: Sequence[Entry], resumed: int, num_pages: int) -> None:
        """Record a prompt of `num_pages` that begins with `path` and resumes after `resumed` pages. The index
        has not counted this use yet. Without checkpoints, and in the order of `lru`, there is no rate."""
        if not self._layout.hybrid or self._index.policy == "lru":
            return
        needed = self._needed_rate(path, resumed)
        computed = max(0, num_pages - max(len(path), resumed))
        if not computed and needed is None:
            return
        self._prompts.append((computed, needed))
        total = max(1, sum(pages for pages, _ in self._prompts))
        rates = sorted(rate for _, rate in self._prompts if rate is not None)
        proven = [count / total for count, rate in enumerate(rates, 1) if rate <= count / total]
        self.junctions_per_page = max(proven, default=0.0)

    def _needed_rate(self, path: Sequence[Entry], resumed: int) -> float | None:
        """Return the rate from which on the spare checkpoint that this prompt uses or misses would be there
        still; None if it needs none.

        It needs none where it goes on behind the earlier prompt, or where that kept a checkpoint of its own,
        which is worth more and was evicted all the same."""
        missed = len(path) // GRID_PAGES * GRID_PAGES
        if missed > resumed:
            had_own = any(entry.uses and entry.freed_bytes for entry in path[missed - 1 :])
            if had_own or not path[-1].children:
                return None
            start, entry = resumed, path[missed - 1]
        elif 0 < resumed <= len(path) and not path[resumed - 1].uses:
            entry = path[resumed - 1]
            above = reversed(path[: resumed - 1])
            start = next((kept.depth_pages for kept in above if kept.checkpoint and kept.uses), 0)
        else:
            return None
        return (self._index.clock - entry.clock) / self._per_rate(start, entry.depth_pages)

    def _per_rate(self, start: int, depth: int) -> float:
        """Return the credit at a rate of 1."""
        layout, width = self._layout, roundness(depth)
        own_bytes = layout.saved_stride_bytes + len(layout.last_window(depth)) * layout.window_bytes
        saved = self._index.cost.flops(
            max(start, depth - width) * layout.page_tokens, depth * layout.page_tokens
        )
        return width * saved / own_bytes
