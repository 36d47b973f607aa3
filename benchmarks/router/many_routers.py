"""Placement by several routers, each with a view that is late: against one that knows everything immediately.

python -m benchmarks.router.many_routers --trace FILE [--workers 16 1000 10000] [--requests N]

Half of the workers prefill and half decode. The trace is copied until the load per worker is that of the
study: 9.5 times its rate for 16 workers. Every router gets each worker's heartbeat at most 0.25 s after a
change, and an omniscient one immediately. There is an edge for each router. Shared bookings reach the other
routers 10 ms after a placement.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.rows import VIRTUAL, read_rows, write_rows
from tidemill.cluster.router.compiled import load
from tidemill.cluster.simulate.cost import SPEED, StepCost
from tidemill.cluster.simulate.heartbeats import LOOK_S
from tidemill.cluster.simulate.setup import Setup, SpreadKind
from tidemill.cluster.simulate.trace import copied, read_trace, speed_up, spread
from tidemill.cluster.simulate.world import simulate

LOAD = 9.5
STUDIED = 16  # workers
WAYS: tuple[tuple[str, int, SpreadKind, float, float | None], ...] = (
    ("omniscient", 1, "edge", 0.0, None),
    ("1 router", 1, "edge", LOOK_S, None),
    ("2 routers", 2, "edge", LOOK_S, None),
    ("8 routers", 8, "edge", LOOK_S, None),
    ("8 routers, by family", 8, "family", LOOK_S, None),
    ("8 routers, shared bookings", 8, "edge", LOOK_S, 0.01),
    ("8 routers, by family, shared bookings", 8, "family", LOOK_S, 0.01),
)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__)
    command.add_argument("--trace", type=Path, required=True)
    command.add_argument("--workers", type=int, nargs="*", default=[16, 1000, 10_000])
    command.add_argument("--requests", type=int, default=12_000)
    command.add_argument("--ways", nargs="*", help="of the rows of the table, by name")
    options = command.parse_args()
    found: dict[str, Any] = {row.pop("case"): row for row in read_rows("many_routers")}
    with tempfile.TemporaryDirectory() as folder:
        compiled = load(Path(folder))
        for workers in options.workers:
            copies = -(-workers // STUDIED)
            requests = read_trace(options.trace)[: -(-options.requests // copies)]
            factor = LOAD * workers / (STUDIED * copies)
            arrivals = speed_up(spread(copied(requests, copies), Random(1)), factor)
            for name, routers, by, heartbeat_s, share_s in WAYS:
                if options.ways and name not in options.ways:
                    continue
                speed = replace(SPEED, fetch_bytes_per_s=0.0)
                setup = Setup(
                    prefill=workers // 2,
                    decode=workers // 2,
                    engine="model",
                    cost=StepCost(speed=speed, by_chunk=True),
                    routers=routers,
                    edges=routers,
                    spread=by,
                    heartbeat_s=heartbeat_s,
                    share_s=share_s,
                    compiled=compiled,
                )
                figures = simulate(arrivals, setup).figures()
                found[f"{workers} workers, {name}"] = row = {
                    "hit": figures["hit_ratio"],
                    "mean_s": figures["ttft_ms"]["mean"] / 1000,
                    "p99_s": figures["ttft_ms"]["p99"] / 1000,
                }
                rows = ({"case": case} | each for case, each in found.items())
                command = "python -m benchmarks.router.many_routers --trace FILE"
                write_rows("many_routers", command, rows, cpu=VIRTUAL)
                print(f"| {workers} | {name} |", *(f"{value:.3f} |" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
