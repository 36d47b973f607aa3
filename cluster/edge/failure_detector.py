"""A frontend's look at workers that owe it answers: those that are out are given up, though their connections
may be alive."""

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
    """Until cancelled. A worker that sends is never asked about: whoever cannot hear it is wrong."""
    while True:
        await asyncio.sleep(LOOK_S)
        if silent := peers.silent():
            out = await router.silent_workers(silent)
            peers.give_up(out & peers.silent())
