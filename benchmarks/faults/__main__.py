"""Run the named parts, or all, and add their figures to results/faults.jsonl.

python -m benchmarks.faults kills ranks --rounds 5

| part | measures |
|---|---|
| kills, ranks | R1, R2: kill -9 and SIGSTOP of every kind of process while streams run |
| routers | the same for one of two routers |
| last-decode | kill -9 of the only decode worker, and of one of two |
| idle-rank | the same for a rank of an idle group |
| outage | R3: the store crashes or stops while requests run one after the other |
| flips | R4: flipped bits in stored objects |
| soak | R5: full pools and clients that disconnect |
| leaving | R6: SIGTERM to workers, and a rolling restart |
| disconnect | R7: the time until a disconnected client's memory is free |
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.faults import disconnect, flips, kills, leaving, outage, soak
from benchmarks.rows import read_rows, write_rows

Part = Callable[[argparse.Namespace], dict[str, Any]]

PARTS: dict[str, Part] = {
    "kills": lambda options: kills.kills(options.rounds, options.victims.split(",")),
    "ranks": lambda options: kills.ranks(options.rounds),
    "routers": lambda options: kills.routers(options.rounds),
    "last-decode": lambda options: kills.last_decode(options.rounds),
    "idle-rank": lambda options: kills.idle_rank(options.rounds),
    "outage": lambda options: outage.outages(options.rounds),
    "flips": lambda options: flips.flips(options.flips),
    "soak": lambda options: soak.soak(options.minutes),
    "leaving": lambda options: leaving.leaving(options.rounds),
    "disconnect": lambda options: disconnect.disconnects(10 * options.rounds),
}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5, help="of each fault (%(default)s)")
    parser.add_argument("--victims", default=",".join(kills.VICTIMS), help="of `kills` (%(default)s)")
    parser.add_argument("--flips", type=int, default=1000, help="of each store (%(default)s)")
    parser.add_argument("--minutes", type=float, default=30, help="of the soak (%(default)g)")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    for name in options.parts or PARTS:
        begin_s, load = time.monotonic(), os.getloadavg()[0]
        figures = PARTS[name](options)
        machine = {"cores": os.cpu_count(), "load": [round(load, 1), round(os.getloadavg()[0], 1)]}
        row = {"machine": machine, "took_s": round(time.monotonic() - begin_s), **figures}
        print(name, json.dumps(row, indent=2), flush=True)
        found = {kept.pop("part"): kept for kept in read_rows("faults")}
        found[name] = found.get(name, {}) | row
        rows = ({"part": part} | each for part, each in found.items())
        write_rows("faults", "python -m benchmarks.faults", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
