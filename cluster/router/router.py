"""The router: receives heartbeats, places requests and passes on the commands of operators."""

import asyncio
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from tidemill.cluster.messages import (
    BudgetTarget,
    FleetStatus,
    PlacementRequest,
    Route,
    WorkerStatus,
)
from tidemill.cluster.orders import RouterOrder, SetBudget
from tidemill.cluster.router.admission import LoadShedder
from tidemill.cluster.router.compiled import CompiledPlacement
from tidemill.cluster.router.fleet_view import (
    Fleet,
    HeartbeatArrived,
    Member,
    RequestBooked,
    WorkerLost,
    wants_full_announcement,
)
from tidemill.cluster.router.memory_budgets import Budgets
from tidemill.cluster.router.operator_commands import OperatorCommands
from tidemill.cluster.router.placement import Affinity, bookings, place
from tidemill.cluster.router.quarantine import Quarantine
from tidemill.workers.messages import Ack, Heartbeat, Unserved, WorkerId

SILENCE_S_MAX = 3.0
"""The silence after which a worker is lost: three heartbeats, which need progress of its engine."""

HELD_TOKENS_MAX = 4 << 20
"""The limit of all prompts that wait for a worker together. A token takes about 40 bytes of the memory of the
edge that holds its request."""

REMEMBERED_S = 60.0
"""The time after which the router forgets a lost worker, which then counts as silent, too."""


class Router:
    """Places the requests of one fleet. A restarted router has its view of the fleet and the budgets back
    after one heartbeat interval, without the budgets that operators set."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        broker: bool = True,
        expected: frozenset[str] = frozenset(),
        ttft_s_max: float = math.inf,
        has_budgets: bool = True,
        held_max: float = math.inf,
        compiled: CompiledPlacement | None = None,
    ) -> None:
        """Create a router without workers.

        `broker` moves memory between the workers of a device after the first heartbeats of those
        named in `expected`. Without it each worker keeps its share. Requests with a time to first
        token over `ttft_s_max` are refused. `has_budgets` is false when another router sets the
        budgets. At most `held_max` requests wait for a worker at a time, with prompts of HELD_TOKENS_MAX
        together. `compiled` places in less time what placement.py would.
        """
        self._clock = clock
        self._compiled = compiled
        self._fleet = Fleet() if compiled is None else compiled.new_fleet()
        self._budgets = Budgets(clock, broker=broker, expected=expected) if has_budgets else None
        self._commands = OperatorCommands()
        self._quarantine = Quarantine()
        self._load_shedder = LoadShedder(ttft_s_max)
        self._held_max = held_max
        self._held = self._held_tokens = 0
        self._heartbeat_at_s: dict[WorkerId, float] = {}  # the latest, also of lost workers
        self._started_s = clock()
        self.on_booked: Callable[[Sequence[RequestBooked]], None] | None = None  # for other routers
        self.affinities: Sequence[Affinity] = ()  # terms of the score beside those of placement.py
        self._changed = asyncio.Event()

    async def place(self, request: PlacementRequest) -> Route:
        """Choose the workers of one attempt; wait up to `wait_s_max` for one that can decode. Raises Unserved
        when none comes or too many requests wait for one, Overloaded, Poisonous."""
        if (route := self.place_now(request)) is not None:
            return route
        with self._holding(request):
            return await self._place_later(request)

    async def _place_later(self, request: PlacementRequest) -> Route:
        wait_s_max = min(request.wait_s_max, self._load_shedder.patience_s(request))
        give_up_s = self._clock() + wait_s_max
        while (route := self.place_now(request)) is None:
            changed = self._changed
            try:
                async with asyncio.timeout(max(0.0, give_up_s - self._clock())):
                    await changed.wait()
            except TimeoutError:
                raise Unserved(
                    f"no decode worker became ready within {wait_s_max:g} s: see `tidemill status`"
                ) from None
        return route

    @contextmanager
    def _holding(self, request: PlacementRequest) -> Generator[None]:
        """Count a request that waits for a worker. A resumed one is always admitted. Raises Unserved."""
        tokens = self._held_tokens + request.num_tokens
        is_full = self._held >= self._held_max or (self._held and tokens > HELD_TOKENS_MAX)
        if is_full and not request.resumed:
            at_most = f"at most {HELD_TOKENS_MAX:,} tokens wait at a router"
            fix = "raise max_queued_requests" if self._held >= self._held_max else at_most
            raise Unserved(
                f"no worker is ready, and {self._held} requests with {self._held_tokens:,} prompt tokens "
                f"wait for one already: retry when it has started ({fix})"
            )
        self._held += 1
        self._held_tokens = tokens
        try:
            yield
        finally:
            self._held -= 1
            self._held_tokens -= request.num_tokens

    def place_now(self, request: PlacementRequest) -> Route | None:
        """Choose the workers of one attempt and book it on them; None when no worker can do it. Raises
        Overloaded, Poisonous."""
        now_s = self._clock()
        self._quarantine.check(request.content_hash, now_s)
        terms = [affinity(self._fleet, request) for affinity in self.affinities]
        extra = np.sum(terms, axis=0) if terms else None
        if self._compiled is not None and not request.pools:
            placed = self._compiled.place(self._fleet, request, now_s, extra)
            if placed is None:
                return None
            route, booked = placed
        elif (route := place(self._fleet, request, now_s, extra)) is not None:
            booked = bookings(self._fleet, request, route, now_s)
        else:
            return None
        route = self._load_shedder.admit(request, route, self._fleet.total_queued_tokens, booked, now_s)
        self.book(booked)
        if self.on_booked is not None:
            self.on_booked(booked)
        return route

    def book(self, booked: Sequence[RequestBooked]) -> None:
        """Count load that this router or another one has placed."""
        for event in booked:
            self._fleet.apply(event)

    def heartbeat(self, heartbeat: Heartbeat) -> Ack:
        """Apply a heartbeat. The answer requests a full announcement if the router missed some."""
        now_s = self._clock()
        want_full = wants_full_announcement(self._fleet, heartbeat)
        is_new = heartbeat.info.worker not in self._heartbeat_at_s
        drain, role = self._commands.confirm(heartbeat.info, draining=heartbeat.draining, is_new=is_new)
        if drain and not heartbeat.draining:  # it will drain when it has read the answer
            heartbeat = replace(heartbeat, draining=True)
        self._heartbeat_at_s[heartbeat.info.worker] = now_s
        self._fleet.apply(HeartbeatArrived(heartbeat, now_s))
        self._wake()
        return Ack(want_full=want_full, budget_bytes=self.budget_for(heartbeat), drain=drain, role=role)

    def budget_for(self, heartbeat: Heartbeat) -> int | None:
        """Return the new budget of a worker of any fleet. None leaves it: not enough workers have reported,
        or another router sets the budgets."""
        return None if self._budgets is None else self._budgets.report(heartbeat)

    def budgets(self) -> dict[str, BudgetTarget]:
        """Return the budget targets that this router sets, by worker name, in any fleet."""
        return {} if self._budgets is None else self._budgets.all()

    def carry_out(self, order: RouterOrder) -> None:
        """Carry out an order about a worker of this fleet; budgets may be of any fleet. Raises
        RequestError."""
        if isinstance(order, SetBudget):
            assert self._budgets is not None, "budgets are set on the router that has them"
            self._budgets.set(order.worker, order.budget_bytes)
        else:
            self._commands.carry_out(order, self._fleet.members.values())

    def silent_workers(self, workers: Iterable[WorkerId]) -> frozenset[WorkerId]:
        """Return the workers among these that are silent: their requests must be placed again. The result is
        empty while this router is so new that running workers may not have found it."""
        since_s = self._clock() - SILENCE_S_MAX
        if self._started_s >= since_s:
            return frozenset()
        return frozenset(
            worker for worker in workers if self._heartbeat_at_s.get(worker, since_s - 1.0) < since_s
        )

    def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        """Remove a worker whose stream to an edge broke; quarantine the content hash `blamed`. If the worker
        still runs, its next heartbeat adds it again."""
        if blamed:
            self._quarantine.add(blamed, self._clock())
        self._fleet.apply(WorkerLost(worker))
        self._wake()

    def tick(self) -> None:
        now_s = self._clock()
        self._heartbeat_at_s = {
            worker: at_s for worker, at_s in self._heartbeat_at_s.items() if now_s - at_s <= REMEMBERED_S
        }
        for worker in self._fleet.silent_since(now_s, SILENCE_S_MAX):
            self._fleet.apply(WorkerLost(worker))
            self._wake()

    def status(self) -> FleetStatus:
        now_s = self._clock()
        members = sorted(self._fleet.members.values(), key=lambda member: member.info.name)
        return FleetStatus(workers=tuple(self._row(member, now_s) for member in members), held=self._held)

    def _row(self, member: Member, now_s: float) -> WorkerStatus:
        budget = BudgetTarget("broker", member.load.budget_bytes)
        if self._budgets is not None:
            budget = self._budgets.target(member.info)
        return WorkerStatus(
            info=member.info,
            load=member.load,
            state="draining" if member.draining else "ready",
            heard_ago_s=now_s - member.heartbeat_at_s,
            restorable_depths=self._fleet.num_held(member),
            set_by=budget.by,
            set_bytes=budget.num_bytes,
        )

    def _wake(self) -> None:
        self._changed.set()  # wakes the requests that wait now; later ones wait for the next change
        self._changed = asyncio.Event()
