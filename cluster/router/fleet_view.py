"""The router's view of the workers, and the events that change it.

It is soft state, rebuilt from heartbeats within one interval. The numbers that placement compares
are in a table with one column per worker, so that a decision among a thousand workers is a few
array operations.
"""

from collections import Counter
from dataclasses import dataclass, replace
from enum import IntEnum, auto, unique
from hashlib import blake2b
from math import exp
from typing import assert_never

import numpy as np
import numpy.typing as npt

from tidemill.cluster.router.prefix_table import Chain, Prefixes, Slots, cut_keys
from tidemill.workers.messages import Heartbeat, WorkerId, WorkerInfo, WorkerLoad

VIOLATIONS = "ownership_violations"
"""The counter of workers that goes on over their restarts, because its event ends the worker."""

HELD_KEYS_MAX = 1 << 20
"""The number of announced depths of a worker that the router remembers: the latest ones."""

PLACED_KEYS_MAX = 1 << 14
"""The maximum number of pages of placed prompts that the router remembers for a worker, and for all lost
workers together. It is less for a worker with memory for fewer pages."""

BOOKING_SETTLE_S = 0.25
"""The time after `due_s` until the heartbeats of a worker certainly include a booking."""

RHO_TAU_S = 10.0
"""The time constant of the average load of the fleet."""

FETCHED_SHARE = 1 / 8
"""The assumed cost of fetching a token, relative to computing it, at an unknown fetch speed."""

SLOTS_MIN = 16

LOST = 0
"""The number of the set of keys of prompts that were placed on workers which are lost."""


@unique
class Column(IntEnum):
    """The numbers of a worker that placement compares. A stream is a request in decoding."""

    DECODES = 0  # 1.0: takes streams
    PREFILLS = auto()  # 1.0: computes prompts for other workers
    MIXED = auto()  # 1.0: takes streams and computes their prompts
    NAME = auto()  # 52 bits of the hash of its name
    NAMESPACE = auto()  # 52 bits of the hash of the namespace of its pages
    BUSY_UNTIL_S = auto()  # the time at which its queued prompt tokens will be computed
    QUEUED_TOKENS = auto()
    ROWS = auto()  # running, waiting and booked requests
    STREAMS = auto()  # the running ones that decode
    BUDGET_BYTES = auto()
    TAKEN_BYTES = auto()  # by running, waiting and booked requests
    CACHED_BYTES = auto()  # of prefixes that no request holds
    STEP_S = auto()
    TOKEN_S = auto()
    PAIR_S = auto()
    ROW_S = auto()  # for one token of one stream
    PAGE_S = auto()  # to fetch a page
    STATE_S = auto()  # to fetch a checkpoint
    STEP_TOKENS = auto()
    ITL_TARGET_S = auto()  # of a step with prompts beside streams; 0.0: no limit
    PAGE_TOKENS = auto()
    PAGE_BYTES = auto()
    STATE_BYTES = auto()
    PUBLISHES = auto()  # 1.0: the store has its pages


Table = npt.NDArray[np.float64]
"""A row for each `Column`, a column for each slot."""

UNSETTLED = [Column.BUSY_UNTIL_S, Column.QUEUED_TOKENS, Column.ROWS, Column.TAKEN_BYTES]
"""The columns that bookings add to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Booking:
    """Work placed on a worker, which its heartbeats include from soon after `due_s` on. `keys` are those of
    the pages of the prompt, which the worker will hold."""

    tokens: int
    rows: int
    at_s: float
    due_s: float
    seconds: float = 0.0
    num_bytes: int = 0
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A worker, by its last heartbeat. `slot` is its column in the table."""

    info: WorkerInfo
    load: WorkerLoad
    heartbeat_at_s: float
    sequence: int
    slot: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatArrived:
    heartbeat: Heartbeat
    now_s: float


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is gone: its stream broke, or it was silent for too long."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class RequestBooked:
    worker: WorkerId
    booking: Booking


Event = HeartbeatArrived | WorkerLost | RequestBooked


class Fleet:
    """The workers, changed only by events. Their order among workers affects nothing but slots."""

    def __init__(self, prefixes: Prefixes | None = None) -> None:
        """Create an empty fleet; `prefixes` is a compiled prefix table in place of the Python one."""
        self.members: dict[WorkerId, Member] = {}
        self.table: Table = _vacant(SLOTS_MIN)
        self._workers: list[WorkerId | None] = [None] * SLOTS_MIN  # of each slot
        self._by_name: dict[str, WorkerId] = {}
        self._violations = Counter[str]()  # of earlier workers, by name
        self._bookings: dict[WorkerId, list[Booking]] = {}
        # Two sets for each slot, announced and placed keys; and LOST.
        self.prefixes = prefixes or Prefixes()
        self._looked_up: tuple[tuple[bytes, ...], Slots] | None = None  # reset by each event
        self._chain: tuple[tuple[bytes, ...], Chain] | None = None  # of the last keys
        self._work_s = 0.0  # booked recently; it decays with RHO_TAU_S
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
            worker for worker, member in self.members.items() if now_s - member.heartbeat_at_s > silence_s_max
        ]

    def at(self, slot: int) -> Member:
        worker = self._workers[slot]
        assert worker is not None
        return self.members[worker]

    @property
    def table_address(self) -> int:
        """The address of the table, for compiled code."""
        return self.table.__array_interface__["data"][0]

    def num_held(self, member: Member) -> int:
        """Return the number of announced restorable depths that the router remembers."""
        return self.prefixes.num_held(_announced(member.slot))

    def queued_tokens(self, worker: WorkerId) -> float:
        """Return the prompt tokens that wait on a worker; 0 for an unknown worker."""
        member = self.members.get(worker)
        return 0.0 if member is None else float(self.table[Column.QUEUED_TOKENS, member.slot])

    def total_queued_tokens(self) -> float:
        return float(self.table[Column.QUEUED_TOKENS].sum())

    def depths(self, keys: tuple[bytes, ...]) -> tuple[Slots, Slots]:
        """Return, for each slot, how many of the first `keys` are announced, and how many are
        resident.

        Announced depths can be restored. Resident ones include the pages of prompts placed there.
        """
        announced, placed = self._look_up(keys)[1:].reshape(-1, 2).T
        return announced, np.maximum(announced, placed)

    def shared_pages(self, keys: tuple[bytes, ...]) -> int:
        """Return how many of the first `keys` were in one of the prompts that were placed lately, on any
        worker, which may be lost."""
        return int(self._look_up(keys).max())

    def rho(self, now_s: float) -> float:
        """Return the recently booked work as a share of the capacity of the computing workers."""
        computing = np.count_nonzero(self.table[Column.PREFILLS] + self.table[Column.MIXED])
        return self.work_s(now_s) / (RHO_TAU_S * computing) if computing else 0.0

    def work_s(self, now_s: float) -> float:
        """Return the seconds of recently booked work, which decay with `RHO_TAU_S`."""
        return self._work_s * exp((self._work_at_s - now_s) / RHO_TAU_S)

    def _apply_heartbeat(self, heartbeat: Heartbeat, now_s: float) -> None:
        info, announcement = heartbeat.info, heartbeat.announcement
        earlier = self._by_name.get(info.name)
        if earlier is not None and earlier != info.worker:
            self._remove(earlier)
        before = self.members.get(info.worker)
        slot = self._new_slot() if before is None else before.slot
        member = self.members[info.worker] = Member(
            info=info,
            load=self._over_restarts(heartbeat),
            heartbeat_at_s=now_s,
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
        self.table[:, slot] = _settle(self.table[:, slot], _column(member), self._bookings[info.worker])
        if announcement.full:
            self.prefixes.clear(_announced(slot))
        if announcement.removed:
            removed = cut_keys(announcement.removed)
            self.prefixes.remove(_announced(slot), removed)
            if not info.state_bytes:  # a hybrid may keep the page when its checkpoint goes
                self.prefixes.remove(_placed(slot), removed)
        self.prefixes.add(_announced(slot), cut_keys(announcement.added), HELD_KEYS_MAX)

    def _over_restarts(self, heartbeat: Heartbeat) -> WorkerLoad:
        """Return the load with the violations of earlier workers of this name."""
        load, earlier = heartbeat.load, self._violations[heartbeat.info.name]
        if not earlier:
            return load
        counters = load.counters | {VIOLATIONS: earlier + load.counters.get(VIOLATIONS, 0)}
        return replace(load, counters=counters)

    def _remove(self, worker: WorkerId) -> None:
        member = self.members.pop(worker, None)
        if member is None:
            return
        if violations := member.load.counters.get(VIOLATIONS):
            self._violations[member.info.name] = int(violations)
        del self._by_name[member.info.name]
        del self._bookings[worker]
        self._workers[member.slot] = None
        self.table[:, [member.slot]] = _vacant(1)
        self.prefixes.add(LOST, self.prefixes.held(_placed(member.slot)), PLACED_KEYS_MAX)
        self.prefixes.clear(_announced(member.slot))
        self.prefixes.clear(_placed(member.slot))

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
        chain = self.chain(booking.keys)
        self.prefixes.add_chain(_placed(member.slot), chain, min(pages, PLACED_KEYS_MAX))
        if member.info.role != "decode":
            self._work_s = self.work_s(booking.at_s) + booking.seconds
            self._work_at_s = booking.at_s

    def _look_up(self, keys: tuple[bytes, ...]) -> Slots:
        """Return how many of the first `keys` each set of keys has."""
        if self._looked_up is None or self._looked_up[0] is not keys:
            self._looked_up = (
                keys,
                self.prefixes.depths(self.chain(keys), _announced(len(self._workers))),
            )
        return self._looked_up[1]

    def chain(self, keys: tuple[bytes, ...]) -> Chain:
        if self._chain is None or self._chain[0] is not keys:
            self._chain = keys, Chain(cut_keys(keys))
        return self._chain[1]

    def _new_slot(self) -> int:
        if None not in self._workers:
            self.table = np.concatenate([self.table, _vacant(len(self._workers))], axis=1)
            self._workers += [None] * len(self._workers)
        return self._workers.index(None)


def wants_full_announcement(fleet: Fleet, heartbeat: Heartbeat) -> bool:
    """Return whether the router missed announcements between the last heartbeat and this one."""
    if heartbeat.announcement.full:
        return False
    member = fleet.members.get(heartbeat.info.worker)
    return member is None or heartbeat.sequence != member.sequence + 1


def _vacant(num_slots: int) -> Table:
    table = np.zeros((len(Column), num_slots))
    table[[Column.STEP_TOKENS, Column.PAGE_TOKENS]] = 1.0  # divisors
    return table


def _announced(slot: int) -> int:
    return 2 * slot + 1


def _placed(slot: int) -> int:
    return 2 * slot + 2


def _settle(expected: Table, reported: Table, bookings: list[Booking]) -> Table:
    """Return the column of a worker after a heartbeat, which may include the latest bookings or
    not.

    The expected load is kept, but no less than reported, and no more than reported plus all
    bookings. Adding all of them would count some twice until the next heartbeat.
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
    column[Column.BUSY_UNTIL_S] = member.heartbeat_at_s + load.queued_s
    column[Column.QUEUED_TOKENS] = load.queued_tokens
    column[Column.ROWS] = load.running_rows + load.waiting_rows
    column[Column.STREAMS] = load.streams
    column[Column.BUDGET_BYTES] = load.budget_bytes
    column[Column.TAKEN_BYTES] = load.live_bytes + load.wanted_bytes
    column[Column.CACHED_BYTES] = load.cached_bytes
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
    column[Column.ITL_TARGET_S] = info.itl_target_s
    column[Column.PAGE_TOKENS] = info.page_tokens
    column[Column.PAGE_BYTES] = info.page_bytes
    column[Column.STATE_BYTES] = info.state_bytes
    column[Column.PUBLISHES] = info.publishes
    return column


def _bits(text: str) -> int:
    """Return 52 bits of a hash, which a float64 holds exactly."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 12
