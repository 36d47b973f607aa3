"""The router: waiting requests, silent workers, commands of operators, quarantine and restart backoff."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.support.cluster.heartbeats import heartbeat, placement_request, worker_info
from tests.support.loops import IN_VIRTUAL_TIME
from tidemill.cluster.messages import PlacementRequest
from tidemill.cluster.orders import Drain, SetRole
from tidemill.cluster.processes.restart_backoff import SOON_S, WAIT_S_MAX, Backoff
from tidemill.cluster.router.cost_model import Vector
from tidemill.cluster.router.fleet_view import Fleet
from tidemill.cluster.router.quarantine import CONTENTS_MAX, QUARANTINE_S, Quarantine
from tidemill.cluster.router.router import HELD_TOKENS_MAX, SILENCE_S_MAX, Router
from tidemill.cluster.worker.assignment import Assignment
from tidemill.workers.messages import Ack, Poisonous, RequestError, Role, Unserved, WorkerId, WorkerInfo

pytestmark = IN_VIRTUAL_TIME


def new_router() -> Router:
    return Router(asyncio.get_running_loop().time)


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


def test_router_imports_no_torch() -> None:
    modules = "tidemill.cluster.processes.router_actor, tidemill.cluster.router.router"
    script = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "False"


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


@dataclass
class Worker:
    """A worker that sends heartbeats and follows the answers."""

    router: Router
    info: WorkerInfo
    takes: tuple[bool, bool] = (True, True)

    def __post_init__(self) -> None:
        self.assignment = Assignment(self, self.info)

    def restrict(self, *, produces: bool, generates: bool) -> None:
        self.takes = (produces, generates)

    def report(self) -> Ack:
        ack = self.router.heartbeat(heartbeat(self.assignment.info, draining=self.assignment.draining))
        self.assignment.apply(ack)
        return ack


def fleet(router: Router, *roles: Role) -> list[Worker]:
    workers = [Worker(router, worker_info(f"{role}-{index}", role)) for index, role in enumerate(roles)]
    for worker in workers:
        worker.report()
    return workers


def states(router: Router) -> dict[str, str]:
    return {row.info.name: row.state for row in router.status().workers}


def test_drain_lasts_until_it_is_undone_also_while_the_router_restarts() -> None:
    router = Router(lambda: 0.0)
    first, second = fleet(router, "decode", "decode")
    router.carry_out(Drain("decode-0"))
    assert first.report().drain
    assert first.takes == (False, False)
    assert states(router) == {"decode-0": "draining", "decode-1": "ready"}
    assert not second.report().drain
    assert first.report().drain
    first.router = Router(lambda: 0.0)
    assert first.report().drain
    assert first.takes == (False, False)
    first.router.carry_out(Drain("decode-0", drain=False))
    first.report()
    first.report()
    assert states(first.router) == {"decode-0": "ready"}
    assert first.takes == (False, True), "as its role allows"


def test_drain_of_the_last_worker_of_a_role_needs_force() -> None:
    router = Router(lambda: 0.0)
    fleet(router, "prefill", "decode", "mixed")
    with pytest.raises(RequestError, match="the only worker that takes prompts") as refused:
        router.carry_out(Drain("prefill-0"))
    assert refused.value.status == 409
    router.carry_out(Drain("decode-1"))
    with pytest.raises(RequestError, match="the only worker that takes streams"):
        router.carry_out(Drain("mixed-2"))
    with pytest.raises(RequestError, match="streams"):
        router.carry_out(SetRole("mixed-2", "prefill"))
    router.carry_out(Drain("mixed-2", force=True))
    with pytest.raises(
        RequestError, match="there is no worker absent, the workers are: decode-1, mixed-2, prefill-0"
    ):
        router.carry_out(Drain("absent"))


def test_restarted_worker_takes_work_in_the_same_role() -> None:
    router = Router(lambda: 0.0)
    fleet(router, "decode", "decode")
    router.carry_out(Drain("decode-0"))
    router.carry_out(SetRole("decode-0", "mixed"))
    again = Worker(router, worker_info("decode-0.2"))
    ack = again.report()
    assert (ack.drain, ack.role) == (False, "mixed")


def test_leaving_worker_takes_no_work_whatever_its_commands_are() -> None:
    router = Router(lambda: 0.0)
    first, _ = fleet(router, "decode", "decode")
    first.assignment.leave()
    assert first.takes == (False, False)
    first.report()
    assert states(router)["decode-0"] == "draining"
    router.carry_out(Drain("decode-0"))
    first.report()
    router.carry_out(Drain("decode-0", drain=False))
    router.carry_out(SetRole("decode-0", "mixed"))
    first.report()
    assert first.takes == (False, False)


async def test_silent_workers_include_those_that_the_router_never_knew() -> None:
    router = new_router()
    first, second = fleet(router, "decode", "decode")
    workers = [first.info.worker, second.info.worker, WorkerId("frozen.1")]
    assert router.silent_workers(workers) == frozenset(), "it may not have found this router yet"
    for _ in range(4):
        await asyncio.sleep(1.0)
        second.report()
        router.tick()
    assert router.silent_workers(workers) == {"decode-0.1", "frozen.1"}
    router.report_lost(second.info.worker)
    assert second.info.worker not in router.silent_workers(workers), (
        "a stream broke, but its last heartbeat is recent"
    )
    first.report()
    assert router.silent_workers(workers) == {"frozen.1"}
    assert SILENCE_S_MAX == 3.0


def test_quarantine_is_bounded_in_time_and_number() -> None:
    quarantine = Quarantine()
    quarantine.add(b"poison", 0.0)
    with pytest.raises(Poisonous):
        quarantine.check(b"poison", QUARANTINE_S - 1)
    quarantine.check(b"poison", QUARANTINE_S)
    quarantine.check(b"other", 1.0)
    for index in range(CONTENTS_MAX):
        quarantine.add(index.to_bytes(2, "big"), 1.0)
    quarantine.check(b"poison", 1.0)
    with pytest.raises(Poisonous):
        quarantine.check((0).to_bytes(2, "big"), 1.0)


def test_backoff_grows_with_each_early_crash() -> None:
    backoff, now_s, waits = Backoff(), 0.0, list[float]()
    for _ in range(9):
        waits.append(backoff.begin("w", now_s))
        now_s += waits[-1] + SOON_S / 2
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, WAIT_S_MAX, WAIT_S_MAX]
    assert backoff.begin("other", now_s) == 0.0
    now_s += SOON_S
    assert backoff.begin("w", now_s) == 0.0, "it ran for long enough"


def test_backoff_grows_with_each_crash_of_a_long_start() -> None:
    backoff, now_s, waits = Backoff(lasts_from_ready=True), 0.0, list[float]()
    for start_s in (0, 60, 600, 60, 60):
        waits.append(backoff.begin("w", now_s))
        now_s += waits[-1] + start_s
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0]
    backoff.ready("w", now_s)
    assert backoff.begin("w", now_s + SOON_S) == 8.0, "it served, and not for long enough"
    for connected_s in (0, SOON_S):
        backoff.ready("w", now_s + connected_s)
    assert backoff.begin("w", now_s + SOON_S + 1) == 0.0, "it served since its first report"
