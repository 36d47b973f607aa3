"""Placements per second and core in the process of a router: compiled beside the Python definition, in turns.

python -m benchmarks.router.placements

A frame has 16 requests, prompts of 128 pages of which others have had three quarters. Everything from the
bytes of a frame to the bytes of its answer counts, as CPU time of the thread; gRPC itself does not. The parts
are timed one by one in a second pass.
"""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.support.cluster.heartbeats import heartbeat, placement_request

from benchmarks.rows import write_rows
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.compiled import CompiledPlacement, load
from tidemill.cluster.router.fleet_view import Fleet
from tidemill.cluster.router.placement import bookings, place
from tidemill.cluster.router.router import Router
from tidemill.cluster.router.server import RouterService
from tidemill.cluster.rpc.placement_codec import (
    decode_placement_requests,
    encode_placement_requests,
    encode_placements,
)
from tidemill.workers.messages import Heartbeat, Role, Speed

WORKERS = (16, 1024, 10_000)
PAGES = 128  # of a prompt
FAMILIES = 64  # of prompts with a common prefix
HOLDERS = 4  # workers that hold part of the prompt of a family
PAGE_TOKENS = 64
FRAME = 16
FRAMES = 30
ROUNDS = 5


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


def router_of(
    num_workers: int, families: list[tuple[bytes, ...]], compiled: CompiledPlacement | None
) -> Router:
    router, rng = Router(time.monotonic, broker=False, compiled=compiled), Random(1)
    held: list[list[bytes]] = [[] for _ in range(num_workers)]
    for family in families:
        for worker in rng.sample(range(num_workers), HOLDERS):
            held[worker] += family[: rng.randrange(PAGES // 2, PAGES)]
    for index, keys in enumerate(held):
        router.heartbeat(report(index, 0, rng, tuple(dict.fromkeys(keys))))
    return router


def whole(service: RouterService, frames: list[bytes]) -> float:
    """Return the microseconds of one placement."""
    began_s = time.thread_time()
    for frame in frames:
        encode_placements(map(service.place_now, decode_placement_requests(frame)))
    return 1e6 * (time.thread_time() - began_s) / (len(frames) * FRAME)


def parts(router: Router, frames: list[bytes], compiled: CompiledPlacement | None) -> dict[str, float]:
    """Return the microseconds of each part of one placement."""
    fleet: Fleet = router._fleet  # noqa: SLF001 - timed from inside
    shedder = router._load_shedder  # noqa: SLF001
    spent: dict[str, float] = {}
    at_s = time.thread_time()

    def end(name: str) -> None:
        nonlocal at_s
        now_s = time.thread_time()
        spent[name] = spent.get(name, 0.0) + (now_s - at_s) * 1e6 / (len(frames) * FRAME)
        at_s = time.thread_time()

    for frame in frames:
        requests = decode_placement_requests(frame)
        end("decode")
        routes: list[Route] = []
        for request in requests:
            now_s = time.monotonic()
            fleet.chain(request.keys)
            end("keys")
            if compiled is None:
                fleet.depths(request.keys)
                end("look up")
                route = place(fleet, request, now_s)
                assert route is not None
                end("score and pick")
                booked = bookings(fleet, request, route, now_s)
                end("bookings")
            else:
                placed = compiled.place(fleet, request, now_s)
                assert placed is not None
                route, booked = placed
                end("look up, score, pick, bookings")
            routes.append(shedder.admit(request, route, fleet.total_queued_tokens, booked, now_s))
            end("admit")
            for event in booked:
                fleet.apply(event)
            end("book")
        encode_placements(routes)
        end("encode")
    return spent


def main() -> None:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        ways = {"definition": None, "compiled": load(Path(folder))}
        for workers in WORKERS:
            rng = Random(workers)
            families = [tuple(rng.randbytes(8) for _ in range(PAGES)) for _ in range(FAMILIES)]
            routers = {name: router_of(workers, families, compiled) for name, compiled in ways.items()}
            best = dict.fromkeys(ways, float("inf"))
            frames: list[bytes] = []
            for _ in range(ROUNDS):
                requests = placement_requests(families, FRAME * FRAMES, rng)
                frames = [
                    encode_placement_requests(requests[start : start + FRAME])
                    for start in range(0, len(requests), FRAME)
                ]
                for name, router in routers.items():
                    best[name] = min(best[name], _run(router, frames))
            for name, router in routers.items():
                spent = parts(router, frames, ways[name])
                row = {"workers": workers, "way": name, "per_s": 1e6 / best[name], "us": best[name]}
                found.append(row | spent)
                print(
                    f"{workers} workers, {name}: {best[name]:.0f} us, {1e6 / best[name]:,.0f} a second;",
                    ", ".join(f"{part} {us:.1f}" for part, us in spent.items()),
                )
    write_rows("placements", "python -m benchmarks.router.placements", found)


def _run(router: Router, frames: list[bytes]) -> float:
    async def run() -> float:
        return whole(RouterService(router), frames)

    return asyncio.run(run())


if __name__ == "__main__":
    main()
