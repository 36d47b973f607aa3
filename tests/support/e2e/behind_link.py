"""`tidemill` with workers behind a bad link: tokens, heartbeats and the answers of the store are
delayed.

python -m tests.support.e2e.behind_link serve keeper; the nodes have WEATHER, the path of a JSON
file with `Weather`.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.e2e import link
from tidemill.cluster.cli import main as cli
from tidemill.cluster.config import fleets
from tidemill.cluster.rpc.router_failover import FindRouter
from tidemill.cluster.worker import worker_process
from tidemill.cluster.worker.heartbeats import Heartbeats
from tidemill.cluster.worker.server import WorkerServer
from tidemill.workers.engine.build import BuiltEngine, build_engine
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import EngineSettings

WEATHER = "TIDEMILL_TEST_WEATHER"


class Outside:
    """Proxies in a process that ends with this one: calls of Mooncake keep Python from running."""

    def __init__(self, weather: Path) -> None:
        command = [sys.executable, link.__file__, str(weather)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def to(self, address: str, host: str = "127.0.0.1") -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(f"{address} {host}\n")
            self._process.stdin.flush()
            return self._process.stdout.readline().strip()


def build(
    settings: EngineSettings, progress: Callable[[int, int], None], start_ranks: StartRanks
) -> BuiltEngine:
    """Called in the process of a worker, before it listens."""
    file = os.environ.get(WEATHER)
    if file is None:
        return build_engine(settings, progress, start_ranks)
    outside = Outside(Path(file))

    class FarPlane(WorkerServer):
        async def start(self, host: str, port: int = 0) -> str:
            return await asyncio.to_thread(outside.to, await super().start(host, port), host)

    class FarBeats(Heartbeats):
        def __init__(self, engine: Any, duties: Any, find_router: FindRouter, *others: Any) -> None:  # noqa: ANN401
            async def find() -> str:
                return await asyncio.to_thread(outside.to, await find_router())

            super().__init__(engine, duties, find, *others)

    worker_process.WorkerServer = FarPlane
    worker_process.Heartbeats = FarBeats
    url = re.sub("(?<=mooncake://)[^?]+", lambda master: outside.to(master[0]), settings.store_url)
    return build_engine(replace(settings, store_url=url), progress, start_ranks)


if __name__ == "__main__":
    fleets.WorkerSettings = partial(fleets.WorkerSettings, build="tests.support.e2e.behind_link:build")
    sys.exit(cli.main())
