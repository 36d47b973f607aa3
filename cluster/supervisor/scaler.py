"""Makes the fleet larger and smaller, as people say or autoscale.py: starts workers, drains and removes them.

Workers count in the role that they have now, so the bounds hold for these. What a person says goes first: a
worker that somebody drained does not count, and one that was given another role is not drained by itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Protocol, get_args

from tidemill.cluster.messages import FleetStatus, Misses, RoleScale, WorkerStatus
from tidemill.cluster.settings import FleetSettings, RouterSettings, WorkerSettings, worker_name
from tidemill.cluster.supervisor.autoscaling import Change, Sample, decide, sample_of
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import RequestError, Role, Unserved

IDLE_LOOKS = 2
"""A drained worker goes when it was without work at so many looks in a row: what was placed on it just before
has come, and has been handed over."""

log = logging.getLogger(__name__)


class ScalableCluster(Protocol):
    """launch.Cluster. All calls are made from threads."""

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None: ...
    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None: ...
    def remove_worker(self, name: str) -> None: ...


class DrainingRouter(Protocol):
    async def status(self) -> FleetStatus: ...
    async def drain(self, worker: str, *, drain: bool, force: bool = False) -> None: ...


@dataclass(slots=True)
class _Worker:
    """One that was started and not removed, as it was last heard."""

    started_as: Role
    role: Role
    is_drained: bool = False
    leaves: bool = False  # by our order
    is_told: bool = False  # to drain: one that is not heard of cannot be told yet
    idle_looks: int = 0

    @property
    def counts(self) -> bool:
        """One that is not heard of does, too: it starts, or Ray starts it again."""
        return not (self.is_drained or self.leaves)


class Scaler:
    """One for a fleet, in the frontend that started it."""

    def __init__(
        self,
        cluster: ScalableCluster,
        router: DrainingRouter,
        fleet: FleetSettings,
        misses: Callable[[], Misses],
    ) -> None:
        """The fleet's workers are there at the start; new ones are like the first of their role. Roles
        without bounds stay as they are until a person says otherwise."""
        self._cluster = cluster
        self._router = router
        self._fleet = fleet
        self._bounds = fleet.bounds
        self._misses = misses
        self._hysteresis = hysteresis = fleet.hysteresis
        self._models = {worker.role: worker for worker in reversed(fleet.workers)}
        self._workers = {one.name: _Worker(one.role, one.role) for one in fleet.workers}
        self._spent: set[str] = set()  # names of removed workers that the router may still give another role
        self._acts = asyncio.Lock()  # a look, or an order: one after the other
        self._history = deque[Sample](maxlen=int(hysteresis.down_s / hysteresis.look_s) + 2)
        assert fleet.bounds.keys() <= self._models.keys(), "a role that is scaled has a worker to be like"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look(asyncio.get_running_loop().time())
            await asyncio.sleep(self._hysteresis.look_s)

    async def look(self, now_s: float) -> None:
        async with self._acts:
            try:
                status = await self._router.status()
            except Unserved:  # the router is away: nothing is known, nothing is changed
                return
            rows = self._hear(status)
            for name, worker in list(self._workers.items()):
                if worker.idle_looks >= IDLE_LOOKS:
                    await self._remove(name)
                elif worker.leaves and name in rows and not worker.is_told:
                    await self._tell(name)
            wanted: dict[Role, int] = {role: len(self._names(role)) for role in self._bounds}
            self._history.append(sample_of(status, wanted, self._misses(), now_s))
            for change in decide(tuple(self._history), self._bounds, self._hysteresis):
                log.info("%s workers: %+d, for %s", change.role, change.by, change.reason)
                await self._follow(change, rows)

    async def scale(self, counts: Mapping[Role, int], *, pending: bool) -> str | None:
        """A person's word: so many workers of these roles there shall be. New ones without a place in the
        cluster are refused; with `pending` they wait for one, and the answer is what it lacks. Raises
        RequestError, Unserved."""
        for role, wanted in counts.items():
            self._check(role, wanted)
        async with self._acts:
            rows = self._hear(await self._router.status())
            more: dict[Role, int] = {role: wanted - len(self._names(role)) for role, wanted in counts.items()}
            new = [worker for role, by in more.items() for worker in self._new(role, by)]
            lacks = await asyncio.to_thread(self._cluster.unschedulable_reason, *new) if new else None
            if lacks is not None and not pending:
                raise RequestError(
                    f"{lacks}. Nothing was changed: make a place, or let them wait for one (--pending)",
                    param="workers",
                    status=409,
                    code="no_place",
                )
            for worker in new:
                await self._start(worker)
            for role, by in more.items():
                for name in self._least_loaded(self._names(role), rows)[: max(0, -by)]:
                    await self._leave(name, rows)
        return lacks

    async def roles(self) -> tuple[RoleScale, ...]:
        """How many workers of each role there are to be, and what is on its way to that. Raises Unserved."""
        rows = {worker.info.name for worker in (await self._router.status()).workers}
        found: list[RoleScale] = []
        there = self._models.keys() | {one.role for one in self._workers.values()}
        for role in (role for role in get_args(Role) if role in there):
            names, bounds = self._names(role), self._bounds.get(role)
            found.append(
                RoleScale(
                    role=role,
                    workers=len(names),
                    starting=tuple(name for name in names if name not in rows),
                    leaving=tuple(
                        name for name, one in self._workers.items() if one.leaves and one.role == role
                    ),
                    least=None if bounds is None else bounds.least,
                    most=None if bounds is None else bounds.most,
                )
            )
        return tuple(found)

    def _check(self, role: Role, wanted: int) -> None:
        if role not in self._models:
            raise RequestError(
                f"this server was started without {role} workers, so there is none that a new one could be "
                f"like: start it with --{role}, or give a worker that role (`tidemill role`)",
                param="workers",
            )
        if wanted < 1:
            raise RequestError(f"{role}={wanted}: one {role} worker has to stay", param="workers")
        bounds = self._bounds.get(role)
        if bounds is not None and not bounds.least <= wanted <= bounds.most:
            raise RequestError(
                f"{role}={wanted}: this role is scaled by load, between {bounds.least} (--{role}) and "
                f"{bounds.most} (--{role}-max): stay between these, or start the server with others",
                param="workers",
            )

    def _names(self, role: Role) -> list[str]:
        """Of those that count in this role, the oldest first."""
        return [name for name, one in self._workers.items() if one.counts and one.role == role]

    def _hear(self, status: FleetStatus) -> dict[str, WorkerStatus]:
        rows = {worker.info.name: worker for worker in status.workers}
        for name, worker in self._workers.items():
            _hear(worker, rows.get(name), is_kept=not self._bounds)
        return rows

    async def _follow(self, change: Change, rows: Mapping[str, WorkerStatus]) -> None:
        new = self._new(change.role, change.by)
        if new and (lacks := await asyncio.to_thread(self._cluster.unschedulable_reason, *new)) is not None:
            log.warning("new workers wait for a place: %s", lacks)
        for worker in new:
            try:
                await self._start(worker)
            except Unserved as error:
                log.warning("%s", error)
                return
        # without those that were given this role by a person
        names = [name for name in self._names(change.role) if self._workers[name].started_as == change.role]
        for name in self._least_loaded(names, rows)[: max(0, -change.by)]:
            try:
                await self._leave(name, rows)
            except (RequestError, Unserved) as error:  # it just died, or does work that nobody else does
                log.info("%s stays: %s", name, error)

    async def _start(self, worker: WorkerSettings) -> None:
        try:
            await asyncio.to_thread(self._cluster.add_worker, worker, self._fleet.router)
        except (TidemillError, ValueError) as error:  # ValueError: Ray still knows one of this name
            raise Unserved(f"{worker.name} cannot be started: {error}") from error
        self._workers[worker.name] = _Worker(worker.role, worker.role)

    async def _leave(self, name: str, rows: Mapping[str, WorkerStatus]) -> None:
        """It goes when it is empty; one that is not heard of is told as soon as it is."""
        if name in rows:
            await self._router.drain(name, drain=True)
        worker = self._workers[name]
        worker.leaves, worker.is_told = True, name in rows

    async def _tell(self, name: str) -> None:
        worker = self._workers[name]
        try:
            await self._router.drain(name, drain=True)
            worker.is_told = True
        except (RequestError, Unserved) as error:
            log.info("%s stays: %s", name, error)
            worker.leaves = False

    async def _remove(self, name: str) -> None:
        worker = self._workers.pop(name)
        if worker.role != worker.started_as:
            self._spent.add(name)
        await asyncio.to_thread(self._cluster.remove_worker, name)

    def _least_loaded(self, names: Sequence[str], rows: Mapping[str, WorkerStatus]) -> list[str]:
        """Those that are not ready first, then those with the least to hand over, of equals the newest."""

        def order(name: str) -> tuple[int, int, int]:
            load = rows[name].load if name in rows else None
            rows_there = 0 if load is None else load.running_rows + load.waiting_rows
            return (-1 if load is None else load.queued_tokens, rows_there, -names.index(name))

        return sorted(names, key=order)

    def _new(self, role: Role, by: int) -> list[WorkerSettings]:
        taken = self._workers.keys() | self._spent
        names = (worker_name(self._fleet.label, role, index) for index in count())
        free = islice((name for name in names if name not in taken), max(0, by))
        return [replace(self._models[role], name=name) for name in free]


def _hear(worker: _Worker, row: WorkerStatus | None, *, is_kept: bool) -> None:
    """`row`: None when the router does not know it. `is_kept`: also when it was drained by others and has
    gone, which may be to come back in its next life."""
    if row is not None:
        was_drained, worker.is_drained = worker.is_drained, row.state == "draining"
        worker.leaves = worker.leaves and (worker.is_drained or not was_drained)  # else it was taken back
        worker.role = row.info.role
    is_ours = row is not None or is_kept
    goes = worker.leaves if is_ours else not worker.counts  # who was drained by others goes by itself
    worker.idle_looks = worker.idle_looks + 1 if goes and _is_idle(row) else 0


def _is_idle(row: WorkerStatus | None) -> bool:
    """Also when it is gone: Ray would only start it again."""
    if row is None:
        return True
    load = row.load
    return row.state == "draining" and not (load.running_rows or load.waiting_rows or load.queued_tokens)
