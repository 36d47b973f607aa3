"""`tidemill` with bad workers: a prompt that contains POISON crashes them, and of each request whose id
contains LEAKS they lose a page.

python -m tests.support.e2e.altered serve keeper
"""

import os
import sys
from collections.abc import Callable

from tidemill.cluster.cli import main as cli
from tidemill.cluster.settings import OWN_ENGINE
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.engine import build as workers
from tidemill.workers.engine import runners
from tidemill.workers.execution.model_runner import TorchRunner
from tidemill.workers.execution.step import Drawn, Step
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import EngineSettings

POISON = (11, 12, 13, 14, 15, 16, 17, 18)
LEAKS = "leaks"


class LeakyLedger(Ledger):
    """Forgets a page when it releases a request that leaks."""

    def release(self, request_id: str) -> None:
        lease = self._leases[request_id]
        if LEAKS in request_id and lease.private_pages:
            lease.private_pages.pop()
            lease.rebuild_page_table()
        super().release(request_id)


class DeadlyRunner(TorchRunner):
    """Ends its process at a step with poison, without a message."""

    def run_now(self, step: Step) -> list[Drawn]:
        if any(is_poisoned(row.tokens) for row in step):
            os._exit(1)
        return super().run_now(step)


def is_poisoned(tokens: tuple[int, ...]) -> bool:
    return any(tokens[i : i + len(POISON)] == POISON for i in range(len(tokens)))


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> workers.BuiltEngine:
    workers.Ledger, runners.TorchRunner = LeakyLedger, DeadlyRunner
    return workers.build_engine(settings, progress, start_ranks)


if __name__ == "__main__":
    OWN_ENGINE["build"] = "tests.support.e2e.altered:build"
    sys.exit(cli.main())
