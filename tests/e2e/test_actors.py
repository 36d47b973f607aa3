"""Real processes: workers and router under Ray, killed, frozen and broken while a frontend talks to them."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager, suppress

import psutil
import pytest

from tests.support.cluster.fake_engine import BREAK_TOKEN, PAGE_TOKENS, answer
from tests.support.cluster.scripted_engine import answer_of
from tests.support.e2e.server import EVENTUALLY_S_MAX, command_of
from tests.support.grpc_loop import IN_GRPC_LOOP
from tidemill.cluster.messages import FleetStatus, PlacementRequest, Route
from tidemill.cluster.processes.launch import Cluster
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.rpc.worker_client import WorkerClients
from tidemill.cluster.settings import FleetSettings
from tidemill.workers.messages import Request, Unserved, WorkerGone, WorkerInfo

pytestmark = IN_GRPC_LOOP


class Frontend:
    def __init__(self, cluster: Cluster, fleet: FleetSettings) -> None:
        self.router: RouterClient = cluster.router(fleet)
        self.peers: WorkerClients = cluster.peers(fleet)

    async def place(self, num_tokens: int = 1) -> Route:
        return await self.router.place(
            PlacementRequest(
                request_id="r", keys=(), num_tokens=num_tokens, max_new_tokens=1, wait_s_max=EVENTUALLY_S_MAX
            )
        )

    async def tokens(self, route: Route, request: Request) -> list[int]:
        async with aclosing(answer_of(self.peers, request, route.decode_address, route.decode)) as deltas:
            return [token async for delta in deltas for token in delta.tokens]

    async def until(self, holds: Callable[[FleetStatus], bool]) -> FleetStatus:
        """Ask for the state of the fleet until it is as expected."""
        async with asyncio.timeout(EVENTUALLY_S_MAX):
            while True:
                with suppress(Unserved):  # the first router may start again for long on a slow machine
                    if holds(status := await self.router.status()):
                        return status
                await asyncio.sleep(0.1)

    async def until_all_are_back(self) -> dict[str, WorkerInfo]:
        status = await self.until(lambda status: len(status.workers) == 2)
        return {worker.info.name: worker.info for worker in status.workers}


@asynccontextmanager
async def frontend(cluster: Cluster, fleet: FleetSettings) -> AsyncGenerator[Frontend]:
    frontend = Frontend(cluster, fleet)
    try:
        yield frontend
    finally:
        await frontend.peers.close()
        await frontend.router.close()


def request(*tokens: int, max_new_tokens: int = 5) -> Request:
    return Request(request_id="r", tokens=tokens, max_new_tokens=max_new_tokens)


async def test_request_passes_through_real_actors(cluster: Cluster, fleet: FleetSettings) -> None:
    async with frontend(cluster, fleet) as here:
        infos = await here.until_all_are_back()
        assert {info.role for info in infos.values()} == {"prefill", "decode"}
        route = await here.place(num_tokens=1000)
        prefill = infos["prefill-0"]
        assert route.prefill == prefill.worker
        prompt = range(PAGE_TOKENS + 1)
        produced = await here.peers.produce(prefill.worker, prefill.address, request(*prompt))
        assert produced.depth == PAGE_TOKENS
        assert await here.tokens(route, request(1, 2, 3)) == [answer((1, 2, 3), index) for index in range(5)]


async def test_worker_whose_step_loop_fails_is_restarted_by_ray(
    cluster: Cluster, fleet: FleetSettings
) -> None:
    async with frontend(cluster, fleet) as here:
        before = (await here.until_all_are_back())["decode-0"]
        with pytest.raises(WorkerGone):
            await here.tokens(await here.place(), request(BREAK_TOKEN, max_new_tokens=10**6))
        await here.until(
            lambda status: before.worker not in [worker.info.worker for worker in status.workers]
        )
        after = (await here.until_all_are_back())["decode-0"]
        assert after.pid != before.pid


async def test_router_that_is_killed_comes_back_and_knows_the_same_workers(
    cluster: Cluster, fleet: FleetSettings
) -> None:
    async with frontend(cluster, fleet) as here:
        before = await here.until_all_are_back()
        routers = [  # of the Ray of this process; servers that other tests share have their own
            process
            for raylet in psutil.Process().children()
            if raylet.name() == "raylet"
            for process in raylet.children(recursive=True)
            if "ray::RouterActor" in command_of(process)
        ]
        assert len(routers) == 2
        for router in routers:
            router.kill()
            assert (await here.place()).decode == before["decode-0"].worker
            assert await here.until_all_are_back() == before


async def test_worker_that_is_frozen_is_dropped_and_found_again(
    cluster: Cluster, fleet: FleetSettings
) -> None:
    async with frontend(cluster, fleet) as here:
        frozen = (await here.until_all_are_back())["decode-0"]
        route = await here.place()
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerGone):
                await here.tokens(route, request(1, max_new_tokens=10**6))
            await here.until(lambda status: [worker.info.name for worker in status.workers] == ["prefill-0"])
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        assert (await here.until_all_are_back())["decode-0"] == frozen
