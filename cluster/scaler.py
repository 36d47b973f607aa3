"""Makes the fleet larger and smaller: looks, asks autoscale.py, starts workers, drains and removes them.

Workers count in the role that they have now, so the bounds hold for these. What a person says goes first: a
worker that somebody drained does not count, and one that was given another role is not drained.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from tidemill.cluster.autoscale import Change, Misses, Sample, decide, sample_of
from tidemill.cluster.service import FleetStatus, WorkerStatus
from tidemill.cluster.settings import FleetSettings, RouterSettings, WorkerSettings, worker_name
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError, Role, Unserved

IDLE_LOOKS = 2
"""A drained worker goes when it was without work at so many looks in a row: what was placed on it just before
has come, and has been handed over."""

log = logging.getLogger(__name__)


class Cluster(Protocol):
    """launch.Cluster. Both calls are made from threads."""

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None: ...
    def remove_worker(self, name: str) -> None: ...


class Service(Protocol):
    async def status(self) -> FleetStatus: ...
    async def drain(self, worker: str, *, drain: bool, force: bool = False) -> None: ...


@dataclass(slots=True)
class _Worker:
    """One that was started and not removed, as it was last heard."""

    started_as: Role
    role: Role
    is_drained: bool = False
    leaves: bool = False  # by our order
    idle_looks: int = 0

    @property
    def counts(self) -> bool:
        """One that is not heard of does, too: it starts, or Ray starts it again."""
        return not (self.is_drained or self.leaves)


class Scaler:
    """One for a fleet, in the frontend that started it."""

    def __init__(
        self,
        cluster: Cluster,
        service: Service,
        fleet: FleetSettings,
        misses: Callable[[], Misses],
    ) -> None:
        """The fleet's workers are there at the start; new ones are like the first of their role. Roles
        without bounds stay as they are."""
        self._cluster = cluster
        self._service = service
        self._fleet = fleet
        self._bounds = fleet.bounds
        self._misses = misses
        self._hysteresis = hysteresis = fleet.hysteresis
        self._models = {worker.role: worker for worker in reversed(fleet.workers)}
        self._workers = {one.name: _Worker(one.role, one.role) for one in fleet.workers}
        self._spent: set[str] = set()  # names of removed workers that the router may still give another role
        self._history = deque[Sample](maxlen=int(hysteresis.down_s / hysteresis.look_s) + 2)
        assert fleet.bounds.keys() <= self._models.keys(), "a role that is scaled has a worker to be like"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(self._hysteresis.look_s)

    async def look(self, now_s: float) -> None:
        try:
            status = await self._service.status()
        except Unserved:  # the router is away: nothing is known, nothing is changed
            return
        rows = {worker.info.name: worker for worker in status.workers}
        for name, worker in list(self._workers.items()):
            _hear(worker, rows.get(name))
            if worker.idle_looks >= IDLE_LOOKS:
                await self._remove(name)
        wanted: dict[Role, int] = {role: len(self._names(role)) for role in self._bounds}
        self._history.append(sample_of(status, wanted, self._misses(), now_s))
        for change in decide(tuple(self._history), self._bounds, self._hysteresis):
            log.info("%s workers: %+d, for %s", change.role, change.by, change.reason)
            await self._act(change, rows)

    def _names(self, role: Role) -> list[str]:
        """Of those that count in this role, the oldest first."""
        return [name for name, one in self._workers.items() if one.counts and one.role == role]

    async def _act(self, change: Change, rows: Mapping[str, WorkerStatus]) -> None:
        for _ in range(change.by):
            name = self._new_name(change.role)
            worker = replace(self._models[change.role], name=name)
            try:
                await asyncio.to_thread(self._cluster.add_worker, worker, self._fleet.router)
            except (TidemillError, ValueError) as error:  # ValueError: Ray still knows one of this name
                log.warning("%s cannot be started: %s", name, error)
                return
            self._workers[name] = _Worker(change.role, change.role)
        for name in self._least_loaded(change.role, rows)[: max(0, -change.by)]:
            try:
                await self._service.drain(name, drain=True)
            except (RequestError, Unserved) as error:  # it just died, or does work that nobody else does
                log.info("%s stays: %s", name, error)
                continue
            self._workers[name].leaves = True

    async def _remove(self, name: str) -> None:
        worker = self._workers.pop(name)
        if worker.role != worker.started_as:
            self._spent.add(name)
        await asyncio.to_thread(self._cluster.remove_worker, name)

    def _least_loaded(self, role: Role, rows: Mapping[str, WorkerStatus]) -> list[str]:
        """Those that are not ready first, then those with the least to hand over, of equals the newest.
        Without those that were given this role by a person."""
        names = [name for name in self._names(role) if self._workers[name].started_as == role]

        def order(name: str) -> tuple[int, int, int]:
            load = rows[name].load if name in rows else None
            rows_there = 0 if load is None else load.running_rows + load.waiting_rows
            return (-1 if load is None else load.queued_tokens, rows_there, -names.index(name))

        return sorted(names, key=order)

    def _new_name(self, role: Role) -> str:
        taken = self._workers.keys() | self._spent
        names = (worker_name(self._fleet.label, role, index) for index in range(len(taken) + 1))
        return next(name for name in names if name not in taken)


def _hear(worker: _Worker, row: WorkerStatus | None) -> None:
    """`row`: None when the router does not know it."""
    if row is not None:
        was_drained, worker.is_drained = worker.is_drained, row.state == "draining"
        worker.leaves = worker.leaves and (worker.is_drained or not was_drained)  # else it was taken back
        worker.role = row.info.role
    goes = worker.leaves if row is not None else not worker.counts  # who was drained by others goes by itself
    worker.idle_looks = worker.idle_looks + 1 if goes and _is_idle(row) else 0


def _is_idle(row: WorkerStatus | None) -> bool:
    """Also when it is gone: Ray would only start it again."""
    if row is None:
        return True
    load = row.load
    return row.state == "draining" and not (load.running_rows or load.waiting_rows or load.queued_tokens)
