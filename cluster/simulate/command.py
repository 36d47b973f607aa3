"""`tidemill simulate`: simulates a trace and prints a table or JSON, and draws a plot."""

import json
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import Any, cast

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from tidemill.cluster.simulate.agents import agents_trace
from tidemill.cluster.simulate.cost import SPEED, StepCost
from tidemill.cluster.simulate.plot import new_figure, plot
from tidemill.cluster.simulate.report import SHARES
from tidemill.cluster.simulate.setup import NEVER_S, EngineKind, HintKind, Setup, SpreadKind
from tidemill.cluster.simulate.trace import TraceError, copied, read_trace, reusable_share, speed_up, spread
from tidemill.cluster.simulate.world import simulate
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.messages import Speed

AGENTS = Path("agents")
"""In place of a file: a generated trace."""

SESSIONS = 2
"""The sessions of an agent, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """The options of the command. `speed_file` holds a Speed as JSON; None: a large accelerator."""

    trace: Path
    agents: int
    prefill: int
    decode: int
    mixed: int
    eviction: Policy
    hints: HintKind
    policy: str
    routers: int
    edges: int
    spread: SpreadKind
    heartbeat_s: float
    share_s: float | None
    copies: int
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


def simulate_trace(options: SimulateOptions) -> int:
    """Run the command and return its exit status. Raises TraceError, UnknownPolicy, NoPictures."""
    figure = None if options.plot is None else new_figure()
    rng = Random(options.seed)  # noqa: S311  jitter
    if options.trace == AGENTS:
        requests = agents_trace(options.agents, SESSIONS, rng)
    else:
        requests = spread(copied(read_trace(options.trace), options.copies), rng)
    requests = speed_up(requests, options.speed_up)[: options.requests]
    outcome = simulate(requests, _setup(options))
    figures = outcome.figures()
    figures["reusable_ratio"] = reusable_share(requests)
    if options.as_json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        Console().print(summary(figures, options.policy))
    if options.plot is not None:
        plot(outcome, figure, options.plot)
    return 0


def read_speed(path: Path) -> Speed:
    """Read fields of Speed, by default those of a large accelerator. Raises TraceError."""
    try:
        content: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} is not a speed file: {error}") from error
    given = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    names = {field.name for field in fields(Speed)}
    good = {
        name: float(value) for name, value in given.items() if isinstance(value, int | float) and value > 0
    }
    if not good or not set(given) <= names:
        raise TraceError(
            f"{path} is not a speed file: give an object with some of {', '.join(sorted(names))}"
        )
    return replace(SPEED, **good)


def summary(figures: dict[str, Any], policy: str) -> Group:
    """Return the tables that the command prints."""
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


def _setup(options: SimulateOptions) -> Setup:
    speed = SPEED if options.speed_file is None else read_speed(options.speed_file)
    return Setup(
        prefill=options.prefill,
        decode=options.decode,
        mixed=options.mixed,
        eviction=options.eviction,
        hints=options.hints,
        policy=options.policy,
        routers=options.routers,
        edges=options.edges,
        spread=options.spread,
        heartbeat_s=options.heartbeat_s,
        share_s=options.share_s,
        engine=options.engine,
        hybrid=options.hybrid,
        blocks=options.blocks,
        cost=StepCost(speed=replace(speed, fetch_bytes_per_s=options.store_bytes_per_s)),
        ttft_s_max=NEVER_S if options.ttft_s_max is None else options.ttft_s_max,
        grain=options.grain,
        store_bytes=options.store_bytes,
        seed=options.seed,
    )
