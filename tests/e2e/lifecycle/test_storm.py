"""Random kills under 16 streams, with two of each process: nothing is lost, nothing hangs, nothing is left.

`make storm` kills 200 times, half of them beside prefill and decode workers and half beside mixed ones, and
always the next process when the last one is back. `STORM_KILLS=20 make storm` is shorter, `STORM_SEED`
replays one, and `STORM_KINDS=decode,mooncake_master` kills these alone. It prints the pauses of streams by
what was killed.
"""

import asyncio
import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.support.e2e.faults import (
    EDGE,
    MASTER,
    OWNER,
    ROUTER,
    STORE,
    SUPERVISOR,
    processes_of,
    rows_of,
    run,
    wait_until_quiet,
)
from tests.support.e2e.history import Ask, Call, asks, broken, percentile
from tests.support.e2e.server import Server, eventually, listening_of
from tests.support.e2e.streams import client_of
from tests.support.sockets import free_port
from tidemill.cluster.processes.system.private_folder import writers

KILLS = int(os.environ.get("STORM_KILLS", "0"))
SEED = int(os.environ.get("STORM_SEED", "0"))
KINDS = tuple(filter(None, os.environ.get("STORM_KINDS", "").split(",")))
WIDTH = 16
PAUSE_S_GOAL = 2.0
CUT_S_MAX = 5.0
"""A client learns of a killed edge by a reset, not by a time-out."""

COUNTS = {ROUTER: 2, EDGE: 2, SUPERVISOR: 1, MASTER: 1, OWNER: 1, STORE: 1}
SIZES = ("--routers", "2", "--frontends", "2", "--memory", "64MiB")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what is there is only looked at
MOONCAKE = "mooncake?size=256MiB&timeout=1s&ports=open"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not KILLS, reason="STORM_KILLS is the number of kills: `make storm`"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill -9. `ports` are those of the clients whose connections the process had."""

    kind: str
    name: str
    pid: int
    at_s: float
    ports: frozenset[int]


@dataclass
class Storm:
    """A server whose processes are killed under load."""

    server: Server
    roles: tuple[str, ...]
    router_port: int
    rng: Random
    kills: list[Kill] = field(default_factory=list[Kill])
    back_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])  # by kind

    @property
    def workers(self) -> frozenset[str]:
        return frozenset(f"{role}-{index}" for role in self.roles for index in range(2))

    def run(self) -> None:
        for number in range(KILLS // 2):
            kind = self.rng.choice(KINDS or (*self.roles, *COUNTS))
            self._kill(kind)
            killed = self.kills[-1]
            eventually(lambda killed=killed: self._is_back(killed))
            took_s = time.monotonic() - killed.at_s
            self.back_s.setdefault(kind, []).append(took_s)
            sys.stdout.write(f"{number}: {killed.name}, pid {killed.pid}, back after {took_s:.1f} s\n")
            sys.stdout.flush()
            time.sleep(self.rng.uniform(0.0, 2.0))

    def _kill(self, kind: str) -> None:
        name = f"{kind}-{self.rng.randrange(2)}" if kind in self.roles else kind
        process = self.rng.choice(processes_of(self.server, name, COUNTS.get(kind, 1)))
        ports = frozenset[int]()
        if kind == EDGE:
            process.suspend()
            ports = frozenset(end.raddr.port for end in process.net_connections("inet") if end.raddr)
        process.kill()
        at_s = time.monotonic()
        self.kills.append(Kill(kind=kind, name=name, pid=process.pid, at_s=at_s, ports=ports))

    def _is_back(self, killed: Kill) -> bool:
        """Return whether every process is there that is not the killed one, listens, and does its work."""
        parts = {name: processes_of(self.server, name, COUNTS[name]) for name in COUNTS}
        pids = {process.pid for found in parts.values() for process in found}
        rows = rows_of(self.server) or []
        ready = {str(row["info"]["name"]) for row in rows if row["state"] == "ready"}
        return (
            killed.pid not in pids | {row["info"]["pid"] for row in rows}
            and self.workers <= ready
            and not any(row["load"]["counters"]["store_is_down"] for row in rows)
            and all(listening_of(parts[name]) for name in (MASTER, OWNER))  # an owner does before it lends
            and all(_listens(self.router_port + index) for index in range(2))
            and self._answers()
        )

    def _answers(self) -> bool:
        """Return whether both edges answer, on four connections in turn, and a supervisor takes orders."""
        with suppress(httpx.HTTPError):
            answers = [httpx.get(f"{self.server.url}/cluster", timeout=30).json() for _ in range(4)]
            scale = httpx.get(f"{self.server.url}/cluster/scale", timeout=30)
            return scale.is_success and len({answer["frontend"]["pid"] for answer in answers}) == 2
        return False

    def caused(self, call: Call) -> bool:
        """Return whether the edge of this call was killed, and its client learned of it immediately."""
        return any(
            kill.kind == EDGE
            and call.sent_s <= kill.at_s + CUT_S_MAX
            and kill.at_s <= call.ended_s <= kill.at_s + CUT_S_MAX
            and (not call.port or call.port in kill.ports)
            for kill in self.kills
        )


@dataclass
class Load:
    """Streams again and again, `WIDTH` at a time. One that is cut is asked again, as its client would."""

    url: str
    asked: Sequence[Ask]
    calls: list[tuple[int, Call]] = field(default_factory=list[tuple[int, Call]])  # with the index of the ask
    repeated: list[tuple[Call, Call]] = field(default_factory=list[tuple[Call, Call]])
    is_done: bool = False

    async def run(self) -> None:
        async with client_of(self.url) as client, asyncio.TaskGroup() as running:
            for _ in range(WIDTH):
                running.create_task(self._one_after_another(client))

    async def _one_after_another(self, client: httpx.AsyncClient) -> None:
        while not self.is_done:
            number = len(self.calls)
            index, salt = number % len(self.asked), f"storm-{number // len(self.asked)}"
            cut: Call | None = None
            while cut is None or (is_cut(cut) and len(cut.trouble) == 1):
                call = Call(self.asked[index])
                self.calls.append((index, call))
                self.repeated += [(cut, call)] if cut else []
                await call.run(client, salt)
                cut = call


def is_cut(call: Call) -> bool:
    return any(trouble.startswith("the connection broke") for trouble in call.trouble)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def pauses_by_kind(storm: Storm, calls: Sequence[Call]) -> dict[str, list[float]]:
    """Return, by what was killed, the longest pause of each stream between a kill and the next one."""
    found: dict[str, list[float]] = {}
    ends = [kill.at_s for kill in storm.kills[1:]] + [float("inf")]
    for kill, end_s in zip(storm.kills, ends, strict=True):
        for call in calls:
            times = [chunk.at_s for chunk in call.chunks]
            gaps = [
                later - earlier for earlier, later in pairwise(times) if later > kill.at_s and earlier < end_s
            ]
            if gaps and times[0] < kill.at_s:
                found.setdefault(kill.kind, []).append(max(gaps))
    return {kind: sorted(pauses) for kind, pauses in found.items()}


def figures(storm: Storm, load: Load) -> dict[str, object]:
    whole = [call for _, call in load.calls if not is_cut(call)]
    pauses = pauses_by_kind(storm, whole)
    usages = [again.usage for _, again in load.repeated if again.usage]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    return {
        "kills": len(storm.kills),
        "streams": len(load.calls),
        "cut by the kill of their edge": len(load.repeated),
        "of these, asked again with a hit in the cache": sum(count > 0 for count in cached),
        "longest pause of a stream, s": round(max((found[-1] for found in pauses.values()), default=0.0), 2),
        "goal, s": PAUSE_S_GOAL,
        "pauses, s: p50, p99, max": {kind: _spread(found, 50, 99, 100) for kind, found in pauses.items()},
        "back after, s: p50, max": {
            kind: _spread(sorted(found), 50, 100) for kind, found in storm.back_s.items()
        },
        "load of the machine": round(os.getloadavg()[0], 1),
    }


def _spread(sorted_s: Sequence[float], *percents: int) -> str:
    return ", ".join(f"{percentile(sorted_s, percent):.2f}" for percent in percents)


async def under(load: Load, work: Callable[[], None]) -> None:
    running = asyncio.create_task(load.run())
    gc.disable()  # a collection of all chunks stops this client for seconds, which looks like a pause
    try:
        await asyncio.to_thread(work)
    finally:
        load.is_done = True
        await running
        gc.enable()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",)], ids="-".join)
def test_random_kills_lose_no_stream_and_leave_nothing(tmp_path: Path, roles: tuple[str, ...]) -> None:
    memory = set(SHARED_MEMORY.iterdir())
    port = free_port()
    counts = [word for role in roles for word in (f"--{role}", "2")]
    options = ("keeper", "--port", "0", *counts, *SIZES, "--router-port", str(port), "--store", MOONCAKE)
    with Server(options, tmp_path / "log") as server:
        asked = asks(Random(SEED), 24, num_tokens=300, max_tokens=240)
        calm = asyncio.run(run(server, asked, "calm", width=WIDTH)).calls
        assert [broken(call, call) for call in calm] == [[] for _ in calm]
        storm, load = Storm(server, roles, port, Random(SEED)), Load(server.url, asked)
        asyncio.run(under(load, storm.run))
        sys.stdout.write(json.dumps(figures(storm, load), indent=2) + "\n")
        wrong = {
            number: found
            for number, (index, call) in enumerate(load.calls)
            if not (is_cut(call) and storm.caused(call)) and (found := broken(call, calm[index]))
        }
        assert wrong == {}
        wait_until_quiet(server, storm.workers)
    left = set(SHARED_MEMORY.iterdir()) - memory
    assert not [path for path in left if not writers(path)], "of no other server"
