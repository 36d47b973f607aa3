"""The router: hears the workers, places the requests."""

import asyncio
from collections.abc import Callable

from tidemill.cluster.budgets import Budgets
from tidemill.cluster.fleet import Fleet, Heard, Lost, Member, wants_full_announcement
from tidemill.cluster.placement import Ask, Route, bookings, place
from tidemill.cluster.service import FleetStatus, WorkerStatus
from tidemill.workers.messages import Ack, Heartbeat, Unserved, WorkerId

SILENCE_S_MAX = 3.0
"""Workers beat at least once a second, from their step loop: three missed beats and a worker is out."""


class Router:
    """Mutable are the view and the budgets alone; a router that starts again has both back after one
    heartbeat interval, without the budgets that people set."""

    def __init__(
        self, clock: Callable[[], float], *, broker: bool = True, expected: frozenset[str] = frozenset()
    ) -> None:
        """`broker`: move memory between the workers of a device, once those of the names `expected` have been
        heard; without, each keeps its share."""
        self._clock = clock
        self._fleet = Fleet()
        self._budgets = Budgets(clock, broker=broker, expected=expected)
        self._changed = asyncio.Event()

    async def place(self, ask: Ask) -> Route:
        """Choose the workers of one attempt; waits up to `ask.wait_s_max` for a worker that can decode.

        Raises Unserved when none comes.
        """
        give_up_s = self._clock() + ask.wait_s_max
        while (route := place(self._fleet, ask)) is None:
            changed = self._changed
            try:
                async with asyncio.timeout(max(0.0, give_up_s - self._clock())):
                    await changed.wait()
            except TimeoutError:
                raise Unserved(
                    f"no decode worker came up within {ask.wait_s_max:g} s: see `tidemill status`"
                ) from None
        for booked in bookings(self._fleet, ask, route, self._clock()):
            self._fleet = self._fleet.apply(booked)
        return route

    def heartbeat(self, heartbeat: Heartbeat) -> Ack:
        """Take a worker's report. It is asked for a full announcement when some of them were missed."""
        want_full = wants_full_announcement(self._fleet, heartbeat)
        self._become(self._fleet.apply(Heard(heartbeat, self._clock())))
        return Ack(want_full=want_full, budget_bytes=self._budgets.heard(heartbeat))

    def set_budget(self, name: str, budget_bytes: int | None) -> None:
        """A person's word; None takes it back. Raises RequestError."""
        self._budgets.set(name, budget_bytes)

    def lost(self, worker: WorkerId) -> None:
        """A frontend's stream to this worker broke. If it lives, its next heartbeat brings it back."""
        self._become(self._fleet.apply(Lost(worker)))

    def tick(self) -> None:
        """Drop the workers that have been silent for too long."""
        for worker in self._fleet.silent(self._clock(), SILENCE_S_MAX):
            self._become(self._fleet.apply(Lost(worker)))

    def status(self) -> FleetStatus:
        now_s = self._clock()
        members = sorted(self._fleet.members.values(), key=lambda member: member.info.name)
        return FleetStatus(workers=tuple(self._row(member, now_s) for member in members))

    def _row(self, member: Member, now_s: float) -> WorkerStatus:
        set_by, set_bytes = self._budgets.set_of(member.info)
        return WorkerStatus(
            info=member.info,
            load=member.load,
            state="draining" if member.draining else "ready",
            heard_ago_s=now_s - member.heard_at_s,
            restorable_depths=len(member.held),
            set_by=set_by,
            set_bytes=set_bytes,
        )

    def _become(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._changed.set()  # wakes those who wait now; the next ones wait for the next change
        self._changed = asyncio.Event()
