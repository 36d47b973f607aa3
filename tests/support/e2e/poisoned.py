"""`tidemill` with workers that a poisonous prompt crashes: one that contains MARK.

python -m tests.support.e2e.poisoned serve keeper
"""

import os
import sys
from collections.abc import Callable
from functools import partial

from tidemill.cluster.cli import main as cli
from tidemill.cluster.config import fleets
from tidemill.workers.engine import build as workers
from tidemill.workers.engine import runners
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.step import Drawn, Step
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import EngineSettings

MARK = (11, 12, 13, 14, 15, 16, 17, 18)


class DeadlyRunner(TorchRunner):
    """Ends its process at a step with the mark, without a message."""

    def run_now(self, step: Step) -> list[Drawn]:
        if any(is_marked(row.tokens) for row in step):
            os._exit(1)
        return super().run_now(step)


def is_marked(tokens: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(MARK)] == MARK for i in range(len(tokens)))


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> workers.BuiltEngine:
    runners.TorchRunner = DeadlyRunner
    return workers.build_engine(settings, progress, start_ranks)


if __name__ == "__main__":
    fleets.WorkerSettings = partial(fleets.WorkerSettings, build="tests.support.e2e.poisoned:build")
    sys.exit(cli.main())
