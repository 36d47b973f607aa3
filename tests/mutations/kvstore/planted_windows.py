"""Bugs to plant in what is made of windows."""

from tests.mutations.planted import UNIT, Planted

WINDOWS = f"{UNIT}/kvstore/memory/test_windows.py"
LEDGER = f"{UNIT}/kvstore/memory/test_ledger.py"
TRANSFER = f"{UNIT}/workers/transfer/test_transfer.py"
MATRIX = f"{UNIT}/workers/engine/test_matrix.py -k windows-4"

WINDOW_BUGS = (
    Planted(
        "a checkpoint lacks the oldest page of its window",
        "kvstore/layout.py",
        "range(max(0, depth_pages - seen), depth_pages)",
        "range(max(0, depth_pages - seen + 1), depth_pages)",
        WINDOWS,
    ),
    Planted(
        "a window page is given back while the next token sees it",
        "kvstore/layout.py",
        "max(0, depth - seen) // self.page_tokens",
        "-(-max(0, depth - seen) // self.page_tokens)",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "window pages that are out of sight stay",
        "kvstore/memory/ledger.py",
        "            self._cache.windows.unpin(windows.out_of_sight(self.layout, lease, num_tokens))\n",
        "",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "what a checkpoint keeps is free when its lease ends",
        "kvstore/memory/windows.py",
        "            if self._cached[window]:\n                self._pool.unpin(window)",
        "            if self._pinned[window]:\n                self._pool.unpin(window)",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "a window page that two checkpoints share goes with the first",
        "kvstore/memory/windows.py",
        """            self._cached[window] -= 1
            if self._cached[window]:
                continue
""",
        "            self._cached[window] -= 1\n",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "a checkpoint that is read does not hold its window",
        "kvstore/memory/cache.py",
        "            self.windows.pin(entry.checkpoint.windows)\n",
        "",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "a lease that resumes does not hold the window",
        "kvstore/memory/ledger.py",
        "            self._cache.windows.pin(shared)\n",
        "",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "a lease keeps its window when it ends",
        "kvstore/memory/ledger.py",
        "        self._cache.windows.unpin(lease.windows)\n",
        "",
        f"{WINDOWS} {LEDGER}",
    ),
    Planted(
        "windows do not count when memory is asked for",
        "kvstore/memory/cache.py",
        "_extents_for(self.arena.states, states) + _extents_for(self.arena.windows, windows)",
        "_extents_for(self.arena.states, states)",
        f"{UNIT}/kvstore/memory/test_eviction.py {LEDGER}",
    ),
    Planted(
        "a state alone passes for a checkpoint in the store",
        "workers/transfer/transfer.py",
        "        return [*windows, *states]\n",
        "        return [*states, *windows[:1]]\n",
        TRANSFER,
    ),
    Planted(
        "a window is published before its pages",
        "workers/transfer/transfer.py",
        "stored = await self._put(pages + last)",
        "stored = await self._put(last + pages)",
        TRANSFER,
    ),
    Planted(
        "every rank publishes its copy of a window page",
        "kvstore/shards.py",
        "publishes_windows=rank % max(1, size // shards.windows) == 0",
        "publishes_windows=rank >= 0",
        f"{UNIT}/kvstore/test_shards.py",
    ),
    Planted(
        "window pages of the row are those of its pages",
        "workers/execution/step_tensors.py",
        "_tables([row.windows[:",
        "_tables([row.pages[:",
        f"{UNIT}/workers/execution/test_model_runner.py",
    ),
    Planted(
        "ranks do not hear of window pages",
        "workers/parallel/frames.py",
        "        windows=tuple(map(WindowId, islice(left, num_windows))),\n",
        "",
        f"{UNIT}/workers/parallel/test_frames.py",
    ),
)
