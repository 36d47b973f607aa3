"""Add and remove the workers of a fleet, by operator command or as autoscaling.py decides.

A worker counts for the role that it has now, so bounds apply to current roles. Operator commands
take precedence over load. A worker that an operator drained does not count. A worker that an
operator gave another role is never drained by load.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol, get_args

from tidemill.cluster.messages import FleetStatus, RoleScale, WorkerStatus
from tidemill.cluster.orders import Drain, SetRole
from tidemill.cluster.processes.scaling import autoscaling
from tidemill.cluster.processes.scaling.autoscaling import Change, EdgeReports, Sample
from tidemill.cluster.processes.scaling.journal import Fenced, FleetPlan, Lifecycle, PlannedWorker
from tidemill.cluster.settings import FleetSettings, RouterSettings, WorkerSettings, worker_name
from tidemill.kvstore.errors import TidemillError
from tidemill.kvstore.periodic import every
from tidemill.workers.messages import RequestError, Role, Unserved

IDLE_CHECKS = 2
"""A drained worker is removed after this many consecutive checks without work. Requests that were placed on
it just before the drain have then arrived and been handed over."""

log = logging.getLogger(__name__)


class ScalableCluster(Protocol):
    """The part of the supervisor that the scaler uses. All calls are made from threads."""

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None: ...
    def add_worker(self, worker: WorkerSettings, routers: RouterSettings, /) -> None: ...
    def remove_worker(self, name: str, /) -> None: ...


class DrainingRouter(Protocol):
    async def status(self) -> FleetStatus: ...
    async def carry_out(self, order: Drain | SetRole) -> None: ...


_ON_DRAINING = {Lifecycle.SERVING: Lifecycle.DRAINED, Lifecycle.LEAVING: Lifecycle.DRAINING}
_ON_NOT_DRAINING = {Lifecycle.DRAINED: Lifecycle.SERVING, Lifecycle.DRAINING: Lifecycle.SERVING}
"""The transitions on a report of the router. A drain that an operator takes back ends in SERVING."""

_ON_STAY = {Lifecycle.LEAVING: Lifecycle.SERVING, Lifecycle.DRAINING: Lifecycle.DRAINED}
"""The transitions when the router refuses the drain."""


@dataclass(slots=True)
class _Worker:
    started_as: Role
    role: Role
    state: Lifecycle = Lifecycle.SERVING
    created: bool = True
    process: str = ""  # as the router reported it last
    drain_sent: bool = False  # to the router, for LEAVING and DRAINING
    role_lost: bool = False  # its new process has the role of the start again
    idle_checks: int = 0

    @property
    def is_leaving(self) -> bool:
        return self.state in (Lifecycle.LEAVING, Lifecycle.DRAINING)

    def observe(self, row: WorkerStatus | None, *, keeps_drained: bool) -> None:
        """Apply the router's report; `row` is None when the router does not know the worker. `keeps_drained`:
        a worker that an operator drained is kept also when it is gone, for it may come back."""
        if row is not None and self._is_new_process(row):
            self.drain_sent = False
            self.role_lost = row.info.role == self.started_as != self.role
            if not self.is_leaving:  # the drain of an operator has ended
                self.state = Lifecycle.SERVING
            if not self.role_lost:
                self.role = row.info.role
        elif row is not None and not (self.role_lost and row.info.role == self.started_as):
            self.role_lost = False
            transitions = _ON_DRAINING if row.state == "draining" else _ON_NOT_DRAINING
            self.state = transitions.get(self.state, self.state)
            self.role = row.info.role
        is_gone = row is None and self.state is Lifecycle.DRAINED and not keeps_drained
        self.idle_checks = self.idle_checks + 1 if (self.is_leaving or is_gone) and _is_idle(row) else 0

    def _is_new_process(self, row: WorkerStatus) -> bool:
        """Return whether the process is another one than that of the last report, which this notes. It knows
        no order that the one before had."""
        before, self.process = self.process, row.info.worker
        return before not in {"", self.process}


class Scaler:
    """The scaler of one fleet, in the supervisor. It writes to the journal before it acts."""

    def __init__(
        self,
        cluster: ScalableCluster,
        router: DrainingRouter,
        save: Callable[[FleetPlan], None],
        fleet: FleetSettings,
        reports: EdgeReports,
        plan: FleetPlan,
    ) -> None:
        """Scale a fleet from its plan in the journal, to which `save` writes. A new worker copies the first
        one of its role. The size of a role without bounds changes only by operator command."""
        self._cluster = cluster
        self._router = router
        self._write = save
        self._fleet = fleet
        self._bounds = fleet.bounds
        self._reports = reports
        self._hysteresis = hysteresis = fleet.hysteresis
        self._scales_to_zero = fleet.cold_start_s_max is not None
        self._templates = fleet.templates
        self._plan = plan  # as of the journal
        self._workers = {
            name: _Worker(worker.started_as, worker.role, worker.state, worker.created, worker.worker)
            for name, worker in plan.workers.items()
        }
        self._retired = set(plan.retired)  # names of removed workers whose new role the router may remember
        self._lock = asyncio.Lock()  # held by one check or one operator command at a time
        self._idle = autoscaling.IdleClock(reports)
        self._history = deque[Sample](maxlen=int(hysteresis.down_s / hysteresis.look_s) + 2)
        assert fleet.bounds.keys() <= self._templates.keys(), "every scaled role has a worker to copy"

    async def start(self) -> None:
        """Start the workers of the plan that may not have been created. Raises Unserved."""
        async with self._lock:
            for name, worker in self._workers.items():
                if not worker.created:
                    await self._create(self._fleet.worker(worker.started_as, name))
            await self._save()

    async def run(self) -> None:
        async def check() -> None:
            try:
                await self.start()
            except Unserved as error:
                log.warning("%s", error)
            await self.adjust(asyncio.get_running_loop().time())

        await every(self._hysteresis.look_s, check, "scaling", fatal=(Fenced,))

    async def adjust(self, now_s: float) -> None:
        """Remove drained workers, then scale by load. Do nothing while the router does not answer."""
        async with self._lock:
            try:
                status = await self._router.status()
            except Unserved:
                return
            rows = self._observe(status)
            for name, worker in list(self._workers.items()):
                if worker.idle_checks >= IDLE_CHECKS:
                    await self._remove(name)
                elif worker.is_leaving and name in rows and not worker.drain_sent:
                    await self._send_drain(name)
                elif worker.role_lost:
                    await self._send_role(name)
            if self._scales_to_zero and await self._follow_requests(rows, now_s):
                await self._save()
                return
            wanted: dict[Role, int] = {role: len(self._names(role)) for role in self._bounds}
            self._history.append(autoscaling.take_sample(status, wanted, self._reports.misses, now_s))
            for change in autoscaling.decide(tuple(self._history), self._bounds, self._hysteresis):
                log.info("%s workers: %+d, because %s", change.role, change.by, change.reason)
                await self._apply(change, rows)
            await self._save()

    async def wake(self) -> None:
        """Start the first workers again if the fleet was scaled to zero."""
        async with self._lock:
            if self._scales_to_zero and not self._serves():
                await self._start_again("a server starts")

    async def _follow_requests(self, rows: Mapping[str, WorkerStatus], now_s: float) -> bool:
        """Retire all workers when there were no requests for long enough, and start the first ones again when
        there are some and the old ones are gone. Return whether no worker is to serve."""
        names = self._serves()
        idle_s = self._idle.idle_s(now_s, starts=not names or not rows.keys() >= {*names})
        if not names and not any(worker.is_leaving for worker in self._workers.values()):
            if num_open := self._reports.open_requests(now_s):
                await self._start_again(f"{num_open} requests wait")
        elif idle_s >= self._hysteresis.zero_s:
            log.info("all %d workers leave: no requests for %g s", len(names), self._hysteresis.zero_s)
            self._history.clear()
            for name in names:
                try:
                    await self._retire(name, rows, force=True)
                except (RequestError, Unserved) as error:
                    log.info("%s stays: %s", name, error)
        return not self._serves()

    def _serves(self) -> list[str]:
        return [name for name, worker in self._workers.items() if worker.state is Lifecycle.SERVING]

    async def _start_again(self, reason: str) -> None:
        for role, by in Counter[Role](worker.role for worker in self._fleet.workers).items():
            log.info("%s workers: %+d, because %s", role, by, reason)
            await self._apply(Change(role=role, by=by, reason=reason), {})

    async def scale(self, counts: Mapping[Role, int], *, pending: bool) -> str | None:
        """Set the number of workers per role, for an operator. New workers that the cluster cannot schedule
        are refused. With `pending` they wait for capacity, and the missing capacity is returned. Raises
        RequestError, Unserved."""
        for role, wanted in counts.items():
            self._check_count(role, wanted)
        async with self._lock:
            rows = self._observe(await self._router.status())
            deltas: dict[Role, int] = {
                role: wanted - len(self._names(role)) for role, wanted in counts.items()
            }
            new = [worker for role, by in deltas.items() for worker in self._new_workers(role, by)]
            reason = await asyncio.to_thread(self._cluster.unschedulable_reason, *new) if new else None
            if reason is not None and not pending:
                raise RequestError(
                    f"{reason}. Nothing was changed: add capacity, or let the workers wait (--pending)",
                    param="workers",
                    status=409,
                    code="no_place",
                )
            for worker in new:
                await self._start(worker)
            for role, by in deltas.items():
                for name in self._least_loaded(self._names(role), rows)[: max(0, -by)]:
                    await self._retire(name, rows)
            await self._save()
        return reason

    async def roles(self) -> tuple[RoleScale, ...]:
        """Return the intended number of workers per role, and which start or leave. Raises Unserved."""
        rows = {worker.info.name for worker in (await self._router.status()).workers}
        scales: list[RoleScale] = []
        known = self._templates.keys() | {worker.role for worker in self._workers.values()}
        for role in (role for role in get_args(Role) if role in known):
            names, bounds = self._names(role), self._bounds.get(role)
            leaving = (
                name for name, worker in self._workers.items() if worker.is_leaving and worker.role == role
            )
            scales.append(
                RoleScale(
                    role=role,
                    workers=len(names),
                    starting=tuple(name for name in names if name not in rows),
                    leaving=tuple(leaving),
                    least=None if bounds is None else bounds.least,
                    most=None if bounds is None else bounds.most,
                )
            )
        return tuple(scales)

    def _check_count(self, role: Role, wanted: int) -> None:
        if role not in self._templates:
            raise RequestError(
                f"this server was started without {role} workers, so a new one has no settings to copy: "
                f"start it with --{role}, or give a worker that role (`tidemill role`)",
                param="workers",
            )
        if wanted < 1:
            raise RequestError(f"{role}={wanted}: one {role} worker has to stay", param="workers")
        bounds = self._bounds.get(role)
        if bounds is not None and not bounds.least <= wanted <= bounds.most:
            raise RequestError(
                f"{role}={wanted}: this role is scaled by load, between {bounds.least} (--{role}) and "
                f"{bounds.most} (--{role}-max): stay between these, or start the server with other bounds",
                param="workers",
            )

    def _names(self, role: Role) -> list[str]:
        """Return the names of the workers that count for the role, the oldest first."""
        workers = self._workers.items()
        return [name for name, at in workers if at.state is Lifecycle.SERVING and at.role == role]

    def _observe(self, status: FleetStatus) -> dict[str, WorkerStatus]:
        rows = {worker.info.name: worker for worker in status.workers}
        for name, worker in self._workers.items():
            worker.observe(rows.get(name), keeps_drained=not self._bounds)
        return rows

    async def _apply(self, change: Change, rows: Mapping[str, WorkerStatus]) -> None:
        new = self._new_workers(change.role, change.by)
        if new and (reason := await asyncio.to_thread(self._cluster.unschedulable_reason, *new)) is not None:
            log.warning("new workers wait for capacity: %s", reason)
        for worker in new:
            try:
                await self._start(worker)
            except Unserved as error:
                log.warning("%s", error)
                return
        # Workers to which an operator gave this role stay.
        names = [name for name in self._names(change.role) if self._workers[name].started_as == change.role]
        for name in self._least_loaded(names, rows)[: max(0, -change.by)]:
            try:
                await self._retire(name, rows)
            except (RequestError, Unserved) as error:  # it just crashed, or no other worker does its work
                log.info("%s stays: %s", name, error)

    async def _save(self, *, always: bool = False) -> None:
        """Write the plan to the journal if it has changed, or `always`. Raises Fenced."""
        workers = {
            name: PlannedWorker(
                started_as=worker.started_as,
                role=worker.role,
                state=worker.state,
                created=worker.created,
                worker=worker.process,
            )
            for name, worker in self._workers.items()
        }
        plan = FleetPlan(workers=workers, retired=frozenset(self._retired))
        if always or plan != self._plan:
            await asyncio.to_thread(self._write, plan)
            self._plan = plan

    async def _start(self, worker: WorkerSettings) -> None:
        self._workers[worker.name] = _Worker(worker.role, worker.role, created=False)
        await self._save()
        try:
            await self._create(worker)
        except Unserved:
            del self._workers[worker.name]
            await self._save()
            raise

    async def _create(self, worker: WorkerSettings) -> None:
        try:
            await asyncio.to_thread(self._cluster.add_worker, worker, self._fleet.router)
        except (TidemillError, ValueError) as error:  # ValueError: Ray still has an actor of this name
            raise Unserved(f"{worker.name} cannot be started: {error}") from error
        self._workers[worker.name].created = True

    async def _retire(self, name: str, rows: Mapping[str, WorkerStatus], *, force: bool = False) -> None:
        """Order a worker to drain; it is removed when it is empty. A worker that the router does not know yet
        is drained as soon as the router reports it. With `force` no other worker has to do its work."""
        worker = self._workers[name]
        worker.state = Lifecycle.LEAVING
        await self._save()
        try:
            if name in rows:
                await self._router.carry_out(Drain(name, force=force))
        except (RequestError, Unserved):
            worker.state = Lifecycle.SERVING
            raise
        worker.drain_sent = name in rows

    async def _send_drain(self, name: str) -> None:
        worker = self._workers[name]
        try:
            await self._router.carry_out(Drain(name))
            worker.drain_sent = True
        except (RequestError, Unserved) as error:
            log.info("%s stays: %s", name, error)
            worker.state = _ON_STAY[worker.state]

    async def _send_role(self, name: str) -> None:
        """Give a worker that has restarted the role that it had; its router may have restarted, too."""
        worker = self._workers[name]
        try:
            await self._router.carry_out(SetRole(name, worker.role))
        except (RequestError, Unserved) as error:
            log.info("%s stays a %s worker: %s", name, worker.started_as, error)
            worker.role, worker.role_lost = worker.started_as, False

    async def _remove(self, name: str) -> None:
        """Remove a worker that the plan has as leaving or gone, and then its entry: a supervisor that ends in
        between repeats the removal when it is back."""
        await self._save(always=True)
        await asyncio.to_thread(self._cluster.remove_worker, name)
        worker = self._workers.pop(name)
        if worker.role != worker.started_as:
            self._retired.add(name)
        await self._save()

    def _least_loaded(self, names: Sequence[str], rows: Mapping[str, WorkerStatus]) -> list[str]:
        """Sort workers that are not ready first, then by work to hand over, then the newest first."""

        def sort_key(name: str) -> tuple[int, int, int]:
            load = rows[name].load if name in rows else None
            num_requests = 0 if load is None else load.running_rows + load.waiting_rows
            return (-1 if load is None else load.queued_tokens, num_requests, -names.index(name))

        return sorted(names, key=sort_key)

    def _new_workers(self, role: Role, by: int) -> list[WorkerSettings]:
        taken = self._workers.keys() | self._retired
        names = (worker_name(self._fleet.label, role, index) for index in count())
        free = islice((name for name in names if name not in taken), max(0, by))
        return [self._fleet.worker(role, name) for name in free]


def _is_idle(row: WorkerStatus | None) -> bool:
    """Return whether a worker can be removed; one that is gone can, or Ray would restart it."""
    if row is None:
        return True
    load = row.load
    return row.state == "draining" and not (load.running_rows or load.waiting_rows or load.queued_tokens)
