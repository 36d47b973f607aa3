"""The router: decisions and heartbeats per second, the time of a decision, and the memory of its index.

python -m benchmarks.router.router [--quick] [--output benchmarks/results]
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import numpy as np
from rich.console import Console
from rich.table import Table
from tests.support.cluster.heartbeats import heartbeat, placement_request

from tidemill.cluster.messages import PlacementRequest
from tidemill.cluster.router.compiled import CompiledPrefixes, load
from tidemill.cluster.router.fleet_view import Fleet, HeartbeatArrived
from tidemill.cluster.router.placement import bookings, place
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.workers.messages import Heartbeat, Role, Speed

RESULTS = Path(__file__).parents[1] / "results"
WORKERS = (16, 256, 1024)
PAGES = 128  # of a prompt
FAMILIES = 64  # of prompts with a common prefix
HOLDERS = 4  # workers that hold part of the prompt of a family
ANNOUNCED_KEYS = 1000  # by a heartbeat
INDEX_PAGES = 1_000_000
INDEX_WORKERS = 64
PAGE_TOKENS = 64
DECISIONS_PER_S = 1000  # by the clock of the router


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates on one core. A decision is a placement with its bookings, in microseconds of CPU time.

    The answer times are microseconds that an edge waits: one request at a time, over gRPC on loopback, in one
    process.
    """

    workers: int
    decisions_per_s: float
    decision_us_p50: float
    decision_us_p99: float
    answer_us_p50: float
    answer_us_p99: float
    heartbeats_per_s: float
    announcing_heartbeats_per_s: float  # each with `ANNOUNCED_KEYS` new keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The bytes of the index of the router per million pages that workers hold."""

    pages: int
    bytes_per_million: float  # each page held by one worker
    shared_bytes_per_million: float  # each page held by four workers, and counted four times
    decision_us_p50: float  # with this many pages in the index


def report(index: int, sequence: int, rng: Random, keys: tuple[bytes, ...] = ()) -> Heartbeat:
    """Return a heartbeat with random load and speed."""
    role: Role = "decode" if index % 2 else "prefill"
    return heartbeat(
        f"{role}-{index}",
        role,
        keys,
        sequence=sequence,
        page_tokens=PAGE_TOKENS,
        page_bytes=3 << 19,
        state_bytes=77_000_000,
        queued_s=rng.expovariate(2.0),
        running_rows=rng.randrange(60),
        budget_bytes=80 << 30,
        speed=Speed(
            step_s=0.0165 * rng.uniform(0.9, 1.1),
            token_s=1.5e-5 * rng.uniform(0.9, 1.1),
            pair_s=8e-10,
            row_s=1e-4,
            fetch_bytes_per_s=1e10 * rng.uniform(0.5, 1.5),
        ),
    )


def fleet_of(num_workers: int, families: Sequence[tuple[bytes, ...]], rng: Random) -> Fleet:
    fleet = Fleet()
    held: list[list[bytes]] = [[] for _ in range(num_workers)]
    for family in families:
        for worker in rng.sample(range(num_workers), min(HOLDERS, num_workers)):
            held[worker] += family[: rng.randrange(PAGES // 2, PAGES)]
    for index, keys in enumerate(held):
        fleet.apply(HeartbeatArrived(report(index, 0, rng, tuple(dict.fromkeys(keys))), 0.0))
    return fleet


def placement_requests(
    families: Sequence[tuple[bytes, ...]], count: int, rng: Random
) -> list[PlacementRequest]:
    """Return requests that take three quarters of their prompts from a family."""
    requests: list[PlacementRequest] = []
    for number in range(count):
        keys = rng.choice(families)[: 3 * PAGES // 4] + tuple(rng.randbytes(8) for _ in range(PAGES // 4))
        requests.append(
            placement_request(PAGES * PAGE_TOKENS + 5, request_id=str(number), keys=keys, max_new_tokens=300)
        )
    return requests


def measure(num_workers: int, count: int, rng: Random) -> Rates:
    families = [tuple(rng.randbytes(8) for _ in range(PAGES)) for _ in range(FAMILIES)]
    fleet = fleet_of(num_workers, families, rng)
    decisions_us = decide(fleet, placement_requests(families, count, rng))
    answers_us = asyncio.run(answers(num_workers, placement_requests(families, count // 4, rng), rng))
    reports = [report(index % num_workers, 1 + index // num_workers, rng) for index in range(4 * count)]
    later_s = 1.0 + count / DECISIONS_PER_S
    quiet_s = timed(lambda: [fleet.apply(HeartbeatArrived(quiet, later_s)) for quiet in reports])
    announcing = [
        report(index % num_workers, 10**6, rng, tuple(rng.randbytes(8) for _ in range(ANNOUNCED_KEYS)))
        for index in range(max(8, count // 4))
    ]
    announcing_s = timed(lambda: [fleet.apply(HeartbeatArrived(full, later_s)) for full in announcing])
    return Rates(
        workers=num_workers,
        decisions_per_s=1e6 * len(decisions_us) / sum(decisions_us),
        decision_us_p50=float(np.percentile(decisions_us, 50)),
        decision_us_p99=float(np.percentile(decisions_us, 99)),
        answer_us_p50=float(np.percentile(answers_us, 50)),
        answer_us_p99=float(np.percentile(answers_us, 99)),
        heartbeats_per_s=len(reports) / quiet_s,
        announcing_heartbeats_per_s=len(announcing) / announcing_s,
    )


def decide(fleet: Fleet, requests: Sequence[PlacementRequest]) -> list[float]:
    """Return the microseconds of CPU of each decision."""
    taken_us: list[float] = []
    for number, request in enumerate(requests):
        began = time.process_time_ns()
        now_s = number / DECISIONS_PER_S
        route = place(fleet, request, now_s)
        assert route is not None
        for event in bookings(fleet, request, route, now_s):
            fleet.apply(event)
        taken_us.append((time.process_time_ns() - began) / 1e3)
    return taken_us


async def answers(num_workers: int, requests: Sequence[PlacementRequest], rng: Random) -> list[float]:
    """Return the microseconds until an edge has each route."""
    router = Router(asyncio.get_running_loop().time)
    for index in range(num_workers):
        router.heartbeat(report(index, 0, rng))
    service = RouterService(router)
    address = await service.start("127.0.0.1")

    async def find() -> str:
        return address

    client = RouterClient(find)
    taken_us: list[float] = []
    for request in requests:
        began = time.perf_counter_ns()
        await client.place(request)
        taken_us.append((time.perf_counter_ns() - began) / 1e3)
    await client.close()
    await service.stop()
    return taken_us


def measure_index(pages: int, rng: Random) -> Index:
    random = np.random.default_rng(rng.getrandbits(32))
    sizes: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        compiled = load(Path(folder))
    for holders in (1, HOLDERS):
        batches = [
            random.integers(1, 1 << 63, ANNOUNCED_KEYS, dtype=np.uint64)
            for _ in range(pages // ANNOUNCED_KEYS // holders)
        ]
        table = CompiledPrefixes(compiled)
        for number, batch in enumerate(batches):
            for holder in range(holders):
                table.add((number + holder) % INDEX_WORKERS, batch, pages)
        sizes.append(table.num_bytes / pages * 1e6)
    families = [tuple(rng.randbytes(8) for _ in range(PAGES)) for _ in range(FAMILIES)]
    fleet = fleet_of(INDEX_WORKERS, families, rng)
    for number in range(pages // ANNOUNCED_KEYS):
        keys = tuple(rng.randbytes(8) for _ in range(ANNOUNCED_KEYS))
        fleet.apply(HeartbeatArrived(report(number % INDEX_WORKERS, 1 + number, rng, keys), 0.0))
    return Index(
        pages=pages,
        bytes_per_million=sizes[0],
        shared_bytes_per_million=sizes[1],
        decision_us_p50=float(np.percentile(decide(fleet, placement_requests(families, 200, rng)), 50)),
    )


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of CPU of this work."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def show(console: Console, rates: Sequence[Rates], index: Index) -> None:
    table = Table(
        *("workers", "decisions/s", "us p50", "us p99", "answered, us p50", "us p99", "heartbeats/s"),
        f"with {ANNOUNCED_KEYS} keys/s",
    )
    for rate in rates:
        figures = (
            rate.decisions_per_s,
            rate.decision_us_p50,
            rate.decision_us_p99,
            rate.answer_us_p50,
            rate.answer_us_p99,
            rate.heartbeats_per_s,
            rate.announcing_heartbeats_per_s,
        )
        table.add_row(str(rate.workers), *(f"{figure:,.0f}" for figure in figures))
    console.print(table)
    console.print(
        f"index of {index.pages:,} pages: {index.bytes_per_million / 1e6:.0f} MB per million cached pages, "
        f"{index.shared_bytes_per_million / 1e6:.0f} MB when {HOLDERS} workers hold each; "
        f"{index.decision_us_p50:.0f} us per decision"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router.router", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder for router.json")
    options = parser.parse_args(arguments)
    scale = 10 if options.quick else 1
    rates = [measure(workers, 2000 // scale, Random(workers)) for workers in WORKERS]
    index = measure_index(INDEX_PAGES // scale, Random(1))
    show(Console(), rates, index)
    options.output.mkdir(parents=True, exist_ok=True)
    figures = {"rates": [asdict(rate) for rate in rates], "index": asdict(index)}
    (options.output / "router.json").write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
