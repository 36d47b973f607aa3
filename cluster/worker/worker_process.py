"""One incarnation of a worker: build the engine, open the data plane, send heartbeats. It does not know
Ray."""

import asyncio
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pkgutil import resolve_name
from typing import cast

from tidemill.cluster.observability.spans import open_tracer
from tidemill.cluster.observability.worker_line import log_lines
from tidemill.cluster.rpc.router_failover import FindRouter
from tidemill.cluster.settings import WorkerSettings
from tidemill.cluster.worker.assignment import Assignment
from tidemill.cluster.worker.heartbeats import Heartbeats, UnsentAnnouncements
from tidemill.cluster.worker.server import WorkerServer
from tidemill.cluster.worker.tracing import TracedEngine
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.periodic import every
from tidemill.workers.contract.engine import Build, RunningEngine
from tidemill.workers.messages import EngineInfo, WorkerId, WorkerInfo
from tidemill.workers.parallel.link import StartRanks
from tidemill.workers.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Loading:
    done_bytes: int = 0
    total_bytes: int = 0  # 0 while it is unknown


@dataclass(frozen=True, slots=True)
class Ready:
    """The router knows the worker."""

    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker failed. `expected` failures name their fix; others are bugs."""

    reason: str
    expected: bool


State = Loading | Ready | Failed


LEAVE_S_MAX = 28.0
"""The time limit of a drain after an order to exit."""

HANG_S_MAX = 120.0
"""The time after which a step loop without progress is stuck. It is longer than the ranks of a group wait for
each other."""

SWITCH_S = 2e-4
"""The time after which a thread yields the interpreter: the thread of the steps, the event loop and those of
gRPC wait for each other several times per step."""

COLLECT_ALLOCATIONS = 50_000
"""The new objects after which the youngest are collected: those of several hundred steps."""

LOOK_S = 0.05
WATCH_S = 5.0


def favour_steps() -> None:
    """Let the interpreter of this process disturb steps less. Call it when the engine is built."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()  # so that a collection does not visit what the start has made
    gc.set_threshold(COLLECT_ALLOCATIONS, *gc.get_threshold()[1:])


class WorkerProcess:
    def __init__(
        self, settings: WorkerSettings, host: str, life: str, node: str, start_ranks: StartRanks
    ) -> None:
        """Create a worker. `life` distinguishes this incarnation from all others. The data plane binds to
        `host`."""
        self.state: State = Loading()
        self._stop_requested = asyncio.Event()
        self._engine: RunningEngine | None = None
        self._settings = settings
        self._host = host
        self._worker = WorkerId(f"{settings.name}.{life}")
        self._node = node
        self._start_ranks = start_ranks

    async def run(self, routers: Sequence[FindRouter], memory: FindRouter | None = None) -> None:
        """Serve until something breaks, and raise it, or until `leave`. Orders of the first of `routers`
        count, and about memory those of `memory` if it is given. Raises ModelError and other start errors."""
        build = cast("Build", resolve_name(self._settings.build))
        engine = self._settings.engine.of_worker(self._settings.name, self._host)
        built = await asyncio.to_thread(build, engine, self._progress, self._start_ranks)
        favour_steps()
        if self._settings.role not in built.info.roles:
            roles = ", ".join(built.info.roles)
            raise SettingsError(f"the engine does no {self._settings.role} work: set the role to {roles}")
        tls = self._settings.tls
        tracer, close_tracer = await asyncio.to_thread(
            open_tracer, self._settings.telemetry, self._settings.name
        )
        page_tokens = built.info.page_tokens
        traced = built.engine if tracer is None else TracedEngine(built.engine, tracer, page_tokens)
        plane = WorkerServer(traced, self._worker, tls=tls)
        try:
            duties = Assignment(built.engine, self._info(built.info, await plane.start(self._host)))
            unsent = UnsentAnnouncements(built.engine)
            heartbeats = [
                Heartbeats(built.engine, duties, find, unsent, tls, plane.revoke) for find in routers
            ]
            heartbeats[0].follow(lambda: self._router_answered(duties.info), budgets=memory is None)
            if memory is not None:
                heartbeats.append(Heartbeats(built.engine, duties, memory, None, tls))
            self._engine = built.engine
            async with asyncio.TaskGroup() as tasks:
                works = [tasks.create_task(work.run()) for work in (built.engine, *heartbeats)]
                works.append(tasks.create_task(log_lines(self._settings.name, built.engine.load)))
                if built.group is not None:
                    works.append(tasks.create_task(built.group.watch()))
                await self._stop_requested.wait()
                duties.leave()
                await _handed_over(built.engine, plane)
                for work in works:
                    work.cancel()
        finally:
            await plane.stop()
            await asyncio.to_thread(close_tracer)

    def leave(self) -> None:
        self._stop_requested.set()

    async def hangs(self) -> None:
        """Return when the engine has made no progress for too long."""
        progress, since_s = -1, 0.0
        now_s = asyncio.get_running_loop().time

        async def hangs() -> bool:
            nonlocal progress, since_s
            if self._engine is None or self._engine.progress != progress:
                progress, since_s = (-1 if self._engine is None else self._engine.progress), now_s()
            return now_s() - since_s > HANG_S_MAX

        await every(WATCH_S, hangs, "hang of the engine")

    def fail(self, error: BaseException) -> Failed:
        cause = error
        while isinstance(cause, BaseExceptionGroup):  # of a task group
            cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
        text = " ".join(str(cause).split())
        expected = isinstance(cause, TidemillError | OSError)
        self.state = failed = Failed(text if expected else f"{type(cause).__name__}: {text}", expected)
        return failed

    def _progress(self, done_bytes: int, total_bytes: int) -> None:
        self.state = Loading(done_bytes, total_bytes)

    def _router_answered(self, info: WorkerInfo) -> None:
        self.state = Ready(info)

    def _info(self, engine: EngineInfo, address: str) -> WorkerInfo:
        engine = replace(engine, device=device_of(self._settings, self._node, engine.device))
        return WorkerInfo(
            **{field.name: getattr(engine, field.name) for field in fields(engine)},
            worker=self._worker,
            name=self._settings.name,
            role=self._settings.role,
            address=address,
            pid=os.getpid(),
            node=self._node,
        )


def device_of(worker: WorkerSettings, node: str, device: str) -> str:
    """Return the name in the cluster of the `device` of a node. Routers lend memory within a device, so a
    worker whose ranks are on several nodes has one of its own."""
    own = f"/{worker.name}" if worker.engine.tensor_parallel_nodes > 1 else ""
    return f"{node}/{device}{own}"


async def _handed_over(engine: RunningEngine, plane: WorkerServer) -> None:
    """Wait until all calls have ended, their callers know it, and their work is stored, at most
    LEAVE_S_MAX."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S_MAX):
            while plane.num_calls:  # noqa: ASYNC110 - they end one by one, for many reasons
                await asyncio.sleep(LOOK_S)
            await engine.drain_publications()
            await plane.flush()
