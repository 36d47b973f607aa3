"""A frontend gives up the workers that are out and owe it answers, and no others."""

import asyncio
from collections.abc import Collection

from tests.support.sim.loop import simulate
from tidemill.cluster.edge.failure_detector import LOOK_S, watch
from tidemill.workers.messages import WorkerId

A, B, C = WorkerId("a.1"), WorkerId("b.1"), WorkerId("c.1")


class Both:
    """Peers and router; `wakes` sends something while the router is asked."""

    def __init__(self, owing: set[WorkerId], out: set[WorkerId], wakes: WorkerId | None = None) -> None:
        self.owing, self.is_out, self.wakes = owing, out, wakes
        self.asked: list[frozenset[WorkerId]] = []
        self.given_up: set[WorkerId] = set()

    def silent(self) -> frozenset[WorkerId]:
        return frozenset(self.owing)

    def give_up(self, workers: Collection[WorkerId]) -> None:
        self.given_up |= set(workers)

    async def silent_workers(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        self.asked.append(frozenset(workers))
        self.owing.discard(self.wakes or A)
        return frozenset(self.is_out)


def watched(both: Both) -> Both:
    async def main() -> None:
        task = asyncio.create_task(watch(both, both))
        await asyncio.sleep(0.5 * LOOK_S)
        task.cancel()
        await asyncio.wait({task})

    simulate(0, main())
    return both


def test_those_that_owe_answers_and_are_out_are_given_up() -> None:
    both = watched(Both({B, C}, {A, B}))
    assert both.asked == [{B, C}]
    assert both.given_up == {B}


def test_one_that_speaks_meanwhile_is_kept() -> None:
    assert watched(Both({B, C}, {B, C}, wakes=B)).given_up == {C}


def test_router_is_not_asked_while_all_workers_speak() -> None:
    assert watched(Both(set(), {A})).asked == []
