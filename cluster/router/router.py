"""The router: hears the workers, places the requests, and passes on what people tell workers to do."""

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
"""Workers beat at least once a second, from their step loop: three missed beats and a worker is out."""

REMEMBERED_S = 60.0
"""A life that is over is forgotten after this time: from then on it counts as silent, too."""


class Router:
    """Mutable are the view and the budgets alone; a router that starts again has both back after one
    heartbeat interval, without the budgets that people set."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        broker: bool = True,
        expected: frozenset[str] = frozenset(),
        ttft_s_max: float = TTFT_S_MAX,
        has_budgets: bool = True,
    ) -> None:
        """`broker`: move memory between the workers of a device, once those of the names `expected` have been
        heard; without, each keeps its share. `ttft_s_max`: what would wait longer for its first token is
        refused. `has_budgets`: not when another router says what the workers here may have."""
        self._clock = clock
        self._fleet = Fleet()
        self._budgets = Budgets(clock, broker=broker, expected=expected) if has_budgets else None
        self._orders = OperatorCommands()
        self._quarantine = Quarantine()
        self._admission = LoadShedder(ttft_s_max)
        self._heard_s: dict[WorkerId, float] = {}  # when each life was heard last, also one that was dropped
        self._began_s = clock()
        self._changed = asyncio.Event()

    async def place(self, ask: PlacementRequest) -> Route:
        """Choose the workers of one attempt; waits up to `ask.wait_s_max` for a worker that can decode.

        Raises Unserved when none comes, Overloaded, Poisonous.
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
        """Take a worker's report. It is asked for a full announcement when some of them were missed."""
        now_s = self._clock()
        want_full = wants_full_announcement(self._fleet, heartbeat)
        is_new = heartbeat.info.worker not in self._heard_s
        drain, role = self._orders.confirm(heartbeat.info, draining=heartbeat.draining, is_new=is_new)
        if drain and not heartbeat.draining:  # it will be, when it has read the answer
            heartbeat = replace(heartbeat, draining=True)
        self._heard_s[heartbeat.info.worker] = now_s
        self._fleet.apply(HeartbeatArrived(heartbeat, now_s))
        self._wake()
        return Ack(want_full=want_full, budget_bytes=self.budget_for(heartbeat), drain=drain, role=role)

    def budget_for(self, heartbeat: Heartbeat) -> int | None:
        """What a worker of any fleet may have from now on; None while nobody knows, or another router says
        it."""
        return None if self._budgets is None else self._budgets.report(heartbeat)

    def budgets(self) -> dict[str, SetBudget]:
        """Of every worker whose budget is said here, of any fleet, by name."""
        return {} if self._budgets is None else self._budgets.all()

    def set_budget(self, name: str, budget_bytes: int | None) -> None:
        """A person's word; None takes it back. Raises RequestError."""
        assert self._budgets is not None, "people ask the router that has the budgets"
        self._budgets.set(name, budget_bytes)

    def drain(self, name: str, *, drain: bool, force: bool) -> None:
        """A person's word: hand everything over, or take work again. Raises RequestError."""
        self._orders.drain(name, self._fleet.members.values(), drain=drain, force=force)

    def set_role(self, name: str, role: Role) -> None:
        """A person's word. Raises RequestError."""
        self._orders.set_role(name, role, self._fleet.members.values())

    def silent_workers(self, workers: Iterable[WorkerId]) -> frozenset[WorkerId]:
        """Which of these have been silent for too long: what runs there is to be placed again. None while
        this router is so young that those that live may not have found it."""
        since_s = self._clock() - SILENCE_S_MAX
        if self._began_s >= since_s:
            return frozenset()
        return frozenset(worker for worker in workers if self._heard_s.get(worker, since_s - 1.0) < since_s)

    def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        """A frontend's stream to this worker broke, because of the content `blamed` if there is one. If it
        lives, its next heartbeat brings it back."""
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
        self._changed.set()  # wakes those who wait now; the next ones wait for the next change
        self._changed = asyncio.Event()
