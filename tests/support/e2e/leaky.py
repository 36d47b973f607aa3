"""`tidemill` with workers that lose a page of each request whose id contains MARK.

python -m tests.support.e2e.leaky serve keeper
"""

import sys
from collections.abc import Callable
from functools import partial

from tidemill.cluster.cli import main as cli
from tidemill.cluster.config import fleets
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.workers.engine import build as workers
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import EngineSettings

MARK = "leaks"


class LeakyLedger(Ledger):
    """Forgets a page when it releases a request with the mark."""

    def release(self, request_id: str) -> None:
        lease = self._leases[request_id]
        if MARK in request_id and lease.private_pages:
            lease.private_pages.pop()
            lease.rebuild_page_table()
        super().release(request_id)


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> workers.BuiltEngine:
    workers.Ledger = LeakyLedger
    return workers.build_engine(settings, progress, start_ranks)


if __name__ == "__main__":
    fleets.WorkerSettings = partial(fleets.WorkerSettings, build="tests.support.e2e.leaky:build")
    sys.exit(cli.main())
