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
from tidemill.cluster.simulate.cost import SPEED
from tidemill.cluster.simulate.plot import new_figure, plot
from tidemill.cluster.simulate.report import SHARES
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.trace import (
    TraceError,
    TraceRequest,
    copied,
    read_trace,
    reusable_share,
    speed_up,
    spread,
)
from tidemill.cluster.simulate.world import simulate
from tidemill.workers.messages import Speed

AGENTS = Path("agents")
"""In place of a file: a generated trace."""

SESSIONS = 2
"""The sessions of an agent, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTrace:
    """The trace of a file, or of `agents`: copied, sped up and cut to its first `requests`."""

    path: Path
    agents: int
    copies: int
    speed_up: float
    requests: int | None

    def read(self, seed: int) -> list[TraceRequest]:
        """Return the requests, with their jitter. Raises TraceError."""
        rng = Random(seed)  # noqa: S311  jitter
        if self.path == AGENTS:
            requests = agents_trace(self.agents, SESSIONS, rng)
        else:
            requests = spread(copied(read_trace(self.path), self.copies), rng)
        return speed_up(requests, self.speed_up)[: self.requests]


def simulate_trace(trace: SimulatedTrace, setup: Setup, *, as_json: bool, picture: Path | None) -> int:
    """Run the command and return its exit status. Raises TraceError, UnknownPolicy, NoPictures."""
    figure = None if picture is None else new_figure()
    requests = trace.read(setup.seed)
    outcome = simulate(requests, setup)
    figures = outcome.figures()
    figures["reusable_ratio"] = reusable_share(requests)
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=2) + "\n")
    else:
        Console().print(summary(figures, setup.policy))
    if picture is not None:
        plot(outcome, figure, picture)
    return 0


def read_speed(path: Path | None) -> Speed:
    """Read fields of Speed, by default those of a large accelerator. Raises TraceError."""
    if path is None:
        return SPEED
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
