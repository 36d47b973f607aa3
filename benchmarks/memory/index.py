"""The prefix index with 100,000 and a million entries.

python -m benchmarks.memory.index [--quick] [--output benchmarks/results]
"""

import argparse
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import get_args

from rich.console import Console
from rich.table import Table

from benchmarks.memory.served_model import COST, NoBytes, qwen_layout
from benchmarks.rows import RESULTS, write_rows
from tidemill.kvstore.keys import PageKey
from tidemill.kvstore.layout import PAGES, STATES
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.entry import Checkpoint
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy

SIZES = (100_000, 1_000_000)
WORK_PAGES = 20_000
OPERATIONS = ("match", "insert", "evict")
CHECKPOINT_PAGES = 50  # between checkpoints, as on the grid of a long prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Pages per CPU second of an index with `entries` pages in a full arena. `match` walks paths, `insert`
    takes a page and evicts another one, `evict` only takes pages."""

    policy: Policy
    entries: int
    checkpoints: int
    path_pages_mean: float
    match_pages_per_s: float
    insert_pages_per_s: float
    evict_pages_per_s: float
    wall_to_cpu: float


class Forest:
    """Paths like those of real traffic: a prompt branches off an earlier one, or is new."""

    def __init__(self, cache: Cache, rng: Random) -> None:
        self.cache = cache
        self.paths: list[list[PageKey]] = []
        self._rng = rng
        self._serial = 0

    def next_path(self) -> list[PageKey]:
        """Return the keys of a prompt of 32 to 512 pages; half of them share a prefix."""
        keys: list[PageKey] = []
        if self.paths and self._rng.random() < 0.5:
            earlier = self._rng.choice(self.paths)
            keys = earlier[: self._rng.randrange(1, len(earlier))]
        length = int(32 * 2 ** self._rng.uniform(0, 4))
        while len(keys) < length:
            self._serial += 1
            keys.append(PageKey(self._rng.randbytes(8) + self._serial.to_bytes(8, "little")))
        return keys

    def keep(self, keys: list[PageKey]) -> int:
        """Insert the missing pages of a path like a request; return their number. Checkpoints are at every
        grid point and at the end."""
        cache = self.cache
        path = list(cache.index.match(keys).path)
        cache.index.use(path)
        for entry in path:
            cache.pin(entry)
        found = len(path)
        for depth, key in enumerate(keys[found:], found + 1):
            entry, _ = cache.insert(path[-1] if path else None, key, cache.take(PAGES))
            path.append(entry)
            if depth % CHECKPOINT_PAGES == 0 or depth == len(keys):
                cache.keep_checkpoint(entry, Checkpoint((cache.take(STATES),)))
        for entry in reversed(path):
            cache.unpin(entry)
        self.paths.append(keys)
        return len(keys) - found


def full_forest(entries: int, policy: Policy, rng: Random) -> Forest:
    """Fill an index with about `entries` pages, in an arena of that size."""
    layout = qwen_layout(64)
    num_extents = 4 * -(-entries // layout.pages_per_extent)
    cache = Cache(layout, Arena(layout, num_extents, NoBytes()), PrefixIndex(layout, policy, COST))
    forest = Forest(cache, rng)
    while len(cache.index) < entries:
        forest.keep(forest.next_path())
    cache.arena.resize(cache.arena.pools[PAGES].num_extents + cache.arena.pools[STATES].num_extents)
    return forest


def measure(entries: int, policy: Policy, work: int, rng: Random) -> Speed:
    """Match, insert and evict about `work` pages each in a full cache."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    forest = full_forest(entries, policy, rng)
    cache, index = forest.cache, forest.cache.index
    held, checkpoints = len(index), cache.arena.pools[STATES].num_cached
    rounds = max(1, work // 200)
    asked = rng.choices(forest.paths[len(forest.paths) // 2 :], k=rounds)
    matched, match_s = _timed(lambda: sum(len(index.match(keys).path) for keys in asked))
    paths = [forest.next_path() for _ in range(rounds)]
    inserted, insert_s = _timed(lambda: sum(forest.keep(keys) for keys in paths))
    evicted, evict_s = _timed(lambda: _take_pages(cache, work))
    return Speed(
        policy=policy,
        entries=held,
        checkpoints=checkpoints,
        path_pages_mean=sum(map(len, forest.paths)) / len(forest.paths),
        match_pages_per_s=matched / match_s,
        insert_pages_per_s=inserted / insert_s,
        evict_pages_per_s=evicted / evict_s,
        wall_to_cpu=(time.perf_counter() - wall_s) / (time.process_time() - cpu_s),
    )


def bytes_per_entry(entries: int, policy: Policy, rng: Random) -> float:
    """Return the Python memory of the cache and its index per entry, keys included."""
    tracemalloc.start()
    try:
        cache = full_forest(entries, policy, rng).cache
        return tracemalloc.get_traced_memory()[0] / len(cache.index)
    finally:
        tracemalloc.stop()


def _take_pages(cache: Cache, count: int) -> int:
    for _ in range(count):
        cache.take(PAGES)
    return count


def _timed(work: Callable[[], int]) -> tuple[int, float]:
    """Return the result of `work` and its CPU seconds."""
    start_s = time.process_time()
    count = work()
    return count, time.process_time() - start_s


def growth(speeds: Sequence[Speed]) -> dict[str, dict[str, float]]:
    """Return, by policy and operation, the time in the largest index relative to the smallest."""
    found: dict[str, dict[str, float]] = {}
    for policy in dict.fromkeys(speed.policy for speed in speeds):
        of_policy = sorted(
            (speed for speed in speeds if speed.policy == policy), key=lambda speed: speed.entries
        )
        small, large = of_policy[0], of_policy[-1]
        found[policy] = {
            name: getattr(small, f"{name}_pages_per_s") / getattr(large, f"{name}_pages_per_s")
            for name in OPERATIONS
        }
    return found


def table_of(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    table = Table(title=title, box=None, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    return table


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory.index")
    parser.add_argument("--quick", action="store_true", help="a small index: for tests")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of index.jsonl")
    options = parser.parse_args(arguments)
    quick: bool = options.quick
    sizes, work = ((2_000, 4_000), 500) if quick else (SIZES, WORK_PAGES)
    speeds = [measure(size, policy, work, Random(0)) for size in sizes for policy in get_args(Policy)]
    entry_bytes = {policy: bytes_per_entry(sizes[0], policy, Random(0)) for policy in get_args(Policy)}
    grown = growth(speeds)
    console = Console(width=170)
    console.print(table_of("index, pages per CPU second", [asdict(speed) for speed in speeds]))
    growths = [
        {"policy": policy, **ratios, "bytes per entry": entry_bytes[policy]}
        for policy, ratios in grown.items()
    ]
    console.print(table_of("time at the largest : smallest", growths))
    rows = [asdict(speed) | {"bytes_per_entry": entry_bytes[speed.policy]} for speed in speeds]
    write_rows("index", "python -m benchmarks.memory.index", rows, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
