"""Workers as Ray actors: Ray starts them, restarts them, and knows where they are."""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
import ray.actor
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidemill.cluster.observability.logs import start_logs
from tidemill.cluster.rpc.router_client import FindRouter
from tidemill.cluster.settings import RouterSettings, WorkerSettings
from tidemill.cluster.worker.worker_process import Ready, State, WorkerProcess
from tidemill.workers.messages import WorkerGone
from tidemill.workers.parallel.link import Ended
from tidemill.workers.settings import EngineSettings

_Answer = TypeVar("_Answer")

FIND_S_MAX = 1.0

LAST_WORDS_S = 5.0
"""A worker that cannot start says why for this long before its process ends and Ray tries again."""

LOOK_S = 0.2

RAY: Any = ray  # much of it has no types

log = logging.getLogger(__name__)


async def ask_router(router: tuple[str, str], ask: Callable[[Any], Awaitable[_Answer]]) -> _Answer:
    """What the actor of this name and namespace answers to `ask`. Raises WorkerGone when it is away."""
    try:
        actor = await asyncio.to_thread(RAY.get_actor, *router)
        async with asyncio.timeout(FIND_S_MAX):
            return await ask(actor)
    except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise WorkerGone(f"the router is away: {error}") from error


def find_router(name: str, namespace: str) -> FindRouter:
    """Asks Ray where the router of this name is now."""
    return lambda: ask_router((name, namespace), lambda actor: actor.address.remote())


def options_of(
    settings: WorkerSettings,
    place: Any,  # noqa: ANN401 - Ray's types
    index: int,
) -> dict[str, Any]:
    """How Ray runs rank `index` of a worker; `place` is the placement group of its ranks."""
    return {
        "num_cpus": settings.num_cpus,
        "num_gpus": settings.num_gpus,
        "resources": dict(settings.resources),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=index),
    }


class WorkerActor:
    """The process of one worker, or of the leader of its group. When the worker breaks, the process ends and
    Ray starts its next life. SIGTERM tells it to go: it hands its work over, and has no next life."""

    def __new__(cls, *_: Any, **__: Any) -> Self:  # noqa: ANN401 - whatever __init__ takes
        """Ray makes actors in the main thread, which alone can take signals, and starts them in another. It
        also makes one of its own classes from this one, in the process that asks for actors."""
        actor = super().__new__(cls)
        if not issubclass(cls, ray.actor.ActorClass):
            signal.signal(signal.SIGTERM, actor.leave)
        return actor

    def __init__(
        self,
        settings: WorkerSettings,
        routers: RouterSettings,
        namespace: str,
        place: Any,  # noqa: ANN401 - a placement group with a bundle for each rank, one at least
    ) -> None:
        start_logs(settings.telemetry, worker=settings.name)
        node: str = RAY.util.get_node_ip_address()
        self._settings = settings
        self._place = place
        self._ranks: list[Any] = []  # Ray ends an actor that nobody refers to
        self._loop = asyncio.get_running_loop()
        self._process = WorkerProcess(
            settings, settings.host or node, secrets.token_hex(3), node, self._start_ranks
        )
        self._routers = [(name, namespace) for name in routers.names]
        self._memory = (
            None if routers.memory_router is None else find_router(routers.memory_router, namespace)
        )
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._ended)
        self._watch = self._loop.create_task(self._process.hangs())
        self._watch.add_done_callback(self._hung)

    def leave(self, *_: object) -> None:
        """Called in the main thread."""
        self._loop.call_soon_threadsafe(self._process.leave)

    async def exit(self) -> None:
        """Must be called as an actor's method: so Ray knows that this is no failure."""
        ray.actor.exit_actor()

    async def _run(self) -> None:
        await asyncio.sleep(await self._wait_s())
        await self._process.run([find_router(*router) for router in self._routers], self._memory)

    async def _wait_s(self) -> float:
        """Before this life starts: see cluster/supervisor/restart_backoff.py. A router that is away knows of
        no earlier one."""
        with suppress(WorkerGone):
            return await ask_router(self._routers[0], lambda actor: actor.begin.remote(self._settings.name))
        return 0.0

    async def state(self) -> State:
        return self._process.state

    def _start_ranks(self, engine: EngineSettings, folder: Path) -> Ended:
        """Called on the thread that builds the engine."""
        for index in range(1, engine.tensor_parallel_size):
            options = options_of(self._settings, self._place, index)
            actor = RAY.remote(RankActor).options(max_restarts=0, **options)
            self._ranks.append(actor.remote(self._settings, engine, index, str(folder)))
        return lambda: asyncio.run_coroutine_threadsafe(self._why_ended(), self._loop).result()

    async def _why_ended(self) -> str | None:
        try:
            async with asyncio.timeout(LOOK_S):
                await asyncio.gather(*(rank.is_alive.remote() for rank in self._ranks))
        except TimeoutError:
            return None
        except ray.exceptions.RayError as error:
            return str(error)
        return None

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            log.warning("%s has handed its work over and goes", self._settings.name)
            RAY.get_runtime_context().current_actor.exit.remote()
            return
        served = isinstance(self._process.state, Ready)
        failed = self._process.fail(error)
        if failed.expected:  # whoever started the worker reads it from the state
            task.get_loop().call_later(LAST_WORDS_S, self._exit, failed.reason)
            return
        log.error("%s broke", self._settings.name, exc_info=error)
        task.get_loop().call_later(0.0 if served else LAST_WORDS_S, self._exit, failed.reason)

    def _hung(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._exit("its step loop stands still")

    def _exit(self, reason: str) -> None:
        log.error("%s ends: %s", self._settings.name, reason)
        os._exit(1)


class RankActor:
    """The process of another rank of a group. It ends with its leader, and whatever breaks here ends it."""

    def __init__(self, leader: WorkerSettings, engine: EngineSettings, index: int, folder: str) -> None:
        from tidemill.workers.engine.build_rank import build_rank  # noqa: PLC0415 - torch
        from tidemill.workers.parallel.rank import carry_out  # noqa: PLC0415 - torch

        start_logs(leader.telemetry, worker=leader.name)
        self._name = f"rank {index} of {leader.name}"
        meet = Path(folder)
        self._task = asyncio.get_running_loop().create_task(
            carry_out(meet, index, lambda: build_rank(engine, index, meet))
        )
        self._task.add_done_callback(self._ended)

    async def is_alive(self) -> bool:
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s broke: %s", self._name, error)
        os._exit(1)
