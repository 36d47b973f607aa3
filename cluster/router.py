"""The router: hears the workers, places the requests."""

import asyncio
from collections.abc import Callable

from tidemill.cluster.fleet import Fleet, Heard, Lost, wants_full_announcement
from tidemill.cluster.placement import Ask, Route, bookings, place
from tidemill.cluster.service import FleetStatus, WorkerStatus
from tidemill.workers.messages import Heartbeat, Unserved, WorkerId

SILENCE_S_MAX = 3.0
"""Workers beat at least once a second, from their step loop: three missed beats and a worker is out."""


class Router:
    """The only mutable thing is the view; a router that starts again has it back after one heartbeat
    interval."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._fleet = Fleet()
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

    def heartbeat(self, heartbeat: Heartbeat) -> bool:
        """Take a worker's report. True asks it for a full announcement: some of them were missed."""
        wants_full = wants_full_announcement(self._fleet, heartbeat)
        self._become(self._fleet.apply(Heard(heartbeat, self._clock())))
        return wants_full

    def lost(self, worker: WorkerId) -> None:
        """A frontend's stream to this worker broke. If it lives, its next heartbeat brings it back."""
        self._become(self._fleet.apply(Lost(worker)))

    def tick(self) -> None:
        """Drop the workers that have been silent for too long."""
        for worker in self._fleet.silent(self._clock(), SILENCE_S_MAX):
            self._become(self._fleet.apply(Lost(worker)))

    def status(self) -> FleetStatus:
        now_s = self._clock()
        return FleetStatus(
            workers=tuple(
                WorkerStatus(
                    info=member.info,
                    load=member.load,
                    state="draining" if member.draining else "ready",
                    heard_ago_s=now_s - member.heard_at_s,
                    restorable_depths=len(member.held),
                )
                for member in sorted(self._fleet.members.values(), key=lambda member: member.info.name)
            )
        )

    def _become(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._changed.set()  # wakes those who wait now; the next ones wait for the next change
        self._changed = asyncio.Event()
