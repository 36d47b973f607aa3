"""R3: what requests feel while the store is dead or stopped: the first of them, and all that follow."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import httpx
import psutil
from tests.support.e2e.faults import MASTER, OWNER, process_of
from tests.support.e2e.server import Server

from benchmarks.faults.scene import serving, spread
from benchmarks.store.recovery import GIVE_UP_S, Answer, ask, ask_for

PHASE_S = 8.0
AWAY_S = 12.0
FAULTS: dict[str, tuple[str, Callable[[psutil.Process], None]]] = {
    "kill -9 master": (MASTER, psutil.Process.kill),
    "kill -9 owner": (OWNER, psutil.Process.kill),
    "SIGSTOP master": (MASTER, psutil.Process.suspend),
    "SIGSTOP owner": (OWNER, psutil.Process.suspend),
}


def outages(rounds: int) -> dict[str, Any]:
    """Run requests one after another, each with a new prompt, while the store fails. A killed master has
    forgotten all keys and a killed owner has lost all pages; stopped processes resume after AWAY_S."""
    rng = Random(0)
    options = ("--prefill", "1", "--decode", "1", "--store", "mooncake?size=512MiB")
    phases: dict[str, list[list[Answer]]] = {name: [[], [], []] for name in FAULTS}
    firsts: dict[str, list[float]] = {name: [] for name in FAULTS}
    with tempfile.TemporaryDirectory() as folder, serving(options, Path(folder, "log")) as server:
        for _ in range(rounds):
            for name, (part, break_it) in FAULTS.items():
                found = _outage(server, process_of(server, part), break_it, rng)
                firsts[name].append(max(answer.took_s for answer in found[1]))
                for answers, some in zip(phases[name], found, strict=True):
                    answers.extend(some)
    return {name: _figures(phases[name], firsts[name]) for name in FAULTS}


def _outage(
    server: Server, process: psutil.Process, break_it: Callable[[psutil.Process], None], rng: Random
) -> list[list[Answer]]:
    """Return the answers before the outage, during it, and after the store is used again."""
    with httpx.Client(base_url=server.url, timeout=GIVE_UP_S) as client:
        _until_used(client, rng)
        before = ask_for(client, rng, PHASE_S)
        break_it(process)
        try:
            away = ask_for(client, rng, AWAY_S)
        finally:
            if process.is_running():
                process.resume()
        _until_used(client, rng)
        return [before, away, ask_for(client, rng, PHASE_S)]


def _until_used(client: httpx.Client, rng: Random) -> None:
    give_up_s = time.monotonic() + GIVE_UP_S
    while not all(ask(client, rng).fetched for _ in range(5)):
        assert time.monotonic() < give_up_s, "the store was not used again"


def _figures(phases: list[list[Answer]], worst_s: list[float]) -> dict[str, Any]:
    before, away, since = ([1000 * answer.took_s for answer in phase] for phase in phases)
    without = [1000 * answer.took_s for answer in phases[1] if not answer.fetched]
    return {
        "requests": {"before": len(before), "away": len(away), "since": len(since)},
        "before_ms": spread(sorted(before)),
        "away_ms": spread(sorted(away)),
        "since_ms": spread(sorted(since)),
        "added_once_ms": round(1000 * median(worst_s) - median(before), 1),
        "added_then_ms": round(median(without) - median(before), 1) if without else None,
    }
