"""The fleet view is what the heartbeats said last and what was placed since, and nothing else."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.router.fleet_view import (
    BOOKING_SETTLE_S,
    LEAST_SLOTS,
    PLACED_KEYS_MAX,
    RHO_TAU_S,
    Booking,
    Column,
    Fleet,
    HeartbeatArrived,
    RequestBooked,
    WorkerLost,
    wants_full_announcement,
)
from tidemill.cluster.router.prefix_table import LOG_SLACK
from tidemill.workers.messages import (
    Announcement,
    Heartbeat,
    MemoryUse,
    Role,
    Speed,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
A, B = WorkerId("decode-0.1"), WorkerId("decode-1.1")
NO_NEWS = Announcement()
NO_LOAD = WorkerLoad()
KEYS = tuple(bytes([key]) for key in range(1, 9))


def beat(
    worker: str = A,
    sequence: int = 0,
    announcement: Announcement = NO_NEWS,
    load: WorkerLoad = NO_LOAD,
    *,
    role: Role = "decode",
    draining: bool = False,
    state_bytes: int = 0,
    page_bytes: int = 0,
) -> Heartbeat:
    return Heartbeat(
        info=WorkerInfo(
            worker=WorkerId(worker),
            name=worker.partition(".")[0],
            role=role,
            address=f"at:{worker}",
            pid=1,
            node="n",
            state_bytes=state_bytes,
            page_bytes=page_bytes,
        ),
        sequence=sequence,
        load=load,
        announcement=announcement,
        draining=draining,
    )


def of(fleet: Fleet, worker: str, column: Column) -> float:
    return float(fleet.table[column, fleet.members[WorkerId(worker)].slot])


def announced(fleet: Fleet, worker: str, keys: tuple[bytes, ...] = KEYS) -> int:
    return int(fleet.depths(keys)[0][fleet.members[WorkerId(worker)].slot])


def resident(fleet: Fleet, worker: str, keys: tuple[bytes, ...] = KEYS) -> int:
    return int(fleet.depths(keys)[1][fleet.members[WorkerId(worker)].slot])


def booking(at_s: float = 0.0, keys: tuple[bytes, ...] = (), seconds: float = 0.0) -> Booking:
    return Booking(tokens=100, rows=1, at_s=at_s, due_s=at_s, seconds=seconds, num_bytes=7, keys=keys)


@PROPERTY
@given(
    st.lists(st.tuples(st.booleans(), *[st.frozensets(st.binary(min_size=1, max_size=1))] * 2), max_size=8),
    st.lists(st.binary(min_size=1, max_size=1), max_size=9, unique=True),
)
def test_what_is_held_follows_the_announcements(
    news: list[tuple[bool, frozenset[bytes], frozenset[bytes]]], chain: list[bytes]
) -> None:
    fleet, held = Fleet(), set[bytes]()
    fleet.apply(HeartbeatArrived(beat(), 0.0))
    for sequence, (full, added, removed) in enumerate(news, start=1):
        announcement = Announcement(added=tuple(added), removed=tuple(removed), full=full)
        fleet.apply(HeartbeatArrived(beat(sequence=sequence, announcement=announcement), 0.0))
        held = ((set[bytes]() if full else held) - removed) | added
        assert fleet.num_held(fleet.members[A]) == len(held)
    deepest = max((depth for depth, key in enumerate(chain, start=1) if key in held), default=0)
    assert announced(fleet, A, tuple(chain)) == resident(fleet, A, tuple(chain)) == deepest


def test_a_full_announcement_is_wanted_from_a_stranger_and_after_a_hole() -> None:
    fleet = Fleet()
    full = Announcement(full=True)
    assert wants_full_announcement(fleet, beat(sequence=5))
    assert not wants_full_announcement(fleet, beat(sequence=5, announcement=full))
    fleet.apply(HeartbeatArrived(beat(sequence=5, announcement=full), 0.0))
    assert not wants_full_announcement(fleet, beat(sequence=6))
    assert wants_full_announcement(fleet, beat(sequence=7))
    assert wants_full_announcement(fleet, beat(sequence=5))
    assert not wants_full_announcement(fleet, beat(sequence=7, announcement=full))
    fleet.apply(WorkerLost(A))
    assert wants_full_announcement(fleet, beat(sequence=6))


def test_a_later_life_takes_the_place_of_the_earlier_one() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat("decode-0.1", announcement=Announcement(added=KEYS, full=True)), 0.0))
    fleet.apply(HeartbeatArrived(beat("decode-1.1"), 0.0))
    fleet.apply(RequestBooked(A, booking(keys=KEYS)))
    fleet.apply(HeartbeatArrived(beat("decode-0.2"), 0.0))
    assert sorted(fleet.members) == ["decode-0.2", "decode-1.1"]
    assert announced(fleet, "decode-0.2") == resident(fleet, "decode-0.2") == 0
    assert fleet.queued_tokens(WorkerId("decode-0.2")) == 0.0


def test_a_worker_that_is_gone_leaves_nothing() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat(announcement=Announcement(added=KEYS, full=True)), 0.0))
    fleet.apply(RequestBooked(A, booking(keys=KEYS)))
    assert fleet.queued_tokens_of_all() == fleet.queued_tokens(A) == 100.0
    fleet.apply(WorkerLost(A))
    assert not fleet.members
    assert np.array_equal(fleet.table, Fleet().table)
    assert not np.any(fleet.depths(KEYS))
    assert fleet.queued_tokens(A) == fleet.queued_tokens_of_all() == fleet.rho(0.0) == 0.0
    fleet.apply(WorkerLost(A))
    fleet.apply(RequestBooked(A, booking()))
    assert np.array_equal(fleet.table, Fleet().table), "a booking on a worker that is gone is nothing"


def test_a_heartbeat_replaces_what_the_last_one_said() -> None:
    fleet = Fleet()
    speed = Speed(step_s=0.1, token_s=0.2, pair_s=0.3, row_s=0.4, fetch_bytes_per_s=0.5)
    memory = MemoryUse(pages_live=30, states_live=12, pages_cached=50)
    load = WorkerLoad(
        queued_tokens=7,
        queued_s=1.5,
        running_rows=2,
        waiting_rows=1,
        memory=memory,
        budget_bytes=100,
        wanted_bytes=8,
        speed=speed,
    )
    fleet.apply(HeartbeatArrived(beat(load=load, draining=True, page_bytes=5, state_bytes=6), 1.0))
    assert fleet.members[A].draining
    assert [of(fleet, A, column) for column in (Column.DECODES, Column.PREFILLS, Column.MIXED)] == [0.0] * 3
    fleet.apply(HeartbeatArrived(beat(sequence=1, load=load, page_bytes=5, state_bytes=6), 2.0))
    member = fleet.members[A]
    assert (member.draining, member.heard_at_s, member.sequence) == (False, 2.0, 1)
    assert fleet.at(member.slot) == member
    names = {Column.NAME, Column.NAMESPACE}
    assert {column: of(fleet, A, column) for column in Column if column not in names} == {
        Column.DECODES: 1.0,
        Column.PREFILLS: 0.0,
        Column.MIXED: 0.0,
        Column.BUSY_UNTIL_S: 3.5,
        Column.QUEUED_TOKENS: 7.0,
        Column.ROWS: 3.0,
        Column.BUDGET_BYTES: 100.0,
        Column.TAKEN_BYTES: 50.0,
        Column.STEP_S: 0.1,
        Column.TOKEN_S: 0.2,
        Column.PAIR_S: 0.3,
        Column.ROW_S: 0.4,
        Column.PAGE_S: 10.0,
        Column.STATE_S: 12.0,
        Column.STEP_TOKENS: 8192.0,
        Column.PAGE_TOKENS: 64.0,
        Column.PAGE_BYTES: 5.0,
        Column.STATE_BYTES: 6.0,
    }


@pytest.mark.parametrize(
    ("role", "columns"),
    [("prefill", (0.0, 1.0, 0.0)), ("decode", (1.0, 0.0, 0.0)), ("mixed", (1.0, 0.0, 1.0))],
)
def test_roles_say_what_a_worker_takes(role: Role, columns: tuple[float, float, float]) -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat(role="mixed"), 0.0))
    fleet.apply(HeartbeatArrived(beat(sequence=1, role=role), 0.0))  # it was switched
    assert (
        tuple(of(fleet, A, column) for column in (Column.DECODES, Column.PREFILLS, Column.MIXED)) == columns
    )


def test_silent_workers_are_named() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat("a.1"), 10.0))
    fleet.apply(HeartbeatArrived(beat("b.1"), 12.0))
    assert fleet.silent_since(13.0, silence_s_max=3.0) == []
    assert fleet.silent_since(13.5, silence_s_max=3.0) == ["a.1"]
    assert fleet.silent_since(16.0, silence_s_max=3.0) == ["a.1", "b.1"]


def test_a_booking_counts_until_the_worker_reports_it_itself() -> None:
    fleet, load = Fleet(), WorkerLoad(queued_tokens=5, queued_s=0.5, running_rows=1)
    fleet.apply(HeartbeatArrived(beat(load=load), 0.0))
    fleet.apply(RequestBooked(A, booking(0.25, seconds=2.0)))
    late = Booking(tokens=10, rows=2, at_s=0.25, due_s=5.0, seconds=0.25, num_bytes=3)
    fleet.apply(RequestBooked(A, late))
    assert fleet.queued_tokens(A) == 115.0
    assert (of(fleet, A, Column.ROWS), of(fleet, A, Column.TAKEN_BYTES)) == (4.0, 10.0)
    assert of(fleet, A, Column.BUSY_UNTIL_S) == 0.5 + 2.0 + 0.25
    fleet.apply(HeartbeatArrived(beat(sequence=1, load=load), 0.25 + BOOKING_SETTLE_S / 2))
    assert fleet.queued_tokens(A) == 115.0, "a report that was on its way"
    fleet.apply(HeartbeatArrived(beat(sequence=2, load=load), 0.25 + 2 * BOOKING_SETTLE_S))
    assert (fleet.queued_tokens(A), of(fleet, A, Column.ROWS)) == (15.0, 3.0), "the late one is on its way"
    fleet.apply(HeartbeatArrived(beat(sequence=3, load=load), 5.0 + 2 * BOOKING_SETTLE_S))
    assert (fleet.queued_tokens(A), of(fleet, A, Column.ROWS)) == (5.0, 1.0)


def test_a_report_that_has_the_booking_does_not_count_it_twice() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat(), 0.0))
    fleet.apply(RequestBooked(A, booking(1.0, seconds=2.0)))
    load = WorkerLoad(queued_tokens=90, queued_s=1.75, running_rows=1)  # it has begun with it
    fleet.apply(HeartbeatArrived(beat(sequence=1, load=load), 1.0 + BOOKING_SETTLE_S / 2))
    assert (fleet.queued_tokens(A), of(fleet, A, Column.ROWS)) == (100.0, 1.0)
    assert of(fleet, A, Column.BUSY_UNTIL_S) == 3.0
    more = replace(load, queued_tokens=490, queued_s=10.0)
    fleet.apply(HeartbeatArrived(beat(sequence=2, load=more), 1.0 + BOOKING_SETTLE_S / 2))
    assert fleet.queued_tokens(A) == 490.0, "never less than is reported"
    fleet.apply(HeartbeatArrived(beat(sequence=3), 1.0 + BOOKING_SETTLE_S / 2))
    assert fleet.queued_tokens(A) == 100.0, "never more than is reported and booked"
    assert of(fleet, A, Column.BUSY_UNTIL_S) <= 1.0 + BOOKING_SETTLE_S / 2 + 2.0


def test_an_idle_worker_is_busy_from_the_booking_on() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat(), 0.0))
    fleet.apply(RequestBooked(A, booking(10.0, seconds=2.0)))
    fleet.apply(RequestBooked(A, booking(11.0, seconds=2.0)))
    assert of(fleet, A, Column.BUSY_UNTIL_S) == 14.0


def test_pages_that_are_on_their_way_are_resident() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat(A), 0.0))
    fleet.apply(HeartbeatArrived(beat(B), 0.0))
    fleet.apply(RequestBooked(A, booking(keys=KEYS[:5])))
    assert (announced(fleet, A), resident(fleet, A), resident(fleet, B)) == (0, 5, 0)
    fleet.apply(HeartbeatArrived(beat(A, 1, Announcement(added=KEYS[:5])), 1.0))
    assert (announced(fleet, A), resident(fleet, A)) == (5, 5)
    fleet.apply(HeartbeatArrived(beat(A, 2, Announcement(removed=KEYS[3:5])), 2.0))
    assert (announced(fleet, A), resident(fleet, A)) == (3, 3), "they were evicted"


def test_a_checkpoint_that_goes_leaves_the_pages() -> None:
    fleet = Fleet()
    fleet.apply(HeartbeatArrived(beat(state_bytes=100), 0.0))
    fleet.apply(RequestBooked(A, booking(keys=KEYS)))
    fleet.apply(HeartbeatArrived(beat(A, 1, Announcement(added=KEYS[-1:]), state_bytes=100), 1.0))
    assert (announced(fleet, A), announced(fleet, A, KEYS[:-1])) == (8, 0)
    fleet.apply(HeartbeatArrived(beat(A, 2, Announcement(removed=KEYS[-1:]), state_bytes=100), 2.0))
    assert (announced(fleet, A), resident(fleet, A)) == (0, 8)


@pytest.mark.parametrize("budget_pages", [0, 50])
def test_prompts_are_forgotten_when_the_memory_of_their_worker_is_full(budget_pages: int) -> None:
    """The deepest pages of the oldest first."""
    fleet = Fleet()
    load = WorkerLoad(budget_bytes=1000 * budget_pages)
    fleet.apply(HeartbeatArrived(beat(load=load, page_bytes=1000), 0.0))
    prompts = [tuple(bytes([1, number]) + bytes([page]) for page in range(100)) for number in range(250)]
    for keys in prompts:
        fleet.apply(RequestBooked(A, booking(keys=keys)))
    most = budget_pages or PLACED_KEYS_MAX
    depths = [resident(fleet, A, keys) for keys in prompts]
    assert depths == sorted(depths)
    assert most <= sum(depths) <= most + most // 4 + LOG_SLACK
    assert depths[-1] >= min(100, most)
    roots = [resident(fleet, A, keys[:1]) for keys in prompts]
    assert roots == [min(1, depth) for depth in depths], (
        "of one that is forgotten in part, the rest is of use"
    )


def test_rho_is_the_share_of_time_that_was_booked_of_late() -> None:
    fleet = Fleet()
    assert fleet.rho(0.0) == 0.0
    fleet.apply(HeartbeatArrived(beat("prefill-0.1", role="prefill"), 0.0))
    fleet.apply(HeartbeatArrived(beat("mixed-0.1", role="mixed"), 0.0))
    fleet.apply(HeartbeatArrived(beat(A), 0.0))
    for second in range(100):
        fleet.apply(RequestBooked(WorkerId("prefill-0.1"), booking(float(second), seconds=1.2)))
        fleet.apply(RequestBooked(A, booking(float(second), seconds=50.0)))  # it computes no prompts
    assert fleet.rho(99.5) == pytest.approx(0.6, rel=0.03)
    assert fleet.rho(99.5 + RHO_TAU_S) == pytest.approx(0.6 / np.e, rel=0.03)


@PROPERTY
@given(st.integers(0, 1000))
def test_the_order_in_which_workers_are_heard_does_not_matter(seed: int) -> None:
    rng = Random(seed)
    beats = [
        beat(
            f"w-{index}.1",
            announcement=Announcement(added=tuple(rng.sample(KEYS, rng.randrange(8))), full=True),
            load=WorkerLoad(queued_s=rng.random(), running_rows=rng.randrange(9)),
        )
        for index in range(2 * LEAST_SLOTS + 3)
    ]
    fleets = [Fleet(), Fleet()]
    for fleet, order in zip(fleets, (beats, rng.sample(beats, len(beats))), strict=True):
        for heartbeat in order:
            fleet.apply(HeartbeatArrived(heartbeat, 0.0))
        gone = fleet.members.get(WorkerId("w-3.1"))
        assert gone is not None
        fleet.apply(WorkerLost(gone.info.worker))
    for heartbeat in beats:
        worker = heartbeat.info.worker
        assert (worker in fleets[0].members) == (worker in fleets[1].members) == (worker != "w-3.1")
        if worker in fleets[0].members:
            columns = [fleet.table[:, fleet.members[worker].slot].tolist() for fleet in fleets]
            assert columns[0] == columns[1]
            assert announced(fleets[0], worker) == announced(fleets[1], worker)
