"""Detects lost workers among those that owe this edge answers, even if their connections look alive."""

import asyncio
from collections.abc import Collection
from typing import Protocol

from tidemill.workers.messages import WorkerId

LOOK_S = 0.25


class WorkerConnections(Protocol):
    def silent(self) -> frozenset[WorkerId]: ...
    def give_up(self, workers: Collection[WorkerId]) -> None: ...


class SilenceReports(Protocol):
    async def silent_workers(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]: ...


async def watch(peers: WorkerConnections, router: SilenceReports) -> None:
    """Watch until cancelled. A worker that sends tokens is never asked about: it is not lost."""
    while True:
        await asyncio.sleep(LOOK_S)
        if silent := peers.silent():
            out = await router.silent_workers(silent)
            peers.give_up(out & peers.silent())
