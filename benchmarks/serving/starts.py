"""The time from a command to its line "ready": `tidemill serve keeper`, and an edge that joins it.

python -m benchmarks.serving.starts [--runs 5] [--options ...]

A first run compiles modules and kernels and is left out. CPU time is that of all processes of the server at
that line; on a busy machine it is the better measure. The stages are when a process of that name was first
seen.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
from tests.support.e2e.server import EdgeProcess, Server, command_of
from tests.support.sockets import free_port

GOALS_S = {"serve": 7.0, "edge": 2.0}
STAGES = {"gcs_server": "Ray's GCS", "ray::Supervisor": "supervisor", "ray::WorkerActor": "first worker"}
LOOK_S = 0.05


class Stages:
    """The seconds after which a process of each stage was first seen below this one."""

    def __init__(self) -> None:
        self.seen_s: dict[str, float] = {}
        self._began_s = time.monotonic()
        self._is_done = False
        self._thread = Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._is_done:
            for process in psutil.Process().children(recursive=True):
                line = command_of(process)
                for word, stage in STAGES.items():
                    if word in line:
                        self.seen_s.setdefault(stage, time.monotonic() - self._began_s)
            time.sleep(LOOK_S)

    def end(self) -> float:
        """Stop looking, and return the seconds since the start."""
        took_s = time.monotonic() - self._began_s
        self._is_done = True
        self._thread.join()
        return took_s


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of processes, and of their children that have ended."""
    total_s = 0.0
    for process in processes:
        with suppress(psutil.Error):
            used = process.cpu_times()
            total_s += used.user + used.system + used.children_user + used.children_system
    return total_s


def start_once(folder: Path, options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Start a server and an edge, each once, and end both."""
    port = free_port()
    stages = Stages()
    server = Server(["keeper", "--port", "0", "--router-port", str(port), *options], folder / "log")
    try:
        served_s = stages.end()
        rows = {"serve": {"s": served_s, "cpu_s": cpu_s(server.processes()), "stages_s": stages.seen_s}}
        for name in ("edge, empty cache", "edge"):
            began_s = time.monotonic()
            edge = EdgeProcess(folder / name.replace(", ", "-"), "--join", f"127.0.0.1:{port}")
            try:
                edge.wait_until_ready()
                took_s = time.monotonic() - began_s
                rows[name] = {"s": took_s, "cpu_s": cpu_s([psutil.Process(edge.pid)])}
            finally:
                edge.kill()
        assert server.stop() == 0
    finally:
        server.kill_everything()
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="of `tidemill serve keeper`")
    chosen = options.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process would compile every module
    found: list[dict[str, dict[str, Any]]] = []
    for _ in range(chosen.runs + 1):
        with tempfile.TemporaryDirectory(prefix="starts-") as folder:
            found.append(start_once(Path(folder), chosen.options))
        print(json.dumps(found[-1]), "load", round(os.getloadavg()[0], 1), file=sys.stderr, flush=True)
    found = found[1:]  # the first one has compiled modules and kernels
    rows = {
        name: {
            "median_s": round(statistics.median(run[name]["s"] for run in found), 2),
            "best_s": round(min(run[name]["s"] for run in found), 2),
            "cpu_s": round(statistics.median(run[name]["cpu_s"] for run in found), 2),
            "goal_s": GOALS_S[name.partition(",")[0]],
        }
        for name in found[0]
    }
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
