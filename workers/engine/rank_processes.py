"""Start the other ranks of a group as child processes, for programs without Ray.

python -m tidemill.workers.engine.rank_processes INDEX FOLDER    reads the settings from its standard input
"""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

from pydantic import TypeAdapter

from tidemill.workers.device import check_ranks, device_of_rank
from tidemill.workers.engine.build_rank import build_rank
from tidemill.workers.parallel.link import Ended, StartRanks
from tidemill.workers.parallel.network import Meeting
from tidemill.workers.parallel.rank import carry_out
from tidemill.workers.settings import EngineSettings

SETTINGS = TypeAdapter(EngineSettings)


def _start_ranks(settings: EngineSettings, folder: Meeting) -> Ended:
    """Start the ranks from 1 on, which meet in `folder`. They end with their leader. Raises SettingsError."""
    check_ranks(settings)
    ranks: list[subprocess.Popen[bytes]] = []
    for index in range(1, settings.tensor_parallel_size):
        command = [sys.executable, "-m", "tidemill.workers.engine.rank_processes", str(index), str(folder)]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE)  # noqa: S603  our own command
        assert rank.stdin is not None
        with rank.stdin as pipe:
            own = replace(settings, device=device_of_rank(settings, index))
            pipe.write(SETTINGS.dump_json(own))
        Thread(target=rank.wait, name=f"rank-{index}-end", daemon=True).start()  # reaps it
        ranks.append(rank)

    def ended() -> str | None:
        return next(
            (f"its process ended with {rank.returncode}" for rank in ranks if rank.returncode is not None),
            None,
        )

    return ended


start_ranks = StartRanks(_start_ranks)
"""The start of ranks on this machine."""


def main(index: int, folder: Path) -> None:
    settings = SETTINGS.validate_json(sys.stdin.buffer.read())
    status = 1
    try:
        asyncio.run(carry_out(folder, index, lambda: build_rank(settings, index, folder)))
        status = 0
    finally:
        os._exit(status)  # a thread of it may wait for ranks that are gone


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
