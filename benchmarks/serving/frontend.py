"""Measure the HTTP edge, and a flood of requests to it: a real cluster whose engines have no model.

python -m benchmarks.serving.frontend --seconds 60

Prints answers per second of short requests, streamed tokens per second, and CPU seconds of each process for a
thousand of these. Then it loads a fleet of known capacity at 1.5 and 10 times its rate, and prints answers in
time, refusals, memory. The load comes from the same machine, so CPU time is more meaningful than tokens per
second.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.e2e.load import Client, Outcome, PacedServer, at_rate, in_turns, paced_server

from tidemill.cluster.bench.report import percentile

RESULT = Path(__file__).parents[1] / "results" / "frontend.json"
WORKERS = {"mixed-0": "mixed", "mixed-1": "mixed"}
UNPACED_TOKENS_PER_S = 10**8
ROWS_MAX = 256
PROMPT_TOKENS = 64
PACED_TOKENS_PER_S = 320
CAPACITY = len(WORKERS) * PACED_TOKENS_PER_S / PROMPT_TOKENS
DEADLINE = {"x-slo-ttft-ms": "3000"}
RAMP_S = 3.0
"""The time until the queue is as long as the deadline allows."""


def body(number: int, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    """Return a request with a unique prompt."""
    tokens = [100 + number % 700, 100 + number // 700 % 700, *range(100, 98 + PROMPT_TOKENS)]
    return {"prompt": tokens, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}


async def requests(server: PacedServer, count: int, width: int) -> dict[str, Any]:
    """Short answers, not streamed."""
    async with Client(server.url) as client:
        await in_turns(client, width, width, body(0, 1, stream=False))
        before, began_s = server.cpu_s(), time.monotonic()
        outcomes = await in_turns(client, width, count, body(1, 1, stream=False))
        wall_s = time.monotonic() - began_s
        cpu_s = _used(before, server.cpu_s())
    assert {outcome.status for outcome in outcomes} == {200}
    return {
        "width": width,
        "requests_per_s": count / wall_s,
        "p50_ms": 1000 * percentile([outcome.ended_s - outcome.sent_s for outcome in outcomes], 50),
        "cpu_ms_per_request": {name: 1000 * seconds / count for name, seconds in cpu_s.items()},
    }


async def tokens(server: PacedServer, width: int, max_tokens: int) -> dict[str, Any]:
    """Streams side by side, a token of each in every step."""
    async with Client(server.url) as client:
        await in_turns(client, width, width, body(0, 2, stream=True))
        before, began_s = server.cpu_s(), time.monotonic()
        outcomes = await in_turns(client, width, width, body(1, max_tokens, stream=True))
        wall_s = time.monotonic() - began_s
        cpu_s = _used(before, server.cpu_s())
    assert {outcome.status for outcome in outcomes} == {200}
    count = width * max_tokens
    return {
        "streams": width,
        "tokens_per_s": count / wall_s,
        "chunks": sum(outcome.num_chunks for outcome in outcomes),
        "cpu_s_per_1000_tokens": {name: 1000 * seconds / count for name, seconds in cpu_s.items()},
    }


async def flood(server: PacedServer, seconds: float) -> dict[str, Any]:
    rows: dict[str, Any] = {"capacity_per_s": CAPACITY, "seconds": seconds}
    async with Client(server.url) as client:
        await in_turns(client, 4, 8, body(0, 1, stream=True))
        memory: list[Mapping[str, int]] = [server.memory_bytes()]
        for factor, first in ((1.5, 10**5), (10.0, 2 * 10**5)):
            outcomes = await at_rate(
                client, factor * CAPACITY, seconds, lambda n, at=first: body(at + n, 4, stream=True), DEADLINE
            )
            rows[f"{factor:g}x"] = _summary(outcomes, seconds)
            memory.append(server.memory_bytes())
    rows["flood_to_capacity"] = rows["10x"]["answers_per_s"] / CAPACITY
    rows["grown_mib"] = {name: (memory[-1][name] - memory[1][name]) / 2**20 for name in memory[-1]}
    return rows


def _summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    since_s, until_s = outcomes[0].sent_s + RAMP_S, outcomes[0].sent_s + seconds
    taken = [outcome for outcome in outcomes if outcome.status == 200]
    waits = [outcome.first_s - outcome.sent_s for outcome in taken if outcome.first_s is not None]
    refusals = [outcome.ended_s - outcome.sent_s for outcome in outcomes if outcome.status == 429]
    assert len(taken) + len(refusals) == len(outcomes), {outcome.status for outcome in outcomes}
    return {
        "offered": len(outcomes),
        "answers_per_s": sum(since_s <= outcome.ended_s < until_s for outcome in taken) / (until_s - since_s),
        "refused": len(refusals),
        "ttft_s": {f"p{at}": percentile(waits, at) for at in (50, 99)},
        "late": sum(wait_s > 3.0 for wait_s in waits),
        "refusal_ms": {f"p{at}": 1000 * percentile(refusals, at) for at in (50, 99)},
    }


def _used(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """CPU seconds of the edge, of the router, and of all workers."""
    used: dict[str, float] = {}
    for name, seconds in after.items():
        kind = name.split(" ")[0]
        used[kind] = used.get(kind, 0.0) + seconds - before[name]
    return used


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="of each flood")
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--tokens", type=int, default=200, help="of each stream")
    chosen = options.parse_args()
    figures: dict[str, Any] = {}

    def add(name: str, row: dict[str, Any]) -> None:
        figures[name] = row
        print(name, json.dumps(row, indent=2), flush=True)

    with paced_server(WORKERS, UNPACED_TOKENS_PER_S, ROWS_MAX) as server:
        for width in (1, 16):
            add(f"requests, {width} at a time", asyncio.run(requests(server, chosen.requests, width)))
        for width in (16, 64, 256):
            add(f"{width} streams", asyncio.run(tokens(server, width, chosen.tokens)))
    with paced_server(WORKERS, PACED_TOKENS_PER_S, 32) as server:
        add("flood", asyncio.run(flood(server, chosen.seconds)))
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
