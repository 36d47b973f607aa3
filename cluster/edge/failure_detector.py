"""Detects lost workers among those that owe this edge answers, even if their connections look alive."""

from collections.abc import Collection
from typing import Protocol

from tidemill.kvstore.periodic import every
from tidemill.workers.messages import WorkerId

LOOK_S = 0.25


class WorkerConnections(Protocol):
    def silent(self) -> frozenset[WorkerId]: ...
    def give_up(self, workers: Collection[WorkerId]) -> None: ...


class SilenceReports(Protocol):
    async def silent_workers(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]: ...


async def watch(peers: WorkerConnections, router: SilenceReports) -> None:
    """Watch until cancelled. A worker that sends tokens is never asked about: it is not lost."""

    async def look() -> None:
        if silent := peers.silent():
            out = await router.silent_workers(silent)
            peers.give_up(out & peers.silent())

    await every(LOOK_S, look, "silent workers")
