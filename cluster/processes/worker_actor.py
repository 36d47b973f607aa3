"""Workers as Ray actors: Ray starts, restarts and locates them."""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any, Self, TypeVar

import ray
import ray.actor
import ray.exceptions
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidemill.cluster.observability.logs import start_logs
from tidemill.cluster.processes.supervisor_client import RAY, find_actor
from tidemill.cluster.rpc.router_failover import FindRouter
from tidemill.cluster.settings import RouterSettings, WorkerSettings
from tidemill.cluster.worker.worker_process import Ready, State, WorkerProcess
from tidemill.workers.malloc import keep_freed_memory
from tidemill.workers.messages import WorkerGone
from tidemill.workers.parallel.link import Ended, StartRanks
from tidemill.workers.parallel.network import Meeting, Network
from tidemill.workers.settings import EngineSettings, HostedSettings

_Answer = TypeVar("_Answer")
_Settings = TypeVar("_Settings", bound=HostedSettings)

FIND_S_MAX = 1.0

REPORT_FAILURE_S = 5.0
"""The time for which a worker that failed to start reports the reason before its process exits."""

PROBE_S = 0.2
"""The time within which Ray reports the end of a rank's process."""

log = logging.getLogger(__name__)


async def call_router(router: tuple[str, str], call: Callable[[Any], Awaitable[_Answer]]) -> _Answer:
    """Call the router actor of this name and namespace. Raises WorkerGone when it does not answer."""
    try:
        actor = await find_actor(*router)
        async with asyncio.timeout(FIND_S_MAX):
            return await call(actor)
    except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise WorkerGone(f"the router is away: {error}") from error


def find_router(name: str, namespace: str) -> FindRouter:
    """Return a function that asks Ray for the current address of the router of this name."""
    return lambda: call_router((name, namespace), lambda actor: actor.address.remote())


def actor_options(
    settings: WorkerSettings,
    placement_group: Any,  # noqa: ANN401 - Ray's types
    index: int,
) -> dict[str, Any]:
    """Return Ray's options for rank `index` of a worker, whose placement group has WorkerDemand.bundles."""
    engine = settings.engine
    bundle = index if engine.tensor_parallel_nodes == 1 else index // engine.ranks_per_node
    return {
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
        "resources": dict(settings.resources),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group, placement_group_bundle_index=bundle
        ),
    }


def assigned_device(device: str, gpu_ids: Sequence[str], visible: Sequence[str] | None) -> str:
    """Return the device of an actor for which Ray has reserved these GPUs. `visible` are those of
    CUDA_VISIBLE_DEVICES, among which torch counts; None: all. Ray sets it to those of the actor, unless
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set."""
    if device != "cuda" or not gpu_ids:
        return device
    index = visible.index(gpu_ids[0]) if visible else int(gpu_ids[0])
    return f"cuda:{index}"


def on_assigned_device(engine: _Settings, device: str) -> _Settings:
    """Return the settings with the device of this actor, where `device` is that of the configuration."""
    gpu_ids: list[str] = RAY.get_runtime_context().get_accelerator_ids().get("GPU", [])
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return replace(engine, device=assigned_device(device, gpu_ids, visible))


def on_reserved_nodes(engine: _Settings, node_ids: Collection[str]) -> _Settings:
    """Return the settings for the nodes of the bundles: on a single one, ranks meet as on any one node."""
    return replace(engine, tensor_parallel_nodes=1) if len(set(node_ids)) == 1 else engine


def network_of(settings: WorkerSettings, engine: HostedSettings, node: str) -> Network | None:
    """Return the network of a rank on the node with this address; None if all ranks are on one node."""
    if engine.tensor_parallel_nodes == 1:
        return None
    return Network(host=settings.host or node, certificates=settings.tls)


class WorkerActor:
    """The process of one worker, or of the leader of its rank group. When the worker fails, the process exits
    and Ray restarts it. On SIGTERM the worker hands its requests over and is not restarted."""

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: ANN401 - the arguments of __init__
        """Install the SIGTERM callback. Ray calls `__new__` in the main thread, which alone can receive
        signals, and `__init__` in another. In the process that creates actors, Ray also derives a class of
        its own from this one."""
        actor = super().__new__(cls)
        if not issubclass(cls, ray.actor.ActorClass):
            signal.signal(signal.SIGTERM, actor.leave)
        return actor

    def __init__(
        self,
        settings: WorkerSettings,
        routers: RouterSettings,
        namespace: str,
        placement_group: Any,  # noqa: ANN401 - Ray's type
    ) -> None:
        keep_freed_memory()
        start_logs(settings.telemetry, worker=settings.name)
        node: str = RAY.util.get_node_ip_address()
        self._settings = settings
        self._placement_group = placement_group
        self._ranks: list[Any] = []  # keeps the actors alive, Ray ends one without a reference
        self._loop = asyncio.get_running_loop()
        engine = on_assigned_device(settings.engine, settings.engine.device)
        table = RAY.util.placement_group_table(placement_group)
        engine = on_reserved_nodes(engine, table["bundles_to_node_id"].values())
        self._process = WorkerProcess(
            replace(settings, engine=engine),
            settings.host or node,
            secrets.token_hex(3),
            node,
            StartRanks(self._start_ranks, network_of(settings, engine, node)),
        )
        self._routers = [(name, namespace) for name in routers.names]
        self._memory = (
            None if routers.memory_router is None else find_router(routers.memory_router, namespace)
        )
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._on_end)
        self._watch = self._loop.create_task(self._process.hangs())
        self._watch.add_done_callback(self._on_hang)

    def leave(self, *_: object) -> None:
        """Drain the worker and exit; called in the main thread by SIGTERM."""
        self._loop.call_soon_threadsafe(self._process.leave)

    async def exit(self) -> None:
        """Exit without a restart; Ray takes this as intended only when it is called as a remote method."""
        ray.actor.exit_actor()

    async def _run(self) -> None:
        # Importing torch takes as long as the router's start.
        importing = asyncio.to_thread(resolve_name, self._settings.build)
        wait_s, _ = await asyncio.gather(self._wait_s(), importing)
        await asyncio.sleep(wait_s)
        await self._process.run([find_router(*router) for router in self._routers], self._memory)

    async def _wait_s(self) -> float:
        """Return the restart backoff in seconds, see restart_backoff.py; 0 if the router does not answer."""
        with suppress(WorkerGone):
            return await call_router(self._routers[0], lambda actor: actor.begin.remote(self._settings.name))
        return 0.0

    async def state(self) -> State:
        return self._process.state

    def _start_ranks(self, engine: EngineSettings, meeting: Meeting) -> Ended:
        """Start the ranks except the leader; called on the thread that builds the engine."""
        for index in range(1, engine.tensor_parallel_size):
            options = actor_options(self._settings, self._placement_group, index)
            actor = RAY.remote(RankActor).options(max_restarts=0, **options)
            self._ranks.append(actor.remote(self._settings, engine, index, meeting))
        return lambda: asyncio.run_coroutine_threadsafe(self._rank_failure(), self._loop).result()

    async def _rank_failure(self) -> str | None:
        """Return Ray's error about a rank that ended, None while all run."""
        try:
            async with asyncio.timeout(PROBE_S):
                await asyncio.gather(*(rank.is_alive.remote() for rank in self._ranks))
        except TimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return str(error)
        return None

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            log.warning("%s has handed its work over and exits", self._settings.name)
            RAY.get_runtime_context().current_actor.exit.remote()
            return
        was_ready = isinstance(self._process.state, Ready)
        failed = self._process.fail(error)
        if not failed.expected:  # the launcher reads an expected reason from the state
            log.error("%s broke", self._settings.name, exc_info=error)
        delay_s = 0.0 if was_ready and not failed.expected else REPORT_FAILURE_S
        task.get_loop().call_later(delay_s, self._exit, failed.reason)

    def _on_hang(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._exit("its step loop hangs")

    def _exit(self, reason: str) -> None:
        log.error("%s exits: %s", self._settings.name, reason)
        os._exit(1)


class RankActor:
    """The process of a rank other than the leader; it exits with its leader and on any error."""

    def __init__(self, leader: WorkerSettings, engine: EngineSettings, index: int, meeting: Meeting) -> None:
        from tidemill.workers.engine.build_rank import build_rank  # noqa: PLC0415 - torch
        from tidemill.workers.parallel.rank import carry_out  # noqa: PLC0415 - torch

        keep_freed_memory()
        start_logs(leader.telemetry, worker=leader.name)
        engine = on_assigned_device(engine, leader.engine.device)
        self._name = f"rank {index} of {leader.name}"
        network = network_of(leader, engine, RAY.util.get_node_ip_address())
        self._task = asyncio.get_running_loop().create_task(
            carry_out(meeting, index, lambda: build_rank(engine, index, meeting, network), network)
        )
        self._task.add_done_callback(self._on_end)

    async def is_alive(self) -> bool:
        return True

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s broke: %s", self._name, error)
        os._exit(1)
