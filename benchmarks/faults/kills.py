"""R1, R2: processes of a server killed (-9) and stopped under streams."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from tests.support.e2e.faults import (
    MASTER,
    OWNER,
    RANK,
    ROUTER,
    Fault,
    Rows,
    Run,
    Struck,
    process_of,
    rows_of,
    strike,
)
from tests.support.e2e.history import Call
from tests.support.e2e.server import Server
from tests.support.e2e.streams import client_of

from benchmarks.faults.scene import (
    Load,
    every_second,
    names_of,
    pauses,
    serving,
    spread,
    until_all_are_back,
)

PARTS = {"rank": RANK, "owner": OWNER, "master": MASTER, "router": ROUTER}
VICTIMS = ("prefill", "decode", "owner", "master", "router")
STOPPED_S = {"router": 2.0}
STOPPED_OTHERS_S = 6.0
"""Longer than it takes to notice."""

IDLE_S = 6.0
QUIET_S = 12.0
SETTLE_S = 2.0
WORKERS = ("--prefill", "2", "--decode", "2", "--store", "mooncake?size=512MiB")
GROUPS = ("--prefill", "1", "--decode", "2", "--decode-tensor-parallel-size", "2")


def rounds(
    options: tuple[str, ...], victims: Sequence[str], count: int, ways: Sequence[bool] = (False, True)
) -> dict[str, Any]:
    """Kill each victim, and stop each, `count` times under one load. `ways` are whether to stop it."""
    with tempfile.TemporaryDirectory() as folder, serving(options, Path(folder, "log")) as server:
        load = Load(server)
        quiet, _ = load.under("quiet", partial(asyncio.sleep, QUIET_S))
        names = names_of(server)
        rows: dict[str, Any] = {
            "workers": sorted(names),
            "without faults": {
                **load.verdict(quiet.calls),
                **pauses(quiet.calls, every_second(quiet.calls)),
                "served_s": spread(sorted(asyncio.run(_served_s(server)) for _ in range(5))),
            },
        }
        for victim in victims:
            for stops in ways:
                name = f"{'SIGSTOP' if stops else 'kill -9'} {victim}"
                struck, served = Run([]), list[float]()
                work = partial(
                    _strike_all, server, names, _faults(victim, count, stops=stops), struck, served
                )
                found, _ = load.under(name.replace(" ", ""), work)
                rows[name] = {
                    **load.verdict(found.calls),
                    **_figures(found.calls, struck.struck),
                    "served_s": spread(sorted(served)),
                }
                print(name, rows[name], flush=True)
    return rows


def _faults(victim: str, count: int, *, stops: bool) -> list[Fault]:
    stopped_s = STOPPED_S.get(victim, STOPPED_OTHERS_S) if stops else None
    names = [
        victim if "-" in victim else PARTS.get(victim, f"{victim}-{index % 2}") for index in range(count)
    ]
    return [Fault(name, stopped_s) for name in names]


def _figures(calls: Sequence[Call], struck: Sequence[Struck]) -> dict[str, Any]:
    missed = sorted(strike.missed_s for strike in struck if strike.missed_s is not None)
    return {
        "faults": len(struck),
        **pauses(calls, [strike.at_s for strike in struck]),
        "noticed": len(missed),
        "noticed_s": spread(missed),
    }


async def _strike_all(
    server: Server, names: frozenset[str], faults: list[Fault], struck: Run, served: list[float]
) -> None:
    await asyncio.sleep(SETTLE_S)
    for fault in faults:
        rows = await asyncio.to_thread(rows_of, server) or []
        striking = asyncio.create_task(strike(server, fault, struck, _missed(fault, rows)))
        while len(struck.struck) == 0 or struck.struck[-1].fault is not fault:  # noqa: ASYNC110 - a line of ours
            await asyncio.sleep(0.005)
        served.append(await _served_s(server))
        await striking
        await until_all_are_back(server, names, SETTLE_S)


def _missed(fault: Fault, before: Rows) -> Callable[[Rows], bool] | None:
    """Return how the workers' state shows this fault; None: by a worker that is gone."""
    pids = {row["info"]["pid"] for row in before}
    trips = _trips(before)
    born_s = time.monotonic()
    if fault.name == RANK:  # the leader goes with it
        return lambda rows: not pids <= {row["info"]["pid"] for row in rows}
    if fault.name in (MASTER, OWNER):
        return lambda rows: _trips(rows) > trips or time.monotonic() > born_s + 10.0
    if fault.name == ROUTER:
        return lambda rows: len(rows) == len(before)
    return None


def _trips(rows: Rows) -> int:
    return sum(row["load"]["counters"]["store_trips"] for row in rows)


async def _served_s(server: Server) -> float:
    """Return the seconds that a new request takes to its answer of one token."""
    rng = Random(time.monotonic_ns())
    body = {"model": "keeper", "prompt": [rng.randrange(5, 890) for _ in range(40)], "max_tokens": 1}
    async with client_of(server.url) as client:
        begin_s = time.monotonic()
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == httpx.codes.OK, response.text
        return time.monotonic() - begin_s


def kills(count: int, victims: Sequence[str]) -> dict[str, Any]:
    return rounds(WORKERS, victims, count)


def ranks(count: int) -> dict[str, Any]:
    return rounds(GROUPS, ("rank",), count)


def routers(count: int) -> dict[str, Any]:
    """One of two routers."""
    return rounds((*WORKERS, "--routers", "2"), ("router",), count)


def last_decode(count: int) -> dict[str, Any]:
    """kill -9 of the only decode worker, and of one of two."""
    ways = {"alone": ("--prefill", "1", "--decode", "1"), "with a spare": ("--prefill", "1", "--decode", "2")}
    return {name: rounds(options, ("decode-0",), count, ways=(False,)) for name, options in ways.items()}


def idle_rank(count: int) -> dict[str, Any]:
    """A rank that was stopped while its group had nothing to do: what the next requests see."""
    noticed: list[float] = []
    firsts: list[float] = []
    calm_firsts: list[float] = []
    calls: list[Call] = []
    with tempfile.TemporaryDirectory() as folder, serving(GROUPS, Path(folder, "log")) as server:
        load, names = Load(server), names_of(server)
        for index in range(count):
            asyncio.run(until_all_are_back(server, names, SETTLE_S))
            calm_firsts += load.firsts_s(load.once(f"before-{index}"))
            before = rows_of(server) or []
            rank = process_of(server, RANK)
            rank.suspend()
            try:
                missed, at_s = _missed(Fault(RANK), before), time.monotonic()
                assert missed is not None
                while time.monotonic() < at_s + IDLE_S:
                    if missed(rows_of(server) or before):
                        noticed.append(time.monotonic() - at_s)
                        break
                    time.sleep(0.05)
                answered = load.once(f"idle-{index}")
            finally:
                with suppress(psutil.NoSuchProcess):
                    rank.resume()
            calls += answered
            firsts += load.firsts_s(answered)
        return {
            **load.verdict(calls),
            "stopped": count,
            "noticed_while_idle": len(noticed),
            "noticed_s": spread(sorted(noticed)),
            "first_token_s": spread(sorted(firsts)),
            "first_token_without_s": spread(sorted(calm_firsts)),
        }
