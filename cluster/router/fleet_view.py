"""The router's view of the workers, and the events that change it.

It is soft state: heartbeats rebuild everything within one interval.
What placement compares lies in a table with a column per worker, so that a decision among a thousand
workers is a few array operations.
"""

from dataclasses import dataclass
from enum import IntEnum, auto, unique
from hashlib import blake2b
from math import exp
from typing import assert_never

import numpy as np
import numpy.typing as npt

from tidemill.cluster.router.prefix_table import Chain, Prefixes, Slots, cut_keys
from tidemill.workers.messages import Heartbeat, WorkerId, WorkerInfo, WorkerLoad

HELD_KEYS_MAX = 1 << 20
"""The announced depths of a worker that the router remembers: the latest."""

PLACED_KEYS_MAX = 1 << 14
"""The pages of placed prompts that the router remembers per worker, at most: fewer where a worker has
memory for fewer.
"""

BOOKING_SETTLE_S = 0.25
"""The time after which a booking that reached its worker is certainly in the worker's own report."""

RHO_TAU_S = 10.0
"""The time constant of the fleet's average load."""

FETCHED_SHARE = 1 / 8
"""The cost of a fetched token at an unknown speed, relative to a computed token."""

LEAST_SLOTS = 16


@unique
class Column(IntEnum):
    """The numbers of a worker that placement compares."""

    DECODES = 0  # 1.0: the worker takes streams
    PREFILLS = auto()  # 1.0: the worker takes prompts for other workers
    MIXED = auto()  # 1.0: the worker takes streams and computes their prompts
    NAME = auto()  # 52 bits that stand for its name
    NAMESPACE = auto()  # 52 bits that stand for the namespace of its pages
    BUSY_UNTIL_S = auto()  # the time at which its queued prompt tokens will be computed
    QUEUED_TOKENS = auto()
    ROWS = auto()
    BUDGET_BYTES = auto()
    TAKEN_BYTES = auto()  # by running, waiting and booked requests
    STEP_S = auto()
    TOKEN_S = auto()
    PAIR_S = auto()
    ROW_S = auto()  # seconds per token of a stream
    PAGE_S = auto()  # to fetch a page
    STATE_S = auto()  # seconds to fetch a checkpoint
    STEP_TOKENS = auto()
    PAGE_TOKENS = auto()
    PAGE_BYTES = auto()
    STATE_BYTES = auto()


Table = npt.NDArray[np.float64]
"""A row per `Column`, and a column per slot."""

UNSETTLED = [Column.BUSY_UNTIL_S, Column.QUEUED_TOKENS, Column.ROWS, Column.TAKEN_BYTES]
"""The columns that bookings add to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Work that was placed on a worker and will be in its report soon after `due_s`.
    `keys` are those of the prompt's pages, which the worker will hold.
    """

    tokens: int
    rows: int
    at_s: float
    due_s: float
    seconds: float = 0.0
    num_bytes: int = 0
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker, by its last report. `slot` is its column in the table."""

    info: WorkerInfo
    load: WorkerLoad
    heard_at_s: float
    sequence: int
    slot: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatArrived:
    """A heartbeat arrived."""

    heartbeat: Heartbeat
    now_s: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is lost: its stream broke, or it was silent for too long."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RequestBooked:
    """A request was placed on a worker."""

    worker: WorkerId
    booking: Booking


Event = HeartbeatArrived | WorkerLost | RequestBooked


class Fleet:
    """The view of the fleet. Events alone change it, and apart from slots their order among workers does
    not matter.
    """

    def __init__(self) -> None:
        self.members: dict[WorkerId, Member] = {}
        self.table: Table = _vacant(LEAST_SLOTS)
        self._workers: list[WorkerId | None] = [None] * LEAST_SLOTS  # by slot
        self._by_name: dict[str, WorkerId] = {}
        self._bookings: dict[WorkerId, list[Booking]] = {}
        self._prefixes = (
            Prefixes()
        )  # by slot: depths that its worker announced, then pages of prompts placed there
        self._looked_up: tuple[tuple[bytes, ...], Slots] | None = (
            None  # the last lookup, if no event happened since
        )
        self._chain: tuple[tuple[bytes, ...], Chain] | None = None  # the last chain
        self._work_s = 0.0  # recently booked work: decays by e every RHO_TAU_S
        self._work_at_s = 0.0

    def apply(self, event: Event) -> None:
        self._looked_up = None
        match event:
            case HeartbeatArrived(heartbeat, now_s):
                self._apply_heartbeat(heartbeat, now_s)
            case WorkerLost(worker):
                self._remove(worker)
            case RequestBooked(worker, booking):
                self._book(worker, booking)
            case _:
                assert_never(event)

    def silent_since(self, now_s: float, silence_s_max: float) -> list[WorkerId]:
        """Return the workers without a heartbeat for longer than `silence_s_max`."""
        return [
            worker for worker, member in self.members.items() if now_s - member.heard_at_s > silence_s_max
        ]

    def at(self, slot: int) -> Member:
        worker = self._workers[slot]
        assert worker is not None
        return self.members[worker]

    def num_held(self, member: Member) -> int:
        """Return the number of restorable depths that the worker has announced and the router remembers."""
        return self._prefixes.num_held(_announced(member.slot))

    def queued_tokens(self, worker: WorkerId) -> float:
        """Return the prompt tokens that wait there to be computed; 0 for an unknown worker."""
        member = self.members.get(worker)
        return 0.0 if member is None else float(self.table[Column.QUEUED_TOKENS, member.slot])

    def queued_tokens_of_all(self) -> float:
        return float(self.table[Column.QUEUED_TOKENS].sum())

    def depths(self, keys: tuple[bytes, ...]) -> tuple[Slots, Slots]:
        """Return for each slot how many of `keys`, from the first, the worker announced as restorable.
        The second result counts the pages that it has or will have, including those of prompts placed
        there.
        """
        if self._looked_up is None or self._looked_up[0] is not keys:
            self._looked_up = keys, self._prefixes.depths(self._chain_of(keys), 2 * len(self._workers))
        announced, placed = self._looked_up[1].reshape(-1, 2).T
        return announced, np.maximum(announced, placed)

    def rho(self, now_s: float) -> float:
        """Return the recently placed work as a share of what the workers that compute prompts can do."""
        computing = np.count_nonzero(self.table[Column.PREFILLS] + self.table[Column.MIXED])
        decayed_s = self._work_s * exp((self._work_at_s - now_s) / RHO_TAU_S)
        return decayed_s / (RHO_TAU_S * computing) if computing else 0.0

    def _apply_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        info, announcement = heartbeat.info, heartbeat.announcement
        earlier = self._by_name.get(info.name)
        if earlier is not None and earlier != info.worker:
            self._remove(earlier)
        before = self.members.get(info.worker)
        slot = self._new_slot() if before is None else before.slot
        member = self.members[info.worker] = Member(
            info=info,
            load=heartbeat.load,
            heard_at_s=now_s,
            sequence=heartbeat.sequence,
            slot=slot,
            draining=heartbeat.draining,
        )
        self._workers[slot] = info.worker
        self._by_name[info.name] = info.worker
        bookings = self._bookings.get(info.worker, ())
        self._bookings[info.worker] = [
            booking for booking in bookings if now_s - booking.due_s < BOOKING_SETTLE_S
        ]
        self.table[:, slot] = _settled(self.table[:, slot], _column(member), self._bookings[info.worker])
        if announcement.full:
            self._prefixes.clear(_announced(slot))
        if announcement.removed:
            removed = cut_keys(announcement.removed)
            self._prefixes.remove(_announced(slot), removed)
            if not info.state_bytes:  # else the page may exist without its checkpoint
                self._prefixes.remove(_placed(slot), removed)
        self._prefixes.add(_announced(slot), cut_keys(announcement.added), HELD_KEYS_MAX)

    def _remove(self, worker: WorkerId) -> None:
        member = self.members.pop(worker, None)
        if member is None:
            return
        del self._by_name[member.info.name]
        del self._bookings[worker]
        self._workers[member.slot] = None
        self.table[:, [member.slot]] = _vacant(1)
        self._prefixes.clear(_announced(member.slot))
        self._prefixes.clear(_placed(member.slot))

    def _book(self, worker: WorkerId, booking: Booking) -> None:
        member = self.members.get(worker)
        if member is None:
            return
        self._bookings[worker].append(booking)
        column = self.table[:, member.slot]
        column[Column.BUSY_UNTIL_S] = max(column[Column.BUSY_UNTIL_S], booking.at_s) + booking.seconds
        column[Column.QUEUED_TOKENS] += booking.tokens
        column[Column.ROWS] += booking.rows
        column[Column.TAKEN_BYTES] += booking.num_bytes
        pages = member.load.budget_bytes // (member.info.page_bytes or 1) or PLACED_KEYS_MAX
        chain = self._chain_of(booking.keys)
        self._prefixes.add_chain(_placed(member.slot), chain, min(pages, PLACED_KEYS_MAX))
        if member.info.role != "decode":
            decay = exp((self._work_at_s - booking.at_s) / RHO_TAU_S)
            self._work_s = self._work_s * decay + booking.seconds
            self._work_at_s = booking.at_s

    def _chain_of(self, keys: tuple[bytes, ...]) -> Chain:
        if self._chain is None or self._chain[0] is not keys:
            self._chain = keys, Chain(cut_keys(keys))
        return self._chain[1]

    def _new_slot(self) -> int:
        if None not in self._workers:
            self.table = np.concatenate([self.table, _vacant(len(self._workers))], axis=1)
            self._workers += [None] * len(self._workers)
        return self._workers.index(None)


def wants_full_announcement(fleet: Fleet, heartbeat: Heartbeat) -> bool:
    """Return whether announcements between the last heartbeat and this one were missed."""
    if heartbeat.announcement.full:
        return False
    member = fleet.members.get(heartbeat.info.worker)
    return member is None or heartbeat.sequence != member.sequence + 1


def _vacant(num_slots: int) -> Table:
    table = np.zeros((len(Column), num_slots))
    table[[Column.STEP_TOKENS, Column.PAGE_TOKENS]] = 1.0  # divisors
    return table


def _announced(slot: int) -> int:
    return 2 * slot


def _placed(slot: int) -> int:
    return 2 * slot + 1


def _settled(expected: Table, reported: Table, bookings: list[Booking]) -> Table:
    """Return the load, given that a report may or may not include the latest bookings.
    The expected load decides which, within what is possible; adding all bookings would count them twice
    until the next report.
    """
    if bookings:
        each = [(booking.seconds, booking.tokens, booking.rows, booking.num_bytes) for booking in bookings]
        least = reported[UNSETTLED]
        most = least + list(map(sum, zip(*each, strict=True)))
        reported[UNSETTLED] = np.clip(expected[UNSETTLED], least, most)
    return reported


def _column(member: Member) -> Table:
    info, load, speed = member.info, member.load, member.load.speed
    column = np.zeros(len(Column))
    if not member.draining:
        column[Column.DECODES] = info.role != "prefill"
        column[Column.PREFILLS] = info.role == "prefill"
        column[Column.MIXED] = info.role == "mixed"
    column[Column.NAME] = _bits(info.name)
    column[Column.NAMESPACE] = _bits(f"{info.fingerprint} {info.layout}")
    column[Column.BUSY_UNTIL_S] = member.heard_at_s + load.queued_s
    column[Column.QUEUED_TOKENS] = load.queued_tokens
    column[Column.ROWS] = load.running_rows + load.waiting_rows
    column[Column.BUDGET_BYTES] = load.budget_bytes
    column[Column.TAKEN_BYTES] = load.memory.live + load.wanted_bytes
    column[Column.STEP_S] = speed.step_s
    column[Column.TOKEN_S] = speed.token_s
    column[Column.PAIR_S] = speed.pair_s
    column[Column.ROW_S] = speed.row_s or speed.token_s
    page_s = info.page_tokens * speed.token_s * FETCHED_SHARE
    if speed.fetch_bytes_per_s and info.page_bytes:
        page_s = info.page_bytes / speed.fetch_bytes_per_s
    column[Column.PAGE_S] = page_s
    column[Column.STATE_S] = page_s * info.state_bytes / (info.page_bytes or 1)
    column[Column.STEP_TOKENS] = info.step_tokens_max
    column[Column.PAGE_TOKENS] = info.page_tokens
    column[Column.PAGE_BYTES] = info.page_bytes
    column[Column.STATE_BYTES] = info.state_bytes
    return column


def _bits(text: str) -> int:
    """Return as many bits of a digest as a column can hold."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 12
