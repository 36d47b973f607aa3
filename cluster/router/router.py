"""The router: receives heartbeats, places requests, and passes operators' commands to workers."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace

from tidemill.cluster.messages import (
    TTFT_S_MAX,
    FleetStatus,
    PlacementRequest,
    Route,
    SetBudget,
    WorkerStatus,
)
from tidemill.cluster.router.admission import LoadShedder
from tidemill.cluster.router.fleet_view import (
    Fleet,
    HeartbeatArrived,
    Member,
    WorkerLost,
    wants_full_announcement,
)
from tidemill.cluster.router.memory_budgets import Budgets
from tidemill.cluster.router.operator_commands import OperatorCommands
from tidemill.cluster.router.placement import bookings, place
from tidemill.cluster.router.quarantine import Quarantine
from tidemill.workers.messages import Ack, Heartbeat, Role, Unserved, WorkerId

SILENCE_S_MAX = 3.0
"""The silence after which a worker is dropped. It reports at least once a second from its step loop, so
this is three missed heartbeats.
"""

REMEMBERED_S = 60.0
"""The time after which a lost worker is forgotten and counts as silent, too."""


class Router:
    """Only the view and the budgets are mutable. A restarted router has both back after one heartbeat
    interval, except budgets that operators set.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        broker: bool = True,
        expected: frozenset[str] = frozenset(),
        ttft_s_max: float = TTFT_S_MAX,
        has_budgets: bool = True,
    ) -> None:
        """`broker` moves memory between the workers of a device once those named in `expected` have
        reported; without it each keeps its share.
        `ttft_s_max`: requests that would wait longer for their first token are refused.
        `has_budgets` is False when another router assigns the budgets of these workers.
        """
        self._clock = clock
        self._fleet = Fleet()
        self._budgets = Budgets(clock, broker=broker, expected=expected) if has_budgets else None
        self._orders = OperatorCommands()
        self._quarantine = Quarantine()
        self._admission = LoadShedder(ttft_s_max)
        self._heard_s: dict[
            WorkerId, float
        ] = {}  # the last heartbeat of each incarnation, also of dropped ones
        self._began_s = clock()
        self._changed = asyncio.Event()

    async def place(self, ask: PlacementRequest) -> Route:
        """Choose the workers of one attempt; wait up to `ask.wait_s_max` for a worker that can decode.

        Raises Unserved when there is none, Overloaded, Poisonous.
        """
        self._quarantine.check(ask.content_hash, self._clock())
        wait_s_max = min(ask.wait_s_max, self._admission.patience_s(ask))
        give_up_s = self._clock() + wait_s_max
        while (route := place(self._fleet, ask, self._clock())) is None:
            changed = self._changed
            try:
                async with asyncio.timeout(max(0.0, give_up_s - self._clock())):
                    await changed.wait()
            except TimeoutError:
                raise Unserved(
                    f"no decode worker came up within {wait_s_max:g} s: see `tidemill status`"
                ) from None
        now_s = self._clock()
        booked = bookings(self._fleet, ask, route, now_s)
        route = self._admission.admit(ask, route, self._fleet, booked, now_s)
        for event in booked:
            self._fleet.apply(event)
        return route

    def heartbeat(self, heartbeat: Heartbeat) -> Ack:
        """Apply a worker's heartbeat; ask for a full announcement if some were missed."""
        now_s = self._clock()
        want_full = wants_full_announcement(self._fleet, heartbeat)
        is_new = heartbeat.info.worker not in self._heard_s
        drain, role = self._orders.confirm(heartbeat.info, draining=heartbeat.draining, is_new=is_new)
        if drain and not heartbeat.draining:  # it will drain when it has read the answer
            heartbeat = replace(heartbeat, draining=True)
        self._heard_s[heartbeat.info.worker] = now_s
        self._fleet.apply(HeartbeatArrived(heartbeat, now_s))
        self._wake()
        return Ack(want_full=want_full, budget_bytes=self.budget_for(heartbeat), drain=drain, role=role)

    def budget_for(self, heartbeat: Heartbeat) -> int | None:
        """Return the new budget of a worker of any fleet; None if it is not known, or another router
        assigns it.
        """
        return None if self._budgets is None else self._budgets.report(heartbeat)

    def budgets(self) -> dict[str, SetBudget]:
        """Return the budget of every worker that this router assigns, of any fleet, by name."""
        return {} if self._budgets is None else self._budgets.all()

    def set_budget(self, name: str, budget_bytes: int | None) -> None:
        """Set an operator's budget; None removes it. Raises RequestError."""
        assert self._budgets is not None, "people ask the router that has the budgets"
        self._budgets.set(name, budget_bytes)

    def drain(self, name: str, *, drain: bool, force: bool) -> None:
        """Drain a worker or let it take work again, for an operator. Raises RequestError."""
        self._orders.drain(name, self._fleet.members.values(), drain=drain, force=force)

    def set_role(self, name: str, role: Role) -> None:
        """Set a worker's role, for an operator. Raises RequestError."""
        self._orders.set_role(name, role, self._fleet.members.values())

    def silent_workers(self, workers: Iterable[WorkerId]) -> frozenset[WorkerId]:
        """Return which of these have been silent for too long, so that their requests are placed again.
        Return none while this router is so young that running workers may not have found it yet.
        """
        since_s = self._clock() - SILENCE_S_MAX
        if self._began_s >= since_s:
            return frozenset()
        return frozenset(worker for worker in workers if self._heard_s.get(worker, since_s - 1.0) < since_s)

    def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        """Drop a worker whose stream to an edge broke, because of the content `blamed` if it is set.
        If it runs, its next heartbeat brings it back.
        """
        if blamed:
            self._quarantine.add(blamed, self._clock())
        self._fleet.apply(WorkerLost(worker))
        self._wake()

    def tick(self) -> None:
        """Drop the workers that have been silent for too long."""
        now_s = self._clock()
        for worker in [lost for lost, at_s in self._heard_s.items() if now_s - at_s > REMEMBERED_S]:
            del self._heard_s[worker]
        for worker in self._fleet.silent_since(now_s, SILENCE_S_MAX):
            self._fleet.apply(WorkerLost(worker))
            self._wake()

    def status(self) -> FleetStatus:
        now_s = self._clock()
        members = sorted(self._fleet.members.values(), key=lambda member: member.info.name)
        return FleetStatus(workers=tuple(self._row(member, now_s) for member in members))

    def _row(self, member: Member, now_s: float) -> WorkerStatus:
        told = SetBudget("broker", member.load.budget_bytes)
        if self._budgets is not None:
            told = self._budgets.set_of(member.info)
        return WorkerStatus(
            info=member.info,
            load=member.load,
            state="draining" if member.draining else "ready",
            heard_ago_s=now_s - member.heard_at_s,
            restorable_depths=self._fleet.num_held(member),
            set_by=told.by,
            set_bytes=told.num_bytes,
        )

    def _wake(self) -> None:
        self._changed.set()  # wakes those that wait now; the next ones wait for the next change
        self._changed = asyncio.Event()
