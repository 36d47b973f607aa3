"""Runs a workload against a running Tidemill server on this machine: `tidemill bench`, and what it used.

python -m benchmarks.serving.serve --url http://127.0.0.1:8000 --workload shared-prefix
    --plot shared-prefix.png
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx
import psutil
from rich.console import Console

from tidemill.cluster.bench.client import LoadClient
from tidemill.cluster.bench.command import find_model, open_http
from tidemill.cluster.bench.load import run_load
from tidemill.cluster.bench.plot import plot
from tidemill.cluster.bench.report import BenchRun, figures_of, summary
from tidemill.cluster.bench.workloads import (
    AgentsShape,
    GspShape,
    MultiTurnShape,
    RandomShape,
    Shape,
    generated,
)
from tidemill.cluster.simulate.plot import new_figure

GREEDY: Mapping[str, object] = {"temperature": 0}
PREFIX = GspShape(
    num_groups=8, prompts_per_group=8, system_prompt_len=1024, question_len=64, output_len=16, ordered=True
)
SHAPES: dict[str, Shape] = {
    "shared-prefix": PREFIX,
    "multi-turn": MultiTurnShape(),
    "unique": RandomShape(num_prompts=32, input_len=1152, output_len=64, range_ratio=1 / 3),
    "burst": replace(PREFIX, num_groups=1, prompts_per_group=128, output_len=4),
    "agents": AgentsShape(),
}
"""Workloads by name. `burst` is for a concurrency of its 128 prompts: nothing is kept when they arrive."""


def server_cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds so far of the frontend and the workers, when they run on this machine."""
    times = (psutil.Process(pid).cpu_times() for pid in pids if psutil.pid_exists(pid))
    return sum(used.user + used.system for used in times)


def server_pss_mib(pids: Sequence[int]) -> float:
    """Memory (PSS) of the frontend and the workers, when they run on this machine."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids if psutil.pid_exists(pid)) / 2**20


async def measure(
    url: str,
    name: str,
    concurrency: int,
    seed: int,
    *,
    hints: bool = False,
    sampling: Mapping[str, object] = GREEDY,
    clock_s: Callable[[], float] = time.perf_counter,
) -> BenchRun:
    """One run of the workload `name`. Raises SystemExit when a request fails."""
    async with open_http(url) as http:
        model, vocab_size = await find_model(http)
        cluster = (await http.get("/cluster")).raise_for_status().json()
        pids = sorted({cluster["frontend"]["pid"], *(worker["info"]["pid"] for worker in cluster["workers"])})
        client = LoadClient(
            http=http, clock_s=clock_s, model=model, fields={**sampling, "ignore_eos": True}, hints=hints
        )
        workload = generated(Random(seed), vocab_size, SHAPES[name])
        cpu_s, start_s = server_cpu_s(pids), clock_s()
        results = await run_load(client, workload, concurrency)
        wall_s, used_s = clock_s() - start_s, server_cpu_s(pids) - cpu_s
    for result in results:
        if result.error:
            raise SystemExit(result.error)
    tokens = sum(result.output_tokens for result in results)
    return BenchRun(
        results=tuple(results),
        wall_s=wall_s,
        setup={
            "workload": name,
            "concurrency": concurrency,
            "seed": seed,
            "hints": hints,
            "server_cpu_ms_per_output_token": 1000 * used_s / tokens,
            "server_pss_mib": server_pss_mib(pids),
        },
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.serve", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--workload", choices=sorted(SHAPES), default="shared-prefix")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time")
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed sends prompts that no cache has seen"
    )
    parser.add_argument("--hints", action="store_true", help="send what the workload says of what to keep")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    try:
        run = asyncio.run(
            measure(options.url, options.workload, options.concurrency, options.seed, hints=options.hints)
        )
    except httpx.HTTPError as error:
        raise SystemExit(f"{options.url} does not answer as it should: {error}") from error
    figures = figures_of(run)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(
            summary(figures, run), {name: run.setup[name] for name in run.setup if "server" in name}
        )
    if options.plot:
        plot(run, new_figure(), options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
