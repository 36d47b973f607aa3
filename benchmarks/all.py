"""Every benchmark in one run, `make bench`: serving workloads against our own server, then the others."""

import subprocess
import sys
from pathlib import Path

from benchmarks.serving import serve

RESULTS = Path(__file__).parent / "results"
WORKLOADS = {"shared-prefix": 1, "multi-turn": 4, "unique": 4, "burst": 128}  # with the concurrency of each


def serving() -> None:
    """One prefill and one decode worker, started for this run and stopped after it."""
    command = [sys.executable, "-m", "tidemill", "serve", "keeper", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own command
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("ready: ").split("/v1 ")[0]
            for workload, concurrency in WORKLOADS.items():
                figure = RESULTS / f"{workload}.png"
                serve.main(
                    [
                        f"--url={url}",
                        f"--workload={workload}",
                        f"--concurrency={concurrency}",
                        f"--plot={figure}",
                    ]
                )
        finally:
            server.terminate()


if __name__ == "__main__":
    RESULTS.mkdir(exist_ok=True)
    serving()
    for name in ("kernels", "engine", "store", "index", "memory", "router", "frontend"):
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)  # noqa: S603 - our own command
