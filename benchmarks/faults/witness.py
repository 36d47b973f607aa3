"""`tidemill` with workers that immediately record the memory of requests and the ends of steps.

TIDEMILL_WITNESS=FOLDER python -m benchmarks.faults.witness serve keeper

FOLDER/PID gets a line per change: the time on the machine's monotonic clock, the bytes, the steps.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tidemill.cluster.cli import main as cli
from tidemill.cluster.config import fleets
from tidemill.workers.engine import build as workers
from tidemill.workers.engine.engine import Engine
from tidemill.workers.engine.load_report import memory_use
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import EngineSettings

FOLDER = "TIDEMILL_WITNESS"
LOOK_S = 0.002


class Watched(Engine):
    """Its loop is where memory comes and goes, so looking there misses nothing that lasts."""

    async def run(self) -> None:
        watching = asyncio.create_task(self._watch(Path(os.environ[FOLDER], str(os.getpid()))))
        try:
            await super().run()
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def _watch(self, path: Path) -> None:
        last = (-1, -1)
        with path.open("w", buffering=1) as file:
            while True:
                use = memory_use(self._ledger)
                now = (use["pages_live"] + use["states_live"], self.steps)
                if now != last:
                    last = now
                    file.write(f"{time.monotonic()} {now[0]} {now[1]}\n")
                await asyncio.sleep(LOOK_S)


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> workers.BuiltEngine:
    workers.Engine = Watched
    return workers.build_engine(settings, progress, start_ranks)


if __name__ == "__main__":
    fleets.WorkerSettings = partial(fleets.WorkerSettings, build="benchmarks.faults.witness:build")  # pyrefly: ignore[bad-assignment]
    sys.exit(cli.main())
