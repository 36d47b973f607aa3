"""Measures R6: workers are drained while they stream, and all are replaced one after the other."""

import asyncio
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.support.e2e.faults import Run, process_of, rows_of
from tests.support.e2e.faults import holds as has_work
from tests.support.e2e.server import Server, eventually

from benchmarks.faults.scene import Load, names_of, pauses, serving, spread, until_all_are_back

LEAVING = ("decode-0", "decode-1", "prefill-0")
SETTLE_S = 2.0
SIZES = ("--prefill", "2", "--decode", "3")


def leaving(rounds: int) -> dict[str, Any]:
    """Replace each worker `rounds` times; then drain some for good."""
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder, serving(SIZES, Path(folder, "log")) as server:
        load, names = Load(server), names_of(server)
        found, times = load.under("rolling", partial(_restart_all, server, names, rounds, took))
        rolling = {**load.verdict(found.calls), **_figures(found, times, took), "restarts": len(times)}
        print(rolling, flush=True)
        took.clear()
        found, times = load.under("leaving", partial(_stop_some, server, took))
        stopped = {**load.verdict(found.calls), **_figures(found, times, took), "stopped": len(times)}
    return {"rolling restart": rolling, "SIGTERM": stopped}


def _figures(found: Run, times: list[float], took: list[float]) -> dict[str, Any]:
    return {**pauses(found.calls, times), "empty_s": spread(sorted(took))}


async def _restart_all(server: Server, names: frozenset[str], rounds: int, took: list[float]) -> list[float]:
    """Drain, kill when empty, and wait for each worker; return when each was asked to drain."""
    times: list[float] = []
    for name in sorted(names) * rounds:
        await asyncio.sleep(SETTLE_S)
        times.append(time.monotonic())
        await asyncio.to_thread(_drain, server, name)
        took.append(time.monotonic() - times[-1])
        (await asyncio.to_thread(process_of, server, name)).kill()
        await until_all_are_back(server, names, SETTLE_S)
    return times


def _drain(server: Server, name: str) -> None:
    url = f"{server.url}/cluster/workers/{name}/drain"
    response = httpx.post(url, json={"drain": True, "force": False}, timeout=60)
    assert response.status_code == httpx.codes.OK, response.text

    def is_empty() -> bool:
        rows = [row for row in rows_of(server) or () if row["info"]["name"] == name]
        return [(row["state"], has_work(row)) for row in rows] == [("draining", False)]

    eventually(is_empty)


async def _stop_some(server: Server, took: list[float]) -> list[float]:
    times: list[float] = []
    for name in LEAVING:
        await asyncio.sleep(SETTLE_S)
        process = await asyncio.to_thread(process_of, server, name)
        times.append(time.monotonic())
        process.terminate()
        await asyncio.to_thread(psutil.wait_procs, [process])
        took.append(time.monotonic() - times[-1])
    await asyncio.sleep(SETTLE_S)
    return times
