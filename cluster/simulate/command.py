"""`tidemill simulate`: from what was asked for to a table, JSON and a picture. Knows no options."""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tidemill.cluster.simulate.cost import SPEED, StepCost
from tidemill.cluster.simulate.plot import blank, plot
from tidemill.cluster.simulate.report import SHARES
from tidemill.cluster.simulate.setup import NEVER_S, EngineKind, Setup
from tidemill.cluster.simulate.trace import TraceError, read_trace, reusable_tokens, sped_up, spread
from tidemill.cluster.simulate.world import simulate
from tidemill.workers.messages import Speed


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What the command line says. `speed_file` holds a Speed as JSON; None: a large accelerator's."""

    trace: Path
    prefill: int
    decode: int
    policy: str
    speed_up: float
    requests: int | None
    hybrid: bool
    engine: EngineKind
    blocks: int
    store_bytes: int
    store_bytes_per_s: float
    speed_file: Path | None
    ttft_s_max: float | None
    grain: int
    seed: int
    as_json: bool
    plot: Path | None


def simulate_trace(asked: SimulateOptions) -> int:
    """Raises TraceError, UnknownPolicy, NoPictures."""
    figure = None if asked.plot is None else blank()
    items = spread(read_trace(asked.trace), Random(asked.seed))  # noqa: S311 - jitter
    items = sped_up(items, asked.speed_up)[: asked.requests]
    outcome = simulate(items, _setup(asked))
    figures = outcome.figures()
    figures["reusable_ratio"] = reusable_tokens(items)
    if asked.as_json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        Console().print(drawn(figures, asked.policy))
    if asked.plot is not None:
        plot(outcome, figure, asked.plot)
    return 0


def read_speed(path: Path) -> Speed:
    """Of a file with the fields of Speed; those that it lacks, or that are 0, are a large accelerator's.
    Raises TraceError."""
    try:
        found: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} is no speed: {error}") from error
    given = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
    names = {field.name for field in fields(Speed)}
    good = {
        name: float(value) for name, value in given.items() if isinstance(value, int | float) and value > 0
    }
    if not good or not set(given) <= names:
        raise TraceError(f"{path} is no speed: give an object with some of {', '.join(sorted(names))}")
    return replace(SPEED, **good)


def drawn(figures: dict[str, Any], policy: str) -> Group:
    """For people."""
    title = Text(
        f"{figures['requests']:,} requests in {figures['makespan_s']:,.0f} s, placed by {policy}: "
        f"{figures['refused']:,} refused, {figures['failed']:,} failed"
    )
    times = Table("", "mean", *[f"p{share}" for share in SHARES], box=None)
    for column in times.columns[1:]:
        column.justify = "right"
    for name, key in (("time to first token, ms", "ttft_ms"), ("between tokens, ms", "itl_ms")):
        times.add_row(name, *[f"{value:,.1f}" for value in figures[key].values()])
    shares = Table("", "", box=None, show_header=False)
    shares.add_row(
        "prompt tokens not computed again",
        f"{figures['hit_ratio']:.1%} (fetched: {figures['fetched_ratio']:.1%}; "
        f"at best: {figures['reusable_ratio']:.1%})",
    )
    for role, busy in figures["utilisation"].items():
        shares.add_row(
            f"{role} workers", f"busy {busy:.1%}, the busiest {figures['imbalance'][role]:.2f} times the mean"
        )
    shares.add_row("answered without a prefill worker", f"{figures['without_prefill_worker']:,}")
    shares.add_row("placed again", f"{figures['placed_again']:,}")
    return Group(title, times, shares)


def _setup(asked: SimulateOptions) -> Setup:
    speed = SPEED if asked.speed_file is None else read_speed(asked.speed_file)
    return Setup(
        prefill=asked.prefill,
        decode=asked.decode,
        policy=asked.policy,
        engine=asked.engine,
        hybrid=asked.hybrid,
        blocks=asked.blocks,
        cost=StepCost(speed=replace(speed, fetch_bytes_per_s=asked.store_bytes_per_s)),
        ttft_s_max=NEVER_S if asked.ttft_s_max is None else asked.ttft_s_max,
        grain=asked.grain,
        store_bytes=asked.store_bytes,
        seed=asked.seed,
    )
