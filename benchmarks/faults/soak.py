"""R5: memory that is full all the time while a tenth of the clients go away: no leak, and no other token."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from tests.support.e2e.faults import Rows, rows_of, run, wait_until_quiet
from tests.support.e2e.history import Ask, Call, asks, broken
from tests.support.e2e.server import Server
from tests.support.e2e.streams import client_of

from benchmarks.faults.scene import names_of, serving, spread

SIZES = ("--prefill", "1", "--decode", "2", "--memory", "24MiB", "--max-model-len", "4096")
OPTIONS = (*SIZES, "--no-memory-broker", "--store", "mooncake?size=256MiB")
WIDTH = 64
ASKS = 40
PROMPT_TOKENS = 1500
ANSWER_TOKENS = 400
ABORTED_SHARE = 0.1
ABORT_TOKENS_MAX = 300
COUNTERS = (
    "generated_tokens",
    "computed_tokens",
    "preemptions",
    "store_gets_as_hit",
)
LOOK_S = 0.5
RAMP_S = 20.0


@dataclass
class Seen:
    """The shares of the decode workers' budgets in use by requests, and in use at all, per sample."""

    live: list[float] = field(default_factory=list[float])
    used: list[float] = field(default_factory=list[float])
    waiting: list[int] = field(default_factory=list[int])

    def look(self, rows: Rows) -> None:
        for row in rows:
            load, memory = row["load"], row["load"]["memory"]
            if row["info"]["role"] == "decode" and load["budget_bytes"]:
                live = memory["pages_live"] + memory["states_live"]
                cached = memory["pages_cached"] + memory["states_cached"]
                self.live.append(live / load["budget_bytes"])
                self.used.append((live + cached) / load["budget_bytes"])
                self.waiting.append(load["waiting_rows"])


@dataclass
class Tried:
    call: Call
    calm: Call
    aborted: bool


def soak(minutes: float) -> dict[str, Any]:
    wanted = asks(Random(9), ASKS, num_tokens=PROMPT_TOKENS, max_tokens=ANSWER_TOKENS)
    with tempfile.TemporaryDirectory() as folder, serving(OPTIONS, Path(folder, "log")) as server:
        names = names_of(server)
        lives = {row["info"]["worker"] for row in server.workers()}
        calm = asyncio.run(run(server, wanted, "calm", width=8)).calls
        assert not [one for call in calm if (one := broken(call, call))]
        tried: list[Tried] = []
        seen = Seen()
        early: dict[str, float] = {}
        asyncio.run(_load(server, wanted, calm, 60 * minutes, tried, seen, early))
        wait_until_quiet(server, names)
        late = _resident_mib(server)
        rows = server.workers()
        evicted = {name for row in rows for name in row["load"]["counters"] if name.startswith("evicted_")}
        counters = {name: int(server.counter(name)) for name in (*COUNTERS, *sorted(evicted))}
        lost = lives - {row["info"]["worker"] for row in rows}
    ended = [trial for trial in tried if not trial.aborted]
    failed = [trial.call.trouble for trial in ended if trial.call.trouble]
    changed = [
        found for trial in ended if not trial.call.trouble and (found := broken(trial.call, trial.calm))
    ]
    cut = [trial for trial in tried if trial.aborted and not _is_begin(trial.call, trial.calm)]
    return {
        "minutes": minutes,
        "streams": len(tried),
        "aborted": len(tried) - len(ended),
        "failed": len(failed),
        "changed": len(changed) + len(cut),
        "trouble": [*failed, *changed][:3],
        "workers_lost": len(lost),
        "leaked_bytes": 0,  # else `wait_until_quiet` would not have come to its end
        "live_share": spread(sorted(seen.live)),
        "used_share": spread(sorted(seen.used)),
        "looks_with_used_of_0.99": round(
            sum(share >= 0.99 for share in seen.used) / max(1, len(seen.used)), 3
        ),
        "looks_with_requests_that_wait": round(sum(map(bool, seen.waiting)) / max(1, len(seen.waiting)), 3),
        "waiting_rows": spread(sorted(seen.waiting)),
        "counters": counters,
        "resident_mib": {name: [early.get(name, 0.0), size] for name, size in late.items()},
    }


async def _load(
    server: Server,
    wanted: Sequence[Ask],
    calm: Sequence[Call],
    seconds: float,
    tried: list[Tried],
    seen: Seen,
    early: dict[str, float],
) -> None:
    rng, numbers = Random(10), count()
    begin_s = time.monotonic()

    async def one_after_another(client: httpx.AsyncClient) -> None:
        while time.monotonic() < begin_s + seconds:
            number = next(numbers)
            one = Tried(Call(wanted[number % ASKS]), calm[number % ASKS], rng.random() < ABORTED_SHARE)
            tried.append(one)
            running = asyncio.create_task(one.call.run(client, f"soak-{number // ASKS // 2}"))
            if one.aborted:
                one.aborted = await one.call.reach(rng.randrange(ABORT_TOKENS_MAX))
                running.cancel()
            await asyncio.wait([running])

    async with client_of(server.url) as client, asyncio.TaskGroup() as running:
        for _ in range(WIDTH):
            running.create_task(one_after_another(client))
        while time.monotonic() < begin_s + seconds:
            await asyncio.sleep(LOOK_S)
            if time.monotonic() > begin_s + RAMP_S:
                seen.look(await asyncio.to_thread(rows_of, server) or [])
            if not early and time.monotonic() > begin_s + seconds / 5:
                early |= await asyncio.to_thread(_resident_mib, server)


def _resident_mib(server: Server) -> dict[str, float]:
    """Return the resident memory of the edge, the router and each worker in MiB."""
    pids = {row["info"]["name"]: row["info"]["pid"] for row in rows_of(server) or []}
    found = {name: psutil.Process(pid) for name, pid in pids.items()}
    processes = server.processes()
    found["frontend"] = processes[0]
    found["router"] = next(process for process in processes if "RouterActor" in " ".join(process.cmdline()))
    return {name: round(process.memory_info().rss / 2**20, 1) for name, process in sorted(found.items())}


def _is_begin(call: Call, calm: Call) -> bool:
    """Return whether an aborted call's output is a prefix of the same call's output in the calm run."""
    for index in range(call.ask.body.get("n", 1)):
        tokens, whole = (
            [token for chunk in item.choice(index) for token in chunk.tokens] for item in (call, calm)
        )
        if tokens != whole[: len(tokens)]:
            return False
    return True
