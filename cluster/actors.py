"""Workers and the router as Ray actors: Ray starts them, restarts them, and knows where they are."""

import asyncio
import logging
import os
import secrets
from typing import Any, cast

import ray
import ray.exceptions

from tidemill.cluster.router_client import FindRouter
from tidemill.cluster.router_service import Router, RouterService
from tidemill.cluster.settings import RouterSettings, WorkerSettings
from tidemill.cluster.worker_process import Ready, State, WorkerProcess, resolve
from tidemill.workers.messages import WorkerGone

FIND_S_MAX = 3.0

LAST_WORDS_S = 5.0
"""A worker that cannot start says why for this long before its process ends and Ray tries again."""

RAY: Any = ray  # much of it has no types

log = logging.getLogger(__name__)


def find_router(name: str, namespace: str) -> FindRouter:
    """Asks Ray where the router of this name is now."""

    async def find() -> str:
        try:
            router = await asyncio.to_thread(RAY.get_actor, name, namespace)
            async with asyncio.timeout(FIND_S_MAX):
                return await router.address.remote()
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            raise WorkerGone(f"the router is away: {error}") from error

    return find


class WorkerActor:
    """The process of one worker. When the worker breaks, the process ends and Ray starts its next life."""

    def __init__(self, settings: WorkerSettings, router_name: str, namespace: str) -> None:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        node: str = RAY.util.get_node_ip_address()
        self._name = settings.name
        self._process = WorkerProcess(settings, settings.host or node, secrets.token_hex(3), node)
        run = self._process.run(find_router(router_name, namespace))
        self._task = asyncio.get_running_loop().create_task(run)
        self._task.add_done_callback(self._ended)

    async def state(self) -> State:
        return self._process.state

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        assert error is not None, "a worker runs until something breaks"
        served = isinstance(self._process.state, Ready)
        failed = self._process.fail(error)
        if failed.expected:  # whoever started the worker reads it from the state
            task.get_loop().call_later(LAST_WORDS_S, self._exit, failed.reason)
            return
        log.error("%s broke", self._name, exc_info=error)
        task.get_loop().call_later(0.0 if served else LAST_WORDS_S, self._exit, failed.reason)

    def _exit(self, reason: str) -> None:
        log.error("%s ends: %s", self._name, reason)
        os._exit(1)


class RouterActor:
    """The process of the router. What it knew comes back with the workers' next heartbeats."""

    def __init__(self, settings: RouterSettings) -> None:
        loop = asyncio.get_running_loop()
        build = resolve(settings.build)
        router = cast("Router", build(loop.time, broker=settings.broker, expected=settings.expected))
        self._service = RouterService(router)
        host: str = settings.host or RAY.util.get_node_ip_address()
        self._address = loop.create_task(self._service.start(host))
        self._ticks = loop.create_task(self._service.run())

    async def address(self) -> str:
        return await self._address
