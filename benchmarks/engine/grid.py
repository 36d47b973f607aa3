"""The cost of spare checkpoints for prompts that never come again.

python -m benchmarks.engine.grid --model FOLDER [--memory 1GiB] [--turns 12]

One engine computes unique prompts in pairs, with the grid and without it, each order every other time. The
ratio is the median of the pairs, with an interval that contains the median of endless pairs in 19 of 20 runs.
It counts all threads, also the one that faults memory in ahead of need. With little memory (192MiB) all of it
has been touched after a few prompts.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count
from operator import truediv
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.engine.run import running
from tidemill.kvstore.memory.spare_value import GRID_PAGES
from tidemill.kvstore.sizes import parse_bytes
from tidemill.workers.engine.build import BuiltEngine
from tidemill.workers.malloc import keep_freed_memory
from tidemill.workers.messages import Request
from tidemill.workers.scheduling import admission
from tidemill.workers.settings import EngineSettings

PROMPT_TOKENS = 2048
WITHOUT_GRID = 1 << 20
"""An interval in pages that no prompt reaches."""


async def measure(settings: EngineSettings, turns: int) -> dict[int, list[float]]:
    """Return the CPU seconds of each prompt by the interval of the grid in pages."""
    keep_freed_memory()  # as workers do
    rng, numbers = Random(1), count()
    taken_s: dict[int, list[float]] = {GRID_PAGES: [], WITHOUT_GRID: []}
    async with running(settings) as (built, _):
        await _compute(built, rng, next(numbers))
        for turn in range(turns):
            for interval, seconds in sorted(taken_s.items(), reverse=bool(turn % 2)):
                admission.GRID_PAGES = interval
                began_s = time.process_time()
                await _compute(built, rng, next(numbers))
                seconds.append(time.process_time() - began_s)
    return taken_s


async def _compute(built: BuiltEngine, rng: Random, number: int) -> None:
    tokens = tuple(rng.randrange(5, built.info.vocab_size) for _ in range(PROMPT_TOKENS))
    request = Request(request_id=str(number), tokens=tokens, max_new_tokens=1)
    async with aclosing(built.engine.generate(request)) as deltas:
        async for _ in deltas:
            pass


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine.grid", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder of a hybrid model")
    parser.add_argument("--memory", type=parse_bytes, default=1 << 30, help="memory of the engine")
    parser.add_argument("--store", default="memory:?size=0", help="URL of a page store")
    parser.add_argument("--turns", type=int, default=12, help="pairs of prompts")
    options = parser.parse_args(arguments)
    settings = EngineSettings(
        model_folder=options.model,
        memory_bytes=options.memory,
        store_url=options.store,
        cache_folder=Path.home() / ".cache" / "tidemill",
    )
    taken_s = asyncio.run(measure(settings, options.turns))
    ratios = sorted(map(truediv, taken_s[GRID_PAGES], taken_s[WITHOUT_GRID]))
    around = [round(len(ratios) / 2 + side * 0.98 * len(ratios) ** 0.5) for side in (-1, 1)]
    least, most = ratios[max(0, around[0])], ratios[min(len(ratios), around[1]) - 1]
    with_s, without_s = median(taken_s[GRID_PAGES]), median(taken_s[WITHOUT_GRID])
    print(f"median CPU s: {with_s:.3f} with the grid, {without_s:.3f} without")
    print(f"ratio of pairs: {median(ratios):.4f} ({least:.4f} to {most:.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
