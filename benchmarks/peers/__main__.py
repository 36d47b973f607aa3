"""Tidemill beside vLLM and llama.cpp on the same cores: the same models, servers in turn, wall time.

python -m benchmarks.peers --folder FOLDER [--cores 1] [--runs 3] [--models dense hybrid]
    [--works c=1 c=8 ...] [--peers vllm llama.cpp] [--only tidemill]
python -m benchmarks.peers --folder FOLDER --runs 1 --cases [MODEL ...]

With --cases it measures the rows of `cases.py`, all or those of some models.
FOLDER keeps vLLM's virtual environment, llama.cpp and the random models; the first run makes them. With one
core the server has core 0 and the client core 1; with two, they share both. It prints a table of the medians
and keeps all runs in `peers.jsonl` of benchmarks/results, instead of earlier ones of the same case.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from benchmarks.peers.cases import CASES, Case
from benchmarks.peers.cpu import KINDS, cpu_name
from benchmarks.peers.models import NAMES, make_model
from benchmarks.peers.servers import PORTS, VERSIONS, command_of, make_server, older_cpu, started
from benchmarks.peers.works import METRICS, Work, drawn, items_of, shown, works_of
from tidemill.cluster.bench.client import LoadClient
from tidemill.cluster.bench.command import open_http
from tidemill.cluster.bench.load import run_load
from tidemill.cluster.bench.workloads import Workload

RESULTS = Path(__file__).parents[1] / "results" / "peers.jsonl"


def used(root: psutil.Process) -> tuple[float, float]:
    """Return CPU seconds so far and memory (PSS) in MiB of a process and all below it."""
    cpu_s = pss = 0.0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        cpu_s += times.user + times.system
        pss += process.memory_full_info().pss / 2**20
    return cpu_s, pss


async def measure(url: str, model: str, root: psutil.Process, work: Work) -> dict[str, Any]:
    """Send a work and return its figures. Raises SystemExit when a request fails."""
    async with open_http(url) as http:
        fields = {"temperature": 0, "ignore_eos": True}
        client = LoadClient(http=http, clock_s=time.perf_counter, model=model, fields=fields)
        before_s, _ = used(root)
        start_s = time.perf_counter()
        samples = await run_load(client, Workload(work.name, work.items), work.concurrency)
        wall_s = time.perf_counter() - start_s
    for sample in samples:
        if sample.error:
            raise SystemExit(sample.error)
    cpu_s, pss_mib = used(root)
    first_tokens_s = [sample.ttft_s for sample in samples if sample.item.position >= work.from_turn]
    return {
        "work": work.name,
        "wall_s": round(wall_s, 3),
        "ttft_s": round(statistics.median(first_tokens_s), 4),
        "tpot_s": round(statistics.median(sample.tpot_s for sample in samples), 5),
        "cpu_s": round(cpu_s - before_s, 2),
        "pss_mib": round(pss_mib),
        "cached_tokens": sum(sample.details.get("cached_tokens") or 0 for sample in samples),
    }


def run_server(server: str, case: Case, options: argparse.Namespace, run: int) -> list[dict[str, Any]]:
    """Start one server, warm it and measure every work."""
    home, model = make_server(server, options.folder), make_model(options.folder, case.model)
    command, settings = command_of(server, home, model, options.cores, case.arrangement)
    settings |= older_cpu(options.folder) if case.older else {}
    url = f"http://127.0.0.1:{PORTS[server]}"
    rows: list[dict[str, Any]] = []
    with started(command, settings, url, options.folder / f"{server}.log") as root:
        served = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        warm = Work(name="warm", items=items_of([drawn(Random(1 << 32), 64)] * 2, 8), concurrency=1)
        asyncio.run(measure(url, served, root, warm))
        for work in works_of(seed=run):
            if work.name in case.goals:
                row = {"server": server, "version": VERSIONS.get(server), "model": case.model, "run": run}
                rows.append(row | asyncio.run(measure(url, served, root, work)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a Markdown table: medians with the least and the most, and ours over a peer's."""
    yield "| model | work | Tidemill, s | peer | its s | ratio | CPU ratio | cached tokens |"
    yield "|---|---|---|---|---|---|---|---|"
    sides: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        sides.setdefault((row["model"], row["work"], row["server"]), []).append(row)
    for (name, work, peer), theirs in sides.items():
        if peer == "tidemill":
            continue
        own = sides[name, work, "tidemill"]
        (their_s, their_spread), (our_s, our_spread) = (_times(side, METRICS[work]) for side in (theirs, own))
        cpu = [statistics.median(row["cpu_s"] for row in side) for side in (own, theirs)]
        cached = [int(statistics.median(row["cached_tokens"] for row in side)) for side in (own, theirs)]
        yield (
            f"| {name} | {work} | {our_spread} | {peer} | {their_spread} | {our_s / their_s:.2f}"
            f" | {cpu[0] / cpu[1]:.2f} | {cached[0]:,}; {cached[1]:,} |"
        )


def merged(kept: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the new rows, and before them those that were kept and whose case was not measured again. The
    servers that took turns belong to a case, so ours stay beside the peers of the same run."""
    again = {_case(row) for row in new}
    return [row for row in kept if _case(row) not in again] + [*new]


def _case(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("cpu", "cores", "arrangement", "servers", "model", "work"))


def _times(rows: Sequence[dict[str, Any]], metric: str) -> tuple[float, str]:
    times = [row[metric] for row in rows]
    median = statistics.median(times)
    return median, f"{shown(median)} ({shown(min(times))} to {shown(max(times))})"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--folder", type=Path, required=True, help="keeps the peers and the models")
    parser.add_argument("--cores", type=int, choices=(1, 2), default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=NAMES, default=["dense", "hybrid"])
    parser.add_argument("--works", nargs="+", choices=list(METRICS), default=list(METRICS))
    parser.add_argument("--peers", nargs="+", choices=list(VERSIONS), default=["vllm", "llama.cpp"])
    parser.add_argument("--only", choices=sorted(PORTS), help="one server alone, without a table")
    parser.add_argument("--arrangement", help="our workers; by default one, with a thread for each core")
    parser.add_argument(
        "--cases", nargs="*", choices=NAMES, help="the rows of cases.py instead, of these models"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    cases = list(cases_of(options))
    for case in cases:  # with all cores
        make_model(options.folder, case.model)
        for server in servers_of(case, options):
            make_server(server, options.folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with this process
    os.sched_setaffinity(0, {1} if options.cores == 1 else {0, 1})
    failed = [case.model for case in cases if not measured(case, options)]
    if failed:
        raise SystemExit(f"without figures: {', '.join(failed)}")


def measured(case: Case, options: argparse.Namespace) -> bool:
    """Measure a case, print and keep its figures. Return whether all servers answered."""
    try:
        rows = [
            row
            for run in range(options.runs)
            for server in servers_of(case, options)
            for row in run_server(server, case, options, run)
        ]
    except SystemExit as error:
        print(error, file=sys.stderr, flush=True)
        return False
    if not options.only:
        print("\n".join(table(rows)), flush=True)
        keep(case, options.cores, rows)
    return True


def cases_of(options: argparse.Namespace) -> Iterable[Case]:
    """Return what to measure."""
    if options.cases is not None:
        return (case for case in CASES if not options.cases or case.model in options.cases)
    arrangement = options.arrangement or f"--mixed 1 --threads {options.cores}"
    goals, peers = dict.fromkeys(options.works), tuple(options.peers)
    return (Case(model=model, peers=peers, goals=goals, arrangement=arrangement) for model in options.models)


def servers_of(case: Case, options: argparse.Namespace) -> Sequence[str]:
    return [options.only] if options.only else (*case.peers, "tidemill")


def keep(case: Case, cores: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows of a case into the results."""
    cpu = cpu_name(KINDS[:1] if case.older else KINDS)
    about = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "cpu": cpu, "cores": cores}
    about |= {"arrangement": case.arrangement, "servers": case.servers}
    kept = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    RESULTS.write_text("".join(f"{json.dumps(row)}\n" for row in merged(kept, [about | row for row in rows])))


if __name__ == "__main__":
    main()
