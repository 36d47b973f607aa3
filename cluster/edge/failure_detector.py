"""A frontend's look at workers that owe it answers: those that are out are given up, though their connections
may be alive."""

import asyncio
from collections.abc import Collection
from typing import Protocol

from tidemill.workers.messages import WorkerId

LOOK_S = 0.25


class Peers(Protocol):
    def silent(self) -> frozenset[WorkerId]: ...
    def give_up(self, workers: Collection[WorkerId]) -> None: ...


class Router(Protocol):
    async def out(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]: ...


async def watch(peers: Peers, router: Router) -> None:
    """Until cancelled. A worker that sends is never asked about: whoever cannot hear it is wrong."""
    while True:
        await asyncio.sleep(LOOK_S)
        if silent := peers.silent():
            out = await router.out(silent)
            peers.give_up(out & peers.silent())
