"""Makes the fleet larger and smaller: looks, asks autoscale.py, starts workers, drains and removes them."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from tidemill.cluster.autoscale import DOWN_S, Bounds, Change, Misses, Sample, decide, sample_of
from tidemill.cluster.service import FleetStatus, WorkerStatus
from tidemill.cluster.settings import WorkerSettings
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError, Role, Unserved

LOOK_S = 2.0

IDLE_LOOKS = 2
"""A drained worker goes when it was without work so often: what was placed on it just before has come, and
has been handed over."""

log = logging.getLogger(__name__)


class Cluster(Protocol):
    """launch.Cluster. Both calls are made from threads."""

    def add_worker(self, worker: WorkerSettings) -> None: ...
    def remove_worker(self, name: str) -> None: ...


class Service(Protocol):
    async def status(self) -> FleetStatus: ...
    async def drain(self, worker: str, *, drain: bool, force: bool = False) -> None: ...


class Scaler:
    """One for a cluster: the frontend that started it."""

    def __init__(
        self,
        cluster: Cluster,
        service: Service,
        workers: Sequence[WorkerSettings],
        bounds: Mapping[Role, Bounds],
        misses: Callable[[], Misses],
    ) -> None:
        """`workers` are there at the start; new ones are like the first of their role. Roles without `bounds`
        stay as they are."""
        self._cluster = cluster
        self._service = service
        self._bounds = bounds
        self._misses = misses
        self._models = {worker.role: worker for worker in reversed(workers)}
        self._names: dict[Role, list[str]] = {
            role: [one.name for one in workers if one.role == role] for role in bounds
        }
        self._leaving: dict[str, int] = {}  # names, and how often they were seen without work
        self._history = deque[Sample](maxlen=int(DOWN_S / LOOK_S) + 2)
        assert all(self._names.values()), "a role that is scaled has a worker to be like"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_S)

    async def look(self, now_s: float) -> None:
        try:
            status = await self._service.status()
        except Unserved:  # the router is away: nothing is known, nothing is changed
            return
        await self._remove_idle(status)
        self._history.append(sample_of(status, self._wanted(), self._misses(), now_s))
        for change in decide(tuple(self._history), self._bounds):
            log.info("%s workers: %+d, for %s", change.role, change.by, change.reason)
            await self._act(change, status)

    def _wanted(self) -> dict[Role, int]:
        return {role: len(names) for role, names in self._names.items()}

    async def _act(self, change: Change, status: FleetStatus) -> None:
        for _ in range(change.by):
            name = self._new_name(change.role)
            worker = replace(self._models[change.role], name=name)
            try:
                await asyncio.to_thread(self._cluster.add_worker, worker)
            except (TidemillError, ValueError) as error:  # ValueError: Ray still knows one of this name
                log.warning("%s cannot be started: %s", name, error)
                return
            self._names[change.role].append(name)
        for name in self._least_loaded(change.role, status)[: max(0, -change.by)]:
            try:
                await self._service.drain(name, drain=True)
            except (RequestError, Unserved) as error:  # it just died, or does work that nobody else does
                log.info("%s stays: %s", name, error)
                continue
            self._names[change.role].remove(name)
            self._leaving[name] = 0

    async def _remove_idle(self, status: FleetStatus) -> None:
        rows = {worker.info.name: worker for worker in status.workers}
        for name in list(self._leaving):
            self._leaving[name] = self._leaving[name] + 1 if _is_idle(rows.get(name)) else 0
            if self._leaving[name] >= IDLE_LOOKS:
                del self._leaving[name]
                await asyncio.to_thread(self._cluster.remove_worker, name)

    def _least_loaded(self, role: Role, status: FleetStatus) -> list[str]:
        """Those that are not ready first, then those with the least to hand over, of equals the newest."""
        names = self._names[role]
        ready = {worker.info.name: worker for worker in status.workers if worker.state == "ready"}

        def order(name: str) -> tuple[int, int, int]:
            worker = ready.get(name)
            load = None if worker is None else worker.load
            rows = 0 if load is None else load.running_rows + load.waiting_rows
            return (-1 if load is None else load.queued_tokens, rows, -names.index(name))

        return sorted(names, key=order)

    def _new_name(self, role: Role) -> str:
        taken = {*self._names[role], *self._leaving}
        return next(name for index in range(len(taken) + 1) if (name := f"{role}-{index}") not in taken)


def _is_idle(worker: WorkerStatus | None) -> bool:
    """Also when it is gone: Ray would only start it again."""
    if worker is None:
        return True
    load = worker.load
    return worker.state == "draining" and not (load.running_rows or load.waiting_rows or load.queued_tokens)
