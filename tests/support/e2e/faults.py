"""Faults of a server's processes, in a few words: what happens to whom, and when in a load.

    await run(server, asks, salt, [Fault("decode-0", call=3, num_tokens=10), Fault(OWNER, 4.0, after_s=2.0)])

A name is that of a worker, or one of PARTS: the process that is it at that time.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from random import Random
from typing import Any
from urllib.request import urlopen

import httpx
import psutil

from tests.support.e2e.history import Ask, Call
from tests.support.e2e.server import EVENTUALLY_S_MAX, Server, eventually
from tests.support.e2e.streams import client_of

MASTER = "mooncake_master"
OWNER = "tidemill.kvstore.stores.mooncake_memory_owner"
ROUTER = "ray::RouterActor"
RANK = "ray::RankActor"
GCS = "/gcs_server"
RAYLET = "/raylet/raylet"
REAPER = "tidemill.cluster.processes.system.reaper"
SUPERVISOR = "ray::Supervisor"
STORE = "ray::StoreActor"
EDGE = "--inherited"
PARTS = (MASTER, OWNER, STORE, ROUTER, RANK, GCS, RAYLET, REAPER, SUPERVISOR, EDGE)

LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Fault:
    """kill -9, or a stop (SIGSTOP) for some time, at a step of a load: a time after its start, and when call
    `call` has `num_tokens` tokens."""

    name: str
    stopped_s: float | None = None
    after_s: float = 0.0
    call: int | None = None
    num_tokens: int = 0

    def __str__(self) -> str:
        return f"{'kill' if self.stopped_s is None else 'stop'} {self.name}"


def storm(rng: Random, names: Sequence[str], count: int, calls: int, tokens_max: int) -> list[Fault]:
    """Return random faults at random steps of a load of `calls` calls."""

    def fault() -> Fault:
        name = rng.choice(names)
        stopped_s = None if rng.random() < 0.6 else rng.uniform(0.2, 5.0)
        return Fault(name, stopped_s, call=rng.randrange(calls), num_tokens=rng.randrange(tokens_max))

    return [fault() for _ in range(count)]


@dataclass(kw_only=True)
class Struck:
    """A fault that happened. `missed_s` is the time until the cluster knew: for a worker, until the router
    had dropped its id."""

    fault: Fault
    at_s: float
    pid: int
    missed_s: float | None = None


Rows = list[dict[str, Any]]
"""The workers, as `tidemill status` has them."""


@dataclass
class Run:
    """The result of a load and its faults; `late` faults did not happen, because their call had ended."""

    calls: list[Call]
    struck: list[Struck] = field(default_factory=list[Struck])
    late: list[Fault] = field(default_factory=list[Fault])


async def run(
    server: Server, asks: Sequence[Ask], salt: str, faults: Sequence[Fault] = (), width: int | None = None
) -> Run:
    """All of `asks` to their ends, `width` at a time, and the faults meanwhile. Pages made for another `salt`
    are of no use."""
    found = Run([Call(ask) for ask in asks])
    waiting = iter(found.calls)

    async def one_after_another(client: httpx.AsyncClient) -> None:
        for call in waiting:
            await call.run(client, salt)

    async with client_of(server.url) as client, asyncio.TaskGroup() as running:
        for _ in range(width or len(asks)):
            running.create_task(one_after_another(client))
        for fault in faults:
            running.create_task(_carry_out(server, fault, found))
    return found


async def run_until(server: Server, asks: Sequence[Ask], salt: str, width: int, done: asyncio.Event) -> Run:
    """Like `run`, over and over again in order, until `done` is set."""
    found = Run([])

    async def one_after_another(client: httpx.AsyncClient) -> None:
        while not done.is_set():
            number = len(found.calls)
            found.calls.append(Call(asks[number % len(asks)]))
            await found.calls[number].run(client, f"{salt}-{number // len(asks)}")

    async with client_of(server.url) as client, asyncio.TaskGroup() as running:
        for _ in range(width):
            running.create_task(one_after_another(client))
    return found


async def _carry_out(server: Server, fault: Fault, found: Run) -> None:
    await asyncio.sleep(fault.after_s)
    if fault.call is not None and not await found.calls[fault.call].reach(fault.num_tokens):
        found.late.append(fault)
        return
    await strike(server, fault, found)


async def strike(
    server: Server, fault: Fault, found: Run, missed: Callable[[Rows], bool] | None = None
) -> Struck:
    """Cause a fault; return when it is over and the cluster knows, or never will.

    `missed` tests whether the workers' state shows it; without it, a worker's id must be gone.
    """
    process = await asyncio.to_thread(_hit, server, fault)
    struck = Struck(fault=fault, at_s=time.monotonic(), pid=process.pid)
    found.struck.append(struck)
    if missed is None and fault.name not in PARTS:
        missed = partial(_is_out, process.pid)
    if fault.stopped_s is None:
        await _watch(server, struck, missed, struck.at_s + EVENTUALLY_S_MAX)
        return struck
    try:
        await _watch(server, struck, missed, struck.at_s + fault.stopped_s)
        await asyncio.sleep(struck.at_s + fault.stopped_s - time.monotonic())
    finally:
        with suppress(psutil.NoSuchProcess):  # another fault, or the server itself, may have ended it
            process.resume()
    return struck


def _hit(server: Server, fault: Fault) -> psutil.Process:
    """Another fault may have ended the process just before: then it is the next one of that name."""
    while True:
        process = process_of(server, fault.name)
        with suppress(psutil.NoSuchProcess):
            (process.kill if fault.stopped_s is None else process.suspend)()
            return process


def _is_out(pid: int, rows: Rows) -> bool:
    return all(row["info"]["pid"] != pid for row in rows)


async def _watch(
    server: Server, struck: Struck, missed: Callable[[Rows], bool] | None, until_s: float
) -> None:
    while missed is not None and time.monotonic() < until_s:
        rows = await asyncio.to_thread(rows_of, server, max(LOOK_S, until_s - time.monotonic()))
        if rows is not None and missed(rows):
            struck.missed_s = time.monotonic() - struck.at_s
            return
        await asyncio.sleep(LOOK_S)


def rows_of(server: Server, wait_s_max: float = 60.0) -> Rows | None:
    """None while the router is away."""
    url = f"{server.url}/cluster"
    with suppress(OSError, HTTPException), urlopen(url, timeout=wait_s_max) as answer:  # noqa: S310 - our own
        return json.load(answer)["workers"]
    return None


def process_of(server: Server, name: str) -> psutil.Process:
    """The present process of that name, awaited if it is being restarted."""
    return processes_of(server, name, 1)[0]


def processes_of(server: Server, name: str, count: int) -> list[psutil.Process]:
    """The present processes of that name, awaited until there are at least `count`."""
    found: list[psutil.Process] = []

    def are_there() -> bool:
        found.clear()
        with suppress(psutil.NoSuchProcess):
            found.extend(_worker(server, name) if name not in PARTS else _part(server, name))
        return len(found) >= count

    eventually(are_there)
    return found


def _worker(server: Server, name: str) -> list[psutil.Process]:
    return [
        process
        for row in rows_of(server) or ()
        if row["info"]["name"] == name and (process := psutil.Process(row["info"]["pid"])).is_running()
    ]


def _part(server: Server, name: str) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in server.processes():
        with suppress(psutil.Error):
            if any(name in word for word in process.cmdline()):
                found.append(process)
    return found


def wait_until_quiet(server: Server, names: frozenset[str]) -> None:
    """Wait until all workers of these names are there and no memory belongs to a request."""

    def is_quiet() -> bool:
        rows = rows_of(server) or []
        there = {str(row["info"]["name"]) for row in rows}
        return there == set(names) and not any(holds(row) for row in rows)

    eventually(is_quiet)


def holds(row: dict[str, Any]) -> bool:
    """Return whether a worker holds memory of a request."""
    load = row["load"]
    counted = ("running_rows", "waiting_rows", "queued_tokens", "wanted_bytes", "state_slots")
    return any(load[name] for name in counted) or any(
        load["memory"][name] for name in ("pages_live", "states_live")
    )
