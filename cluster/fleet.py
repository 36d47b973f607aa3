"""What a router believes about the workers: an immutable view, and the events that change it.

Soft state: everything here is rebuilt from heartbeats within one interval.
"""

from dataclasses import dataclass, field, replace
from typing import assert_never

from tidemill.workers.messages import Heartbeat, WorkerId, WorkerInfo, WorkerLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Work that was placed on a worker and is not in its reported load yet."""

    tokens: int
    rows: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker as the router sees it. `held` are the cut keys of its restorable depths."""

    info: WorkerInfo
    load: WorkerLoad
    heard_at_s: float
    sequence: int
    draining: bool = False
    held: frozenset[bytes] = frozenset()
    bookings: tuple[Booking, ...] = ()

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens + sum(booking.tokens for booking in self.bookings)

    @property
    def rows(self) -> int:
        return (
            self.load.running_rows + self.load.waiting_rows + sum(booking.rows for booking in self.bookings)
        )


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat arrived."""

    heartbeat: Heartbeat
    now_s: float


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone: its stream broke, or it has been silent for too long."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class Booked:
    """A request was placed on a worker."""

    worker: WorkerId
    booking: Booking


Event = Heard | Lost | Booked

BOOKING_SETTLE_S = 0.5
"""A booking this old is in the worker's own report by now."""


@dataclass(frozen=True, slots=True)
class Fleet:
    members: dict[WorkerId, Member] = field(default_factory=dict[WorkerId, Member])

    def apply(self, event: Event) -> "Fleet":
        match event:
            case Heard(heartbeat, now_s):
                member = _heard(self.members.get(heartbeat.info.worker), heartbeat, now_s)
                others = {
                    worker: other
                    for worker, other in self.members.items()
                    if other.info.name != heartbeat.info.name  # an earlier life of the same worker
                }
                return Fleet({**others, heartbeat.info.worker: member})
            case Lost(worker):
                return Fleet({key: member for key, member in self.members.items() if key != worker})
            case Booked(worker, booking):
                member = self.members.get(worker)
                if member is None:
                    return self
                booked = replace(member, bookings=(*member.bookings, booking))
                return Fleet({**self.members, worker: booked})
            case _:
                assert_never(event)

    def silent(self, now_s: float, silence_s_max: float) -> list[WorkerId]:
        """Workers that have not been heard for longer than `silence_s_max`."""
        return [
            worker for worker, member in self.members.items() if now_s - member.heard_at_s > silence_s_max
        ]


def wants_full_announcement(fleet: Fleet, heartbeat: Heartbeat) -> bool:
    """Whether the announcements between the last heartbeat and this one were missed."""
    if heartbeat.announcement.full:
        return False
    member = fleet.members.get(heartbeat.info.worker)
    return member is None or heartbeat.sequence != member.sequence + 1


def _heard(member: Member | None, heartbeat: Heartbeat, now_s: float) -> Member:
    announcement = heartbeat.announcement
    known = frozenset[bytes]() if member is None or announcement.full else member.held
    bookings = () if member is None else member.bookings
    return Member(
        info=heartbeat.info,
        load=heartbeat.load,
        heard_at_s=now_s,
        sequence=heartbeat.sequence,
        draining=heartbeat.draining,
        held=(known - frozenset(announcement.removed)) | frozenset(announcement.added),
        bookings=tuple(booking for booking in bookings if now_s - booking.at_s < BOOKING_SETTLE_S),
    )
