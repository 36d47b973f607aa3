"""The router places what it can, waits for what may come, and says when nothing came; in virtual time."""

import asyncio
import subprocess
import sys
from collections.abc import Coroutine

import pytest

from tests.support.sim.loop import simulate
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.router import SILENCE_S_MAX, Router
from tidemill.workers.messages import (
    Announcement,
    Heartbeat,
    Role,
    Unserved,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

FULL = Announcement(full=True)


def beat(
    worker: str,
    sequence: int = 0,
    role: Role = "mixed",
    announcement: Announcement = FULL,
    *,
    draining: bool = False,
) -> Heartbeat:
    return Heartbeat(
        info=WorkerInfo(
            worker=WorkerId(worker),
            name=worker.partition(".")[0],
            role=role,
            address=f"at:{worker}",
            pid=1,
            node="n",
        ),
        sequence=sequence,
        load=WorkerLoad(),
        announcement=announcement,
        draining=draining,
    )


def ask(wait_s_max: float = 10.0, *avoid: str) -> PlacementRequest:
    return PlacementRequest(
        request_id="r",
        keys=(),
        num_tokens=3,
        max_new_tokens=1,
        avoid=frozenset(map(WorkerId, avoid)),
        wait_s_max=wait_s_max,
    )


def run(main: Coroutine[None, None, None]) -> None:
    simulate(0, main)


def a_router() -> Router:
    return Router(asyncio.get_running_loop().time)


def test_a_request_is_placed_at_once_when_a_worker_is_there() -> None:
    async def main() -> None:
        router = a_router()
        router.heartbeat(beat("a.1"))
        assert await router.place(ask(0.0)) == Route(decode=WorkerId("a.1"), decode_address="at:a.1")

    run(main())


def test_everybody_who_waits_wakes_when_a_worker_comes() -> None:
    async def main() -> None:
        router = a_router()
        clock = asyncio.get_running_loop().time
        waiting = [asyncio.create_task(router.place(ask(wait_s))) for wait_s in (5.0, 60.0, 60.0)]
        await asyncio.sleep(1.0)
        router.heartbeat(beat("p.1", role="prefill"))
        router.heartbeat(beat("d.1", draining=True))
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in waiting)
        router.heartbeat(beat("a.1"))
        assert [route.decode for route in await asyncio.gather(*waiting)] == ["a.1"] * 3
        assert clock() == 2.0

    run(main())


@pytest.mark.parametrize("wait_s_max", [0.0, 7.0])
def test_a_request_that_nobody_can_serve_ends(wait_s_max: float) -> None:
    async def main() -> None:
        router = a_router()
        heartbeats = asyncio.create_task(_prefill_heartbeats(router))
        with pytest.raises(Unserved, match="no decode worker"):
            await router.place(ask(wait_s_max))
        assert asyncio.get_running_loop().time() == wait_s_max
        heartbeats.cancel()
        await asyncio.wait({heartbeats})

    run(main())


async def _prefill_heartbeats(router: Router) -> None:
    """What wakes those who wait, and does not serve them."""
    sequence = 0
    while True:
        router.heartbeat(beat("p.1", sequence, role="prefill"))
        sequence += 1
        await asyncio.sleep(1.0)


def test_a_hole_in_the_heartbeats_asks_for_everything() -> None:
    async def main() -> None:
        router = a_router()
        part = Announcement(added=(b"k",))
        assert router.heartbeat(beat("a.1", 4, announcement=part)).want_full, "a stranger"
        assert not router.heartbeat(beat("a.1", 5)).want_full
        assert not router.heartbeat(beat("a.1", 6, announcement=part)).want_full
        assert router.heartbeat(beat("a.1", 8, announcement=part)).want_full
        assert not router.heartbeat(beat("a.1", 9)).want_full
        router.report_lost(WorkerId("a.1"))
        assert router.heartbeat(beat("a.1", 10, announcement=part)).want_full, "it was thought to be gone"

    run(main())


def test_a_silent_worker_is_dropped_and_comes_back_with_its_next_heartbeat() -> None:
    async def main() -> None:
        router = a_router()
        router.heartbeat(beat("a.1"))
        await asyncio.sleep(SILENCE_S_MAX)
        router.tick()
        assert (await router.place(ask(0.0))).decode == "a.1"
        await asyncio.sleep(0.5)
        router.tick()
        with pytest.raises(Unserved):
            await router.place(ask(0.0))
        assert router.heartbeat(beat("a.1", 1, announcement=Announcement())).want_full
        assert (await router.place(ask(0.0))).decode == "a.1"

    run(main())


def test_what_was_placed_counts_before_it_is_reported() -> None:
    async def main() -> None:
        router = a_router()
        for worker in ("a.1", "b.1"):
            router.heartbeat(beat(worker))
        placed = [(await router.place(ask(0.0))).decode for _ in range(6)]
        assert sorted(placed) == ["a.1"] * 3 + ["b.1"] * 3

    run(main())


def test_status_shows_every_worker() -> None:
    async def main() -> None:
        router = a_router()
        router.heartbeat(beat("b.1", announcement=Announcement(added=(b"k", b"l"), full=True)))
        await asyncio.sleep(2.0)
        router.heartbeat(beat("a.1", draining=True))
        workers = router.status().workers
        assert [
            (worker.info.worker, worker.state, worker.heard_ago_s, worker.restorable_depths)
            for worker in workers
        ] == [
            ("a.1", "draining", 0.0, 0),
            ("b.1", "ready", 2.0, 2),
        ]

    run(main())


def test_the_router_waits_for_no_torch() -> None:
    modules = "tidemill.cluster.supervisor.router_actor, tidemill.cluster.router.router"
    look = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"
