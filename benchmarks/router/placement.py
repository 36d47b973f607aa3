"""Placement policies on public traces: hit ratio and time to first token, by runs of the simulation.

The settings are those of published studies: 8 prefill and 8 decode workers, 2,048 blocks of 512 tokens for
each prefill worker, and no store. Prompts are computed one after the other at 16.50142 + 0.01518344 n +
4.209989e-7 n^2 ms for each chunk of up to 8,192 tokens. A hybrid has 256 checkpoints in addition, at the end
of a prompt and where prompts diverge. Arrivals are spread within the ticks of the trace's clock.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.rows import VIRTUAL, read_rows, write_rows
from tidemill.cluster.simulate.cost import SPEED, StepCost
from tidemill.cluster.simulate.policies import OURS, POLICIES
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.trace import TraceRequest, read_trace, speed_up, spread
from tidemill.cluster.simulate.world import simulate

LOADS = {"synthetic": (8.0, 10.0, 11.5), "conversation": (4.0, 9.5, 10.5)}
NAMES = (OURS, *POLICIES)


def main() -> None:
    options = _options()
    found: dict[str, Any] = {row.pop("case"): row for row in read_rows("placement")}
    for key, trace, load, setup in _runs(options):
        if key in found and setup.policy not in options.again:
            continue
        requests = speed_up(_requests(options.traces / f"{trace}_trace.jsonl", options.seed), load)
        found[key] = _run(requests, setup)
        rows = ({"case": case} | found[case] for case in sorted(found))
        command = "python -m benchmarks.router.placement --traces FOLDER"
        write_rows("placement", command, rows, cpu=VIRTUAL)
        print(
            key, f"{found[key]['hit']:.3f} {found[key]['mean_s']:.3f} {found[key]['p99_s']:.2f}", flush=True
        )
    print(table(found, seed=options.seed, store=options.store))


def table(found: dict[str, Any], *, seed: int, store: bool) -> str:
    """Return Markdown with a line for each policy and a column for each load."""
    lines: list[str] = []
    for rules in ("attention", "hybrid"):
        loads = [(trace, load) for trace, each in LOADS.items() for load in each]
        lines += ["", f"| {rules} | " + " | ".join(f"{trace} {load:g}x" for trace, load in loads) + " |"]
        lines.append("|---" * (len(loads) + 1) + "|")
        for name in NAMES:
            cells = [found.get(_key(trace, load, rules, name, seed, store=store)) for trace, load in loads]
            if any(cells):
                lines.append(f"| {name} | " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _runs(options: argparse.Namespace) -> Iterator[tuple[str, str, float, Setup]]:
    speed = SPEED if options.store else replace(SPEED, fetch_bytes_per_s=0.0)
    for trace, loads in LOADS.items():
        for rules in options.rules:
            for load in loads:
                for name in options.policies or NAMES:
                    setup = Setup(
                        policy=name,
                        engine="model",
                        hybrid=rules == "hybrid",
                        cost=StepCost(speed=speed, by_chunk=True),
                        seed=options.seed,
                    )
                    yield (
                        _key(trace, load, rules, name, options.seed, store=options.store),
                        trace,
                        load,
                        setup,
                    )


def _run(requests: list[TraceRequest], setup: Setup) -> dict[str, float]:
    figures = simulate(requests, setup).figures()
    return {
        "hit": figures["hit_ratio"],
        "mean_s": figures["ttft_ms"]["mean"] / 1000,
        "p99_s": figures["ttft_ms"]["p99"] / 1000,
        "imbalance": figures["imbalance"]["prefill"],
        "utilisation": figures["utilisation"]["prefill"],
        "alone": figures["without_prefill_worker"],
    }


def _requests(path: Path, seed: int) -> list[TraceRequest]:
    return spread(read_trace(path), Random(seed))


def _key(trace: str, load: float, rules: str, name: str, seed: int, *, store: bool) -> str:
    return f"{trace} {load:g}x, {rules}, {'store, ' if store else ''}seed {seed}: {name}"


def _cell(figures: dict[str, float] | None) -> str:
    if figures is None:
        return ""
    return f"{figures['hit']:.3f} {figures['mean_s']:.3f} {figures['p99_s']:.2f}"


def _options() -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__)
    add = command.add_argument
    add("--traces", type=Path, required=True, help="folder with conversation_ and synthetic_trace.jsonl")
    add("--policies", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    add("--rules", nargs="*", default=["attention", "hybrid"])
    add("--again", nargs="*", default=[], metavar="NAME", help="repeat these although they have figures")
    add("--store", action="store_true", help="with a store at 10 GB/s that all workers share")
    add("--seed", type=int, default=1)
    return command.parse_args()


if __name__ == "__main__":
    main()
