"""Every benchmark in one run, `make bench`: serving workloads against our own server, then the others."""

import subprocess
import sys

from benchmarks.serving import serve

WORKLOADS = {"shared-prefix": 1, "multi-turn": 4, "unique": 4, "burst": 128}  # with the concurrency of each


def serving() -> None:
    """One prefill and one decode worker, started for this run and stopped after it."""
    arguments = ["serve", "keeper", "--prefill=1", "--decode=1", "--port=0"]
    command = [sys.executable, "-m", "tidemill", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own command
        try:
            assert server.stdout is not None
            url = server.stdout.readline().removeprefix("ready: ").split("/v1 ")[0]
            for workload, concurrency in WORKLOADS.items():
                serve.main(
                    [
                        f"--url={url}",
                        f"--workload={workload}",
                        f"--concurrency={concurrency}",
                    ]
                )
        finally:
            server.terminate()


if __name__ == "__main__":
    serving()
    for command in (
        "python -m benchmarks.kernels",
        "python -m benchmarks.kernels.kinds",
        "python -m benchmarks.store.store",
        "python -m benchmarks.memory.index",
        "python -m benchmarks.memory.arena",
        "python -m benchmarks.router.placements",
        "python -m benchmarks.router.placement_calls",
        "python -m benchmarks.serving.token_path",
    ):
        subprocess.run([sys.executable, *command.split()[1:]], check=True)  # noqa: S603 - our own command
