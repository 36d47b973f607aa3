"""Latencies when processes of the store are killed: before, meanwhile, and after recovery.

python -m benchmarks.store.recovery

A server with its own Mooncake gets one request after another, each with a new prompt. Pages go from
the prefill to the decode worker through the store, or are recomputed there when the store is down.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import httpx
from rich.console import Console
from rich.table import Table
from tests.support.e2e.server import Server

PARTS = {"master": "mooncake_master", "owner": "tidemill.kvstore.stores.mooncake_memory_owner"}
PROMPT_TOKENS = 512
PHASE_S = 8.0
GIVE_UP_S = 120.0


class Answer(NamedTuple):
    """The end of a request on one clock, and the prompt tokens that came from the store."""

    ended_s: float
    took_s: float
    fetched: int


def ask(client: httpx.Client, rng: Random) -> Answer:
    """Send a request. Raises if it is refused: no request may be lost."""
    body = {
        "model": "keeper",
        "prompt": [rng.randrange(5, 890) for _ in range(PROMPT_TOKENS)],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    start_s = time.perf_counter()
    usage = client.post("/v1/completions", json=body).raise_for_status().json()["usage"]
    end_s = time.perf_counter()
    return Answer(end_s, end_s - start_s, usage["prompt_tokens_details"]["fetched_tokens"])


def ask_for(client: httpx.Client, rng: Random, for_s: float) -> list[Answer]:
    until_s = time.perf_counter() + for_s
    answers: list[Answer] = []
    while time.perf_counter() < until_s:
        answers.append(ask(client, rng))
    return answers


@dataclass(frozen=True, slots=True)
class Result:
    """Latencies of sequential requests, in milliseconds."""

    part: str
    before: list[float]
    away: list[float]
    since: list[float]
    used_again_s: float  # since the kill

    def row(self) -> tuple[str, ...]:
        before, away, since = (median(phase) for phase in (self.before, self.away, self.since))
        return (
            self.part,
            str(len(self.away)),
            f"{self.used_again_s:.1f}",
            *(f"{figure:.0f}" for figure in (before, away, max(self.away), since)),
            f"{away - before:+.0f}",
        )


def kill(server: Server, part: str, rng: Random) -> Result:
    """Kill a process with SIGKILL during requests, which continue until the store is used again."""
    with httpx.Client(base_url=server.url, timeout=GIVE_UP_S) as client:
        ask_for(client, rng, PHASE_S)  # warm-up
        before = ask_for(client, rng, PHASE_S)
        assert any(answer.fetched for answer in before), "the store is not used"
        [process] = (process for process in server.processes() if PARTS[part] in " ".join(process.cmdline()))
        process.kill()
        killed_s = time.perf_counter()
        away = [ask(client, rng)]
        while not away[-1].fetched or all(answer.fetched for answer in away):
            assert time.perf_counter() - killed_s < GIVE_UP_S, "the store was not used again"
            away.append(ask(client, rng))
        since = ask_for(client, rng, PHASE_S)
    return Result(
        part,
        *([1e3 * answer.took_s for answer in phase] for phase in (before, away[:-1], since)),
        used_again_s=away[-1].ended_s - killed_s,
    )


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title=f"kill -9 under one request after another of {PROMPT_TOKENS} tokens", box=None)
    names = ("killed", "requests meanwhile", "used again s", "ms before", "ms meanwhile", "worst", "ms since")
    for name in (*names, "added ms"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(*result.row())
    return table


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.store.recovery")
    parser.add_argument("--rounds", type=int, default=2, help="kills of each process")
    options = parser.parse_args(arguments)
    rng = Random(0)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            ["keeper", "--port", "0", "--prefill", "1", "--decode", "1", "--store", "mooncake?size=1GiB"],
            Path(folder, "log"),
        )
        try:
            results = [kill(server, part, rng) for _ in range(options.rounds) for part in PARTS]
        finally:
            server.kill_everything()
    Console(width=140).print(table_of(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
