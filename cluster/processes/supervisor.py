"""The supervisor: one detached Ray actor that starts, scales and stops the routers and workers.

It is the only process that creates and removes them, and it finds them by their names after a
restart. Its plan is in a journal in Ray's internal key-value store, beside Ray's own record of the
actors. While it is away everything serves, and nothing scales.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, cast

import ray
import ray.exceptions
from ray._private.state import jobs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidemill.cluster.messages import JoinAnswer, JoinRequest, Misses
from tidemill.cluster.observability.logs import start_logs
from tidemill.cluster.orders import (
    ListEdges,
    MakeToken,
    Reset,
    RevokeEdge,
    Roles,
    Scale,
    SupervisorOrder,
)
from tidemill.cluster.processes.joining.authority import Authority
from tidemill.cluster.processes.joining.members import Members
from tidemill.cluster.processes.joining.registry import Registry
from tidemill.cluster.processes.mooncake_service import STOP_S_MAX, StoreActor
from tidemill.cluster.processes.restart_backoff import Backoff
from tidemill.cluster.processes.router_actor import RouterActor
from tidemill.cluster.processes.scaling.autoscaling import EdgeReports, EdgeState
from tidemill.cluster.processes.scaling.journal import ClusterPlan, Fenced, FleetPlan, Journal, initial_plan
from tidemill.cluster.processes.scaling.node_fit import assign, demand_of, unschedulable_reason
from tidemill.cluster.processes.scaling.scaler import Scaler
from tidemill.cluster.processes.supervisor_client import RAY, SUPERVISOR, RayStore, exit_on_error, nodes
from tidemill.cluster.processes.system.children import endpoint_pid, start_endpoint
from tidemill.cluster.processes.system.private_folder import read_record
from tidemill.cluster.processes.worker_actor import WorkerActor, actor_options, call_router, find_router
from tidemill.cluster.rpc.router_client import RouterClient
from tidemill.cluster.settings import ClusterSettings, FleetSettings, RouterSettings, WorkerSettings
from tidemill.kvstore.periodic import FAILED_ROUNDS, every
from tidemill.workers.messages import WorkerGone

LASTING = {"lifetime": "detached", "max_restarts": -1, "max_task_retries": 0}
BESIDE = {**LASTING, "num_cpus": 0, "memory": 1}
"""An actor on the node of its creator. Ray has that node choose, because the actor asks for a byte; for one
that asks for nothing it has any node choose, which may not know one that has just joined."""

STORE = "store"
"""The name of the actor with the processes of the store."""

LEASE_S = 2.0
"""The interval at which the supervisor asks Ray whether the process that it belongs to has ended."""

STORE_STOP_S_MAX = 2 * STOP_S_MAX

REPORT_S = 2.0
LOOK_S = 0.25

ASK_S = 0.05

REVOKE_S_MAX = 6.0
"""The time for a router that restarts to learn of a revocation."""

log = logging.getLogger(__name__)


class Actors:
    """The routers and workers of a Ray namespace, by name. Creating one that is there changes nothing."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._node_ids: dict[str, str] = {}  # by name of the worker

    def add_router(self, name: str, settings: RouterSettings) -> None:
        """Start a router on the node of this process, without which it is useless."""
        RAY.remote(RouterActor).options(**self._beside(name)).remote(settings, name)

    def add_store(self, settings: ClusterSettings, *, waits: bool) -> None:
        """Start the processes of the store on the node of this process; wait until they are ready if it
        `waits`. Raises StoreError then."""
        options, telemetry = self._beside(STORE), settings.fleets[0].router.telemetry
        actor = RAY.remote(StoreActor).options(**options).remote(settings.programs, telemetry)
        if waits:
            actor.wait_until_ready.remote().future().result()  # Ray warns of its own get in an async actor

    def _beside(self, name: str) -> dict[str, Any]:
        here = NodeAffinitySchedulingStrategy(RAY.get_runtime_context().get_node_id(), soft=False)
        own = {"name": name, "namespace": self._namespace, "get_if_exists": True}
        return {**BESIDE, **own, "scheduling_strategy": here}

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None:
        """Start a worker; it is ready with its first heartbeat to these routers. A worker that cannot be
        scheduled waits for capacity. May be called on another thread."""
        demand = demand_of(worker)
        try:
            placement_group = RAY.util.get_placement_group(worker.name)
        except ValueError:
            existing: dict[str, list[str]] = {}
            for name, node_id in self._node_ids.items():
                existing.setdefault(name.rpartition("-")[0], []).append(node_id)
            node_id = assign([demand], nodes(), existing).node_ids.get(worker.name)
            if node_id is not None:
                self._node_ids[worker.name] = node_id
            packed: dict[str, Any] = {"strategy": "STRICT_PACK", "_soft_target_node_id": node_id}
            placement_group = RAY.util.placement_group(
                demand.bundles,
                name=worker.name,
                lifetime="detached",
                bundle_label_selector=[dict(demand.labels)] * len(demand.bundles),
                **(packed if demand.nodes == 1 else {"strategy": "PACK"}),
            )
        options = {**LASTING, **actor_options(worker, placement_group, 0)}
        RAY.remote(WorkerActor).options(
            **options, name=worker.name, namespace=self._namespace, get_if_exists=True
        ).remote(worker, routers, self._namespace, placement_group)

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None:
        """Explain in one line why Ray cannot schedule these workers beside all that runs now; None if it
        can."""
        return unschedulable_reason(map(demand_of, workers), nodes())

    def adopt(self, name: str) -> None:
        """Note the node of a worker that was started before this process."""
        with contextlib.suppress(ValueError):  # it was not, or has left
            table = RAY.util.placement_group_table(RAY.util.get_placement_group(name))
            if node_id := next(iter(table["bundles_to_node_id"].values()), ""):
                self._node_ids[name] = node_id

    def remove_worker(self, name: str) -> None:
        """Stop a worker without a restart, if it exists; it should have been drained. May be called on
        another thread."""
        self._node_ids.pop(name, None)
        self.kill(name)
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            RAY.util.remove_placement_group(RAY.util.get_placement_group(name))

    def remove_store(self) -> None:
        """Stop the processes of the store, if there are any; an owner of memory signs off at its master."""
        with contextlib.suppress(ray.exceptions.RayError, ValueError, TimeoutError):
            store = RAY.get_actor(STORE, self._namespace)
            store.stop.remote().future().result(STORE_STOP_S_MAX)
        self.kill(STORE)

    def kill(self, name: str, *, restart: bool = False) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            RAY.kill(RAY.get_actor(name, self._namespace), no_restart=not restart)


class Supervisor:
    """The actor. Ray restarts its process whenever it ends."""

    def __init__(self, settings: ClusterSettings, server: str, job_id: str | None) -> None:
        """Start the cluster, or adopt it. `server` names this start of it. When the Ray job `job_id` ends,
        so does the cluster; None: it lasts until it is stopped."""
        start_logs(settings.fleets[0].router.telemetry)
        # Ray warns of an actor that ends with its placement group: they are removed together.
        logging.getLogger("ray.actor").setLevel(logging.ERROR)
        self._settings = settings
        self._server = server
        self._job_id = job_id
        self._journal = Journal(RayStore(), settings.namespace)
        self._actors = Actors(settings.namespace)
        self._plan = ClusterPlan()
        self._writing = RLock()  # held by one thread that writes
        self._scalers: list[Scaler] = []
        self._index = {fleet.router.name: index for index, fleet in enumerate(settings.fleets)}
        self._reports = {fleet.router.name: EdgeReports() for fleet in settings.fleets}
        self._registry = Registry(
            self._write_members, self._authority, time.time, self._join_address, self._router_addresses
        )
        loop = asyncio.get_running_loop()
        self._start = loop.create_task(self._open())
        self._tasks = [self._start, loop.create_task(self._hold_lease())]
        if settings.detached_folder is not None:
            self._tasks.append(loop.create_task(self._keep_endpoint(settings.detached_folder)))
        self._start.add_done_callback(partial(exit_on_error, what="supervisor", report_s=REPORT_S))
        for task in self._tasks[1:]:
            task.add_done_callback(partial(exit_on_error, what="supervisor"))

    async def started(self) -> ClusterPlan:
        """Return the plan when all routers and workers were created. Their processes may still start. Those
        of a fleet without requests start again, for an endpoint needs one of each fleet."""
        await self._start
        for scaler in self._scalers:
            await scaler.wake()
        return self._plan

    async def serves(self) -> None:
        if not self._plan.served:
            await asyncio.to_thread(self._write, served=True)

    async def carry_out(self, fleet: str, order: SupervisorOrder) -> object:
        """Carry out an order about the fleet whose first router is `fleet`, or about edges. Raises
        RequestError, Unserved."""
        await self._start
        match order:
            case Scale(counts, pending):
                return await self._scalers[self._index[fleet]].scale(counts, pending=pending)
            case Roles():
                return await self._scalers[self._index[fleet]].roles()
            case Reset(edge):
                return await self._reset(fleet, edge)
            case ListEdges() | MakeToken() | RevokeEdge():
                answer = await self._registry.carry_out(order)
                if isinstance(order, RevokeEdge):  # a router that starts reads it from the journal
                    await asyncio.gather(*map(self._send_revoked, self._plan.routers))
                return answer

    async def report(self, fleet: str, edge: str, misses: Misses, resets: int, open_requests: int = 0) -> int:
        """Count what an edge has refused or answered since its last report, and note how many `resets` of the
        prefix cache it knows, and its `open_requests`. Return the number of resets."""
        await self._start
        state = EdgeState(at_s=_now_s(), resets=resets, open_requests=open_requests)
        self._reports[fleet].add(edge, misses, state)
        return self._plan.resets.get(fleet, 0)

    def failed_rounds(self) -> int:
        """Return the number of failed rounds of what this process repeats, which the metrics have."""
        return FAILED_ROUNDS.total()

    def misses(self, fleet: str) -> Misses:
        return self._reports[fleet].misses

    async def _reset(self, fleet: str, edge: str) -> int:
        """Count a reset of the prefix cache, ordered at `edge`; return their number when all other edges that
        run know it."""
        resets = await asyncio.to_thread(self._write_reset, fleet)
        while self._reports[fleet].lags(edge, resets, _now_s()):  # noqa: ASYNC110 - edges may also fall silent
            await asyncio.sleep(ASK_S)
        return resets

    async def join(self, request: JoinRequest) -> JoinAnswer:
        await self._start
        return await self._registry.join(request)

    async def _send_revoked(self, router: str) -> None:
        """Send a router the revoked certificates. One that has been away reads them when it starts."""
        serials = frozenset(self._plan.members.revoked)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REVOKE_S_MAX):
                while True:
                    with contextlib.suppress(WorkerGone):
                        return await self._call(router, lambda actor: actor.revoke.remote(serials))
                    await asyncio.sleep(ASK_S)

    async def _join_address(self) -> str:
        return await self._call(self._plan.routers[0], lambda actor: actor.join_address.remote())

    async def _router_addresses(self) -> tuple[str, ...]:
        calls = (self._call(name, lambda actor: actor.address.remote()) for name in self._plan.routers)
        found = await asyncio.gather(*calls, return_exceptions=True)
        return tuple(address for address in found if isinstance(address, str))

    async def _call(self, router: str, call: Callable[[Any], Any]) -> Any:  # noqa: ANN401 - Ray's types
        return await call_router((router, self._settings.namespace), call)

    def _authority(self) -> Authority | None:
        key, tls = self._settings.authority_key, self._settings.fleets[0].router.tls
        return None if key is None or tls is None else Authority(key, tls.ca)

    async def _open(self) -> None:
        fleets, namespace = self._settings.fleets, self._settings.namespace
        plan = await asyncio.to_thread(self._journal.open)
        if plan.server == self._server and plan.stopped:
            await asyncio.to_thread(kill_actors, plan, self._actors)
            await asyncio.to_thread(self._actors.kill, SUPERVISOR)
            await asyncio.Event().wait()  # for the end of this process
        if plan.server != self._server:
            if not plan.stopped:
                log.warning("routers and workers that an earlier server left in %s are removed", namespace)
                await asyncio.to_thread(kill_actors, plan, self._actors)
            routers = tuple(name for fleet in fleets for name in fleet.router.names)
            plans = tuple(map(initial_plan, fleets))
            plan = ClusterPlan(
                server=self._server, stopped=False, routers=routers, fleets=plans, members=plan.members
            )
            await asyncio.to_thread(self._journal.write, plan)
        self._plan = plan
        for fleet in fleets:
            for name in fleet.router.names:
                await asyncio.to_thread(self._actors.add_router, name, fleet.router)
        if self._settings.programs:
            await asyncio.to_thread(self._actors.add_store, self._settings, waits=not plan.served)
        for index, fleet in enumerate(fleets):
            for name in plan.fleets[index].workers:
                await asyncio.to_thread(self._actors.adopt, name)
            scaler = self._scaler(index, fleet, plan.fleets[index])
            self._scalers.append(scaler)
            if not plan.served:  # else it tries again and again while the cluster serves
                await scaler.start()
            self._tasks.append(task := asyncio.create_task(scaler.run()))
            task.add_done_callback(partial(exit_on_error, what="supervisor"))

    def _scaler(self, index: int, fleet: FleetSettings, plan: FleetPlan) -> Scaler:
        finders = (find_router(name, self._settings.namespace) for name in fleet.router.names)
        router = RouterClient(*finders, tls=fleet.router.tls, fence=lambda: self._journal.number)
        save = partial(self._write_fleet, index)
        return Scaler(self._actors, router, save, fleet, self._reports[fleet.router.name], plan)

    def _write_fleet(self, index: int, fleet: FleetPlan) -> None:
        """Write a changed plan of a fleet to the journal. Raises Fenced."""
        with self._writing:
            self._write(fleets=(*self._plan.fleets[:index], fleet, *self._plan.fleets[index + 1 :]))

    def _write_reset(self, fleet: str) -> int:
        """Write one more reset of a fleet's prefix cache to the journal. Raises Fenced."""
        with self._writing:
            resets = self._plan.resets.get(fleet, 0) + 1
            self._write(resets={**self._plan.resets, fleet: resets})
            return resets

    def _write_members(self, change: Callable[[Members], Members]) -> Members:
        """Write changed members to the journal. Raises what `change` raises, and Fenced."""
        with self._writing:
            if (members := change(self._plan.members)) != self._plan.members:
                self._write(members=members)
            return members

    def _write(self, **changes: Any) -> None:  # noqa: ANN401 - fields of the plan
        """Write a changed plan to the journal. Raises Fenced."""
        with self._writing:
            plan = replace(self._plan, **changes)
            self._journal.write(plan)
            self._plan = plan

    async def _keep_endpoint(self, root: Path) -> None:
        """Start the endpoint of a detached server whenever none runs."""
        backoff, server = Backoff(), read_record(root)
        assert server is not None, "it is written before Ray starts"

        async def look() -> None:
            if endpoint_pid(root) is None:
                await asyncio.sleep(backoff.begin("endpoint", asyncio.get_running_loop().time()))
                log.warning("the endpoint has ended and is started again")
                process = start_endpoint(root, server.cwd)
                await asyncio.to_thread(process.wait)

        await every(LOOK_S, look, "endpoint")

    async def _hold_lease(self) -> None:
        """End the cluster when the process that it belongs to has ended: the next incarnation of this actor
        finds a stopped plan."""
        job_id = self._job_id
        if job_id is None:
            return
        await every(LEASE_S, lambda: asyncio.to_thread(job_has_ended, job_id), "lease")
        log.warning("the process that started this cluster has ended, and with it the cluster")
        await asyncio.to_thread(stop_plan, self._settings.namespace)
        os._exit(1)


def stop_plan(namespace: str) -> ClusterPlan:
    """Write to the journal that nothing of the plan should run, and return it. The supervisor can write, and
    so act, no more."""
    journal = Journal(RayStore(), namespace)
    while True:
        plan = replace(journal.open(), stopped=True)
        with contextlib.suppress(Fenced):  # by a supervisor that Ray has started again meanwhile
            journal.write(plan)
            return plan


def kill_actors(plan: ClusterPlan, actors: Actors) -> None:
    """Kill the workers and routers of a plan, and give back what Ray has reserved for them."""
    for name in plan.workers:
        actors.remove_worker(name)
    for name in plan.routers:
        actors.kill(name)
    actors.remove_store()


def job_has_ended(job_id: str) -> bool:
    """Return whether Ray has seen the end of the process of this job. Ray watches its connection."""
    known = cast("list[dict[str, Any]]", jobs())
    return any(job["JobID"] == job_id and job["IsDead"] for job in known)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
