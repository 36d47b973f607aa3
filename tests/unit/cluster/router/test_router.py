"""The router in virtual time: placement, waits for workers, heartbeats and status."""

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import replace

import numpy as np
import pytest

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tests.support.loops import in_virtual_time
from tests.support.sim.loop import simulate
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.cost_model import Vector
from tidemill.cluster.router.fleet_view import Fleet
from tidemill.cluster.router.router import HELD_TOKENS_MAX, SILENCE_S_MAX, Router
from tidemill.workers.messages import Unserved, WorkerId


def run(main: Coroutine[None, None, None]) -> None:
    simulate(0, main)


def new_router() -> Router:
    return Router(asyncio.get_running_loop().time)


@in_virtual_time
async def test_router_places_immediately_when_a_worker_is_ready() -> None:
    router = new_router()
    router.heartbeat(heartbeat("a", "mixed"))
    assert await router.place(placement_request(wait_s_max=0.0)) == Route(
        decode=WorkerId("a.1"), decode_address="at:a.1"
    )


@in_virtual_time
async def test_router_places_all_waiting_requests_when_a_worker_comes() -> None:
    router = new_router()
    clock = asyncio.get_running_loop().time
    waiting = [
        asyncio.create_task(router.place(placement_request(wait_s_max=wait_s)))
        for wait_s in (5.0, 60.0, 60.0)
    ]
    await asyncio.sleep(1.0)
    router.heartbeat(heartbeat("p", "prefill"))
    router.heartbeat(heartbeat("d", "mixed", draining=True))
    await asyncio.sleep(1.0)
    assert not any(task.done() for task in waiting)
    router.heartbeat(heartbeat("a", "mixed"))
    assert [route.decode for route in await asyncio.gather(*waiting)] == ["a.1"] * 3
    assert clock() == 2.0


@pytest.mark.parametrize("wait_s_max", [0.0, 7.0])
@in_virtual_time
async def test_router_gives_up_after_the_wait_of_a_request(wait_s_max: float) -> None:
    router = new_router()
    heartbeats = asyncio.create_task(_prefill_heartbeats(router))
    with pytest.raises(Unserved, match="no decode worker"):
        await router.place(placement_request(wait_s_max=wait_s_max))
    assert asyncio.get_running_loop().time() == wait_s_max
    heartbeats.cancel()
    await asyncio.wait({heartbeats})


@in_virtual_time
async def test_router_holds_a_bounded_number_of_requests_and_prompt_tokens() -> None:
    request = placement_request(wait_s_max=60.0)
    router = Router(asyncio.get_running_loop().time, held_max=2)
    waiting = [asyncio.create_task(router.place(request)) for _ in range(2)]
    await asyncio.sleep(1.0)
    assert router.status().held == 2
    with pytest.raises(Unserved, match=r"2 requests .* wait for one already: retry"):
        await router.place(request)
    resumed = asyncio.create_task(router.place(replace(request, resumed=True)))
    await asyncio.sleep(1.0)
    assert router.status().held == 3, "its client has a part of the answer"
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    assert router.status().held == 2
    router.heartbeat(heartbeat("a", "mixed"))
    assert (await waiting[1]).decode == (await resumed).decode == "a.1"
    assert router.status().held == 0

    router = Router(asyncio.get_running_loop().time, held_max=9)
    long = asyncio.create_task(router.place(replace(request, num_tokens=HELD_TOKENS_MAX + 1)))
    await asyncio.sleep(1.0)
    assert router.status().held == 1, "a prompt of any length can be held alone"
    with pytest.raises(Unserved, match="prompt tokens"):
        await router.place(request)
    long.cancel()
    await asyncio.wait({long})
    held = asyncio.create_task(router.place(request))
    await asyncio.sleep(1.0)
    assert router.status().held == 1
    held.cancel()
    await asyncio.wait({held})


async def _prefill_heartbeats(router: Router) -> None:
    """Send heartbeats that wake waiting requests and cannot serve them."""
    sequence = 0
    while True:
        router.heartbeat(heartbeat("p", "prefill", sequence=sequence))
        sequence += 1
        await asyncio.sleep(1.0)


@in_virtual_time
async def test_router_drops_a_silent_worker_until_its_next_heartbeat() -> None:
    router = new_router()
    router.heartbeat(heartbeat("a", "mixed"))
    await asyncio.sleep(SILENCE_S_MAX)
    router.tick()
    assert (await router.place(placement_request(wait_s_max=0.0))).decode == "a.1"
    await asyncio.sleep(0.5)
    router.tick()
    with pytest.raises(Unserved):
        await router.place(placement_request(wait_s_max=0.0))
    assert router.heartbeat(heartbeat("a", "mixed", sequence=1)).want_full
    assert (await router.place(placement_request(wait_s_max=0.0))).decode == "a.1"


@in_virtual_time
async def test_router_counts_placed_requests_before_heartbeats_include_them() -> None:
    router = new_router()
    for worker in ("a", "b"):
        router.heartbeat(heartbeat(worker, "mixed"))
    placed = [(await router.place(placement_request(wait_s_max=0.0))).decode for _ in range(6)]
    assert sorted(placed) == ["a.1"] * 3 + ["b.1"] * 3


@in_virtual_time
async def test_router_status_has_every_worker() -> None:
    router = new_router()
    router.heartbeat(heartbeat("b", added=(b"k", b"l")))
    await asyncio.sleep(2.0)
    router.heartbeat(heartbeat("a", draining=True))
    assert [
        (row.info.worker, row.state, row.heard_ago_s, row.restorable_depths)
        for row in router.status().workers
    ] == [
        ("a.1", "draining", 0.0, 0),
        ("b.1", "ready", 2.0, 2),
    ]


def test_router_imports_no_torch() -> None:
    modules = "tidemill.cluster.processes.router_actor, tidemill.cluster.router.router"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"


@in_virtual_time
async def test_router_adds_what_its_affinities_say_against_a_worker() -> None:
    def loads_first(fleet: Fleet, request: PlacementRequest) -> Vector:
        cost = np.zeros(fleet.table.shape[1])
        cost[fleet.members[WorkerId("a.1")].slot] = 30.0 * request.num_tokens
        return cost

    router = new_router()
    router.affinities = [loads_first, loads_first]
    for name in ("a", "b"):
        router.heartbeat(heartbeat(name, "mixed"))
    requests = [placement_request(request_id=str(number)) for number in range(20)]
    assert {(await router.place(request)).decode for request in requests} == {"b.1"}
