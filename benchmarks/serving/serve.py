"""Runs a workload against a running server over HTTP and reports what its users would have seen.

python -m benchmarks.serving.serve --url http://127.0.0.1:8000 --workload shared-prefix
    --plot shared-prefix.png
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from rich.console import Console

from benchmarks.serving.report import Run, Sample, summary, table_of
from benchmarks.serving.workloads import WORKLOADS, Item, Workload

TIMEOUT_S = 600
GREEDY: Mapping[str, object] = {"temperature": 0}


async def run_workload(
    client: httpx.AsyncClient,
    workload: Workload,
    model: str,
    concurrency: int,
    clock: Callable[[], float],
    *,
    hints: bool = False,
    sampling: Mapping[str, object] = GREEDY,
) -> list[Sample]:
    """Send every item, at most `concurrency` at a time, in order as far as they wait for no other. `sampling`
    are fields of each request."""
    slots = asyncio.Semaphore(concurrency)
    answered = [asyncio.Event() for _ in workload.items]

    async def one(index: int, item: Item) -> Sample:
        if item.after is not None:
            await answered[item.after].wait()
        if item.pause_s:
            await asyncio.sleep(item.pause_s)
        async with slots:
            sample = await _send(client, model, item, clock, {**sampling, **(item.hints if hints else {})})
        answered[index].set()
        return sample

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index, item)) for index, item in enumerate(workload.items)]
    return [task.result() for task in tasks]


async def _send(
    client: httpx.AsyncClient,
    model: str,
    item: Item,
    clock: Callable[[], float],
    fields: Mapping[str, object],
) -> Sample:
    body: dict[str, object] = {
        **fields,
        "model": model,
        "prompt": item.tokens,
        "max_tokens": item.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    times_s: list[float] = []
    usage: dict[str, Any] = {}
    start_s = clock()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            raise SystemExit(f"HTTP {response.status_code}: {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(f"the stream failed: {chunk['error']['message']}")
            if chunk["choices"]:
                times_s.append(clock())
            usage = chunk.get("usage") or usage
    return Sample(
        item=item,
        ttft_s=times_s[0] - start_s,
        gaps_s=tuple(after - before for before, after in pairwise(times_s)),
        e2e_s=times_s[-1] - start_s,
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        details=usage.get("prompt_tokens_details") or {},
    )


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
) -> Run:
    """One run of the workload `name`."""
    limits = httpx.Limits(max_connections=concurrency + 1)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits, trust_env=False) as client:
        model = (await client.get("/v1/models")).raise_for_status().json()["data"][0]
        cluster = (await client.get("/cluster")).raise_for_status().json()
        pids = sorted({cluster["frontend"]["pid"], *(worker["info"]["pid"] for worker in cluster["workers"])})
        workload = WORKLOADS[name](Random(seed), model["vocab_size"])
        cpu_s, start_s = server_cpu_s(pids), time.perf_counter()
        samples = await run_workload(
            client, workload, model["id"], concurrency, time.perf_counter, hints=hints, sampling=sampling
        )
        return Run(
            workload=name,
            hints=hints,
            concurrency=concurrency,
            seed=seed,
            page_tokens=cluster["workers"][0]["info"]["page_tokens"],
            wall_s=time.perf_counter() - start_s,
            server_cpu_s=server_cpu_s(pids) - cpu_s,
            server_pss_mib=server_pss_mib(pids),
            samples=tuple(samples),
        )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving.serve", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="shared-prefix")
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
    figures = summary(run)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        Console().print(table_of(figures))
    if options.plot:
        from benchmarks.serving.plots import plot  # noqa: PLC0415 - matplotlib is not everywhere

        plot(run, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
