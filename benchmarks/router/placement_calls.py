"""Placements per second and core through a served router, from the call of an edge to its answer.

python -m benchmarks.router.placement_calls [--workers 16 1024 10000] [--output benchmarks/results]

The router is a process of its own, and this process is the edge: gRPC on loopback, prompts of 128 pages of
which others have had three quarters. At any time 1, 16 or 64 requests wait for their route. CPU time is that
of each whole process. The router gets no heartbeats meanwhile.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.router.placements import FAMILIES, PAGES, placement_requests, router_of
from benchmarks.rows import write_rows
from tidemill.cluster.messages import PlacementRequest
from tidemill.cluster.router.compiled import load
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.router_failover import always_at

WORKERS = (16, 1024, 10_000)
WAITING = (1, 16, 64)
REQUESTS = 3000
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Round:
    """The microseconds of a placement: CPU of the router, CPU of the edge, wall time; and of one answer."""

    router_us: float
    edge_us: float
    wall_us: float
    answer_us_p50: float


def families_of(workers: int) -> list[tuple[bytes, ...]]:
    rng = Random(workers)
    return [tuple(rng.randbytes(8) for _ in range(PAGES)) for _ in range(FAMILIES)]


def serve_router(workers: int, folder: str, pipe: Connection) -> None:
    """Serve a router until the pipe closes. Answer each message of the pipe with the CPU time so far."""

    async def main() -> None:
        router = router_of(workers, families_of(workers), load(Path(folder)))
        service = RouterService(router)
        pipe.send(await service.start("127.0.0.1"))
        while await asyncio.to_thread(_is_asked, pipe):
            pipe.send(time.process_time())
        await service.stop()

    asyncio.run(main())


def _is_asked(pipe: Connection) -> bool:
    try:
        pipe.recv()
    except EOFError:
        return False
    return True


async def ask(address: str, requests: Sequence[PlacementRequest], waiting: int) -> list[float]:
    """Place all requests, `waiting` of them at a time. Return the seconds of each answer."""
    client, taken_s, left = RouterClient(always_at(address)), list[float](), list(requests)
    await client.place(left[0])  # connects

    async def one_after_another() -> None:
        while left:
            request, began_s = left.pop(), time.perf_counter()
            await client.place(request)
            taken_s.append(time.perf_counter() - began_s)

    await asyncio.gather(*(one_after_another() for _ in range(waiting)))
    await client.close()
    return taken_s


def measure(workers: int, folder: str, counts: Sequence[int], rounds: int) -> dict[int, Round]:
    """Return the best round by CPU time of the router, for each number of waiting requests."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_router, args=(workers, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    address, families, best = ours.recv(), families_of(workers), dict[int, Round]()

    def router_s() -> float:
        ours.send(None)
        return ours.recv()

    for number in range(rounds):
        for waiting in counts:
            requests = placement_requests(families, REQUESTS, Random(f"{workers} {number} {waiting}"))
            began = router_s(), time.process_time(), time.perf_counter()
            taken_s = asyncio.run(ask(address, requests, waiting))
            ended = router_s(), time.process_time(), time.perf_counter()
            each = [1e6 * (end - begin) / len(requests) for begin, end in zip(began, ended, strict=True)]
            found = Round(*each, answer_us_p50=1e6 * float(np.median(taken_s)))
            if waiting not in best or found.router_us < best[waiting].router_us:
                best[waiting] = found
    ours.close()
    process.join()
    return best


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--workers", type=int, nargs="*", default=WORKERS)
    command.add_argument("--waiting", type=int, nargs="*", default=WAITING)
    command.add_argument("--rounds", type=int, default=ROUNDS)
    options = command.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for workers in options.workers:
            for waiting, best in measure(workers, folder, options.waiting, options.rounds).items():
                row = {"workers": workers, "waiting": waiting, "per_s": 1e6 / best.router_us}
                found.append(row | asdict(best))
                print(
                    f"{workers} workers, {waiting} waiting: {1e6 / best.router_us:,.0f} a second and core; "
                    f"router {best.router_us:.0f}, edge {best.edge_us:.0f}, wall {best.wall_us:.0f}, "
                    f"answer {best.answer_us_p50:.0f} us",
                    flush=True,
                )
    write_rows("placement_calls", "python -m benchmarks.router.placement_calls", found)


if __name__ == "__main__":
    main()
