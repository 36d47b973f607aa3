"""The fleet view: the latest heartbeats, and the requests placed since."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.heartbeats import heartbeat
from tidemill.cluster.router.fleet_view import (
    BOOKING_SETTLE_S,
    PLACED_KEYS_MAX,
    RHO_TAU_S,
    VIOLATIONS,
    Booking,
    Column,
    Fleet,
    HeartbeatArrived,
    RequestBooked,
    WorkerLost,
    wants_full_announcement,
)
from tidemill.cluster.router.prefix_table import LOG_SLACK
from tidemill.workers.messages import NO_MEMORY, Announcement, Role, Speed, WorkerId

A, B = WorkerId("decode-0.1"), WorkerId("decode-1.1")
KEYS = tuple(bytes([key]) for key in range(1, 9))
ROLE_COLUMNS = (Column.DECODES, Column.PREFILLS, Column.MIXED)


def apply(
    fleet: Fleet,
    now_s: float = 0.0,
    worker: str = A,
    role: Role = "decode",
    **overrides: Any,  # noqa: ANN401
) -> None:
    """Apply a heartbeat with these fields."""
    fleet.apply(HeartbeatArrived(heartbeat(worker, role, **overrides), now_s))


def value(fleet: Fleet, worker: str, column: Column) -> float:
    return float(fleet.table[column, fleet.members[WorkerId(worker)].slot])


def announced(fleet: Fleet, worker: str, keys: tuple[bytes, ...] = KEYS) -> int:
    return int(fleet.depths(keys)[0][fleet.members[WorkerId(worker)].slot])


def resident(fleet: Fleet, worker: str, keys: tuple[bytes, ...] = KEYS) -> int:
    return int(fleet.depths(keys)[1][fleet.members[WorkerId(worker)].slot])


def booking(at_s: float = 0.0, keys: tuple[bytes, ...] = (), seconds: float = 0.0) -> Booking:
    return Booking(tokens=100, rows=1, at_s=at_s, due_s=at_s, seconds=seconds, num_bytes=7, keys=keys)


@given(
    st.lists(st.tuples(st.booleans(), *[st.frozensets(st.binary(min_size=1, max_size=1))] * 2), max_size=8),
    st.lists(st.binary(min_size=1, max_size=1), max_size=9, unique=True),
)
def test_fleet_holds_the_keys_that_were_announced(
    announcements: list[tuple[bool, frozenset[bytes], frozenset[bytes]]], chain: list[bytes]
) -> None:
    fleet, held = Fleet(), set[bytes]()
    apply(fleet)
    for sequence, (full, added, removed) in enumerate(announcements, start=1):
        announcement = Announcement(added=tuple(added), removed=tuple(removed), full=full)
        apply(fleet, sequence=sequence, announcement=announcement)
        held = ((set[bytes]() if full else held) - removed) | added
        assert fleet.num_held(fleet.members[A]) == len(held)
    deepest = max((depth for depth, key in enumerate(chain, start=1) if key in held), default=0)
    assert announced(fleet, A, tuple(chain)) == resident(fleet, A, tuple(chain)) == deepest


def test_full_announcement_is_wanted_from_a_new_worker_and_after_a_gap() -> None:
    fleet = Fleet()
    full = Announcement(full=True)

    def wants(sequence: int, announcement: Announcement | None = None) -> bool:
        return wants_full_announcement(fleet, heartbeat(sequence=sequence, announcement=announcement))

    assert wants(5)
    assert not wants(5, full)
    apply(fleet, sequence=5, announcement=full)
    assert not wants(6)
    assert wants(7)
    assert wants(5)
    assert not wants(7, full)
    fleet.apply(WorkerLost(A))
    assert wants(6)


def test_violations_that_ended_workers_of_a_name_add_up() -> None:
    fleet = Fleet()
    for life, total in enumerate((1, 2, 3), start=1):
        apply(fleet, worker=f"decode-0.{life}", counters={VIOLATIONS: 1.0, "steps": 9.0})
        counters = fleet.members[WorkerId(f"decode-0.{life}")].load.counters
        assert counters == {VIOLATIONS: total, "steps": 9}
        fleet.apply(WorkerLost(WorkerId(f"decode-0.{life}")))
    apply(fleet, worker="decode-0.4")
    assert fleet.members[WorkerId("decode-0.4")].load.counters == {VIOLATIONS: 3}


def test_fleet_forgets_a_lost_worker() -> None:
    fleet = Fleet()
    apply(fleet, added=KEYS)
    fleet.apply(RequestBooked(A, booking(keys=KEYS)))
    assert fleet.total_queued_tokens() == fleet.queued_tokens(A) == 100.0
    fleet.apply(WorkerLost(A))
    assert not fleet.members
    assert np.array_equal(fleet.table, Fleet().table)
    assert not np.any(fleet.depths(KEYS))
    assert fleet.queued_tokens(A) == fleet.total_queued_tokens() == fleet.rho(0.0) == 0.0
    fleet.apply(WorkerLost(A))
    fleet.apply(RequestBooked(A, booking()))
    assert np.array_equal(fleet.table, Fleet().table), "a booking on a lost worker has no effect"


def test_fleet_replaces_a_heartbeat_by_the_next_one() -> None:
    fleet = Fleet()
    speed = Speed(step_s=0.1, token_s=0.2, pair_s=0.3, row_s=0.4, fetch_bytes_per_s=0.5)
    memory = NO_MEMORY | {"pages_live": 30, "states_live": 12, "pages_cached": 50}
    report = partial(
        apply,
        fleet,
        queued_tokens=7,
        queued_s=1.5,
        running_rows=2,
        streams=1,
        waiting_rows=1,
        memory=memory,
        budget_bytes=100,
        wanted_bytes=8,
        speed=speed,
        page_bytes=5,
        state_bytes=6,
    )
    report(1.0, draining=True)
    assert fleet.members[A].draining
    assert [value(fleet, A, column) for column in ROLE_COLUMNS] == [0.0] * 3
    report(2.0, sequence=1)
    member = fleet.members[A]
    assert (member.draining, member.heartbeat_at_s, member.sequence) == (False, 2.0, 1)
    assert fleet.at(member.slot) == member
    names = {Column.NAME, Column.NAMESPACE}
    assert {column: value(fleet, A, column) for column in Column if column not in names} == {
        Column.DECODES: 1.0,
        Column.PREFILLS: 0.0,
        Column.MIXED: 0.0,
        Column.BUSY_UNTIL_S: 3.5,
        Column.QUEUED_TOKENS: 7.0,
        Column.ROWS: 3.0,
        Column.STREAMS: 1.0,
        Column.BUDGET_BYTES: 100.0,
        Column.TAKEN_BYTES: 50.0,
        Column.CACHED_BYTES: 50.0,
        Column.STEP_S: 0.1,
        Column.TOKEN_S: 0.2,
        Column.PAIR_S: 0.3,
        Column.ROW_S: 0.4,
        Column.PAGE_S: 10.0,
        Column.STATE_S: 12.0,
        Column.STEP_TOKENS: 8192.0,
        Column.ITL_TARGET_S: 0.0,
        Column.PAGE_TOKENS: 64.0,
        Column.PAGE_BYTES: 5.0,
        Column.STATE_BYTES: 6.0,
        Column.PUBLISHES: 1.0,
    }


def test_booking_counts_until_heartbeats_include_it() -> None:
    fleet = Fleet()
    report = partial(apply, fleet, queued_tokens=5, queued_s=0.5, running_rows=1)
    report()
    fleet.apply(RequestBooked(A, booking(0.25, seconds=2.0)))
    late = Booking(tokens=10, rows=2, at_s=0.25, due_s=5.0, seconds=0.25, num_bytes=3)
    fleet.apply(RequestBooked(A, late))
    assert fleet.queued_tokens(A) == 115.0
    assert (value(fleet, A, Column.ROWS), value(fleet, A, Column.TAKEN_BYTES)) == (4.0, 10.0)
    assert value(fleet, A, Column.BUSY_UNTIL_S) == 0.5 + 2.0 + 0.25
    report(0.25 + BOOKING_SETTLE_S / 2, sequence=1)
    assert fleet.queued_tokens(A) == 115.0, "the heartbeat may be older than the booking"
    report(0.25 + 2 * BOOKING_SETTLE_S, sequence=2)
    assert (fleet.queued_tokens(A), value(fleet, A, Column.ROWS)) == (15.0, 3.0), (
        "the late booking is not due yet"
    )
    report(5.0 + 2 * BOOKING_SETTLE_S, sequence=3)
    assert (fleet.queued_tokens(A), value(fleet, A, Column.ROWS)) == (5.0, 1.0)


def test_booking_in_a_heartbeat_counts_once() -> None:
    fleet, soon_s = Fleet(), 1.0 + BOOKING_SETTLE_S / 2
    apply(fleet)
    fleet.apply(RequestBooked(A, booking(1.0, seconds=2.0)))
    apply(fleet, soon_s, sequence=1, queued_tokens=90, queued_s=1.75, running_rows=1)  # it has started
    assert (fleet.queued_tokens(A), value(fleet, A, Column.ROWS)) == (100.0, 1.0)
    assert value(fleet, A, Column.BUSY_UNTIL_S) == 3.0
    apply(fleet, soon_s, sequence=2, queued_tokens=490, queued_s=10.0, running_rows=1)
    assert fleet.queued_tokens(A) == 490.0, "no less than reported"
    apply(fleet, soon_s, sequence=3)
    assert fleet.queued_tokens(A) == 100.0, "no more than reported and booked"
    assert value(fleet, A, Column.BUSY_UNTIL_S) <= soon_s + 2.0


def test_resident_pages_include_those_of_placed_prompts() -> None:
    fleet = Fleet()
    apply(fleet)
    apply(fleet, worker=B)
    fleet.apply(RequestBooked(A, booking(keys=KEYS[:5])))
    assert (announced(fleet, A), resident(fleet, A), resident(fleet, B)) == (0, 5, 0)
    apply(fleet, 1.0, sequence=1, added=KEYS[:5])
    assert (announced(fleet, A), resident(fleet, A)) == (5, 5)
    apply(fleet, 2.0, sequence=2, announcement=Announcement(removed=KEYS[3:5]))
    assert (announced(fleet, A), resident(fleet, A)) == (3, 3), "they were evicted"


def test_shared_pages_are_those_of_a_prompt_placed_on_any_worker_also_of_a_lost_one() -> None:
    fleet = Fleet()
    apply(fleet)
    apply(fleet, worker=B)
    assert fleet.shared_pages(()) == fleet.shared_pages(KEYS) == 0
    fleet.apply(RequestBooked(B, booking(keys=KEYS[:3])))
    fleet.apply(RequestBooked(A, booking(keys=KEYS[:5])))
    fleet.apply(WorkerLost(A))
    assert fleet.shared_pages(KEYS) == 5
    assert fleet.shared_pages(KEYS[:4]) == 4
    assert resident(fleet, B) == 3


def test_pages_of_lost_workers_are_bounded() -> None:
    fleet = Fleet()
    prompts = [tuple(b"%d/%d" % (number, page) for page in range(1000)) for number in range(30)]
    for number, keys in enumerate(prompts):
        apply(fleet, worker=f"decode-0.{number}")
        fleet.apply(RequestBooked(WorkerId(f"decode-0.{number}"), booking(keys=keys)))
    fleet.apply(WorkerLost(WorkerId("decode-0.29")))
    depths = [fleet.shared_pages(keys) for keys in prompts]
    assert depths == sorted(depths)
    assert PLACED_KEYS_MAX <= sum(depths) <= PLACED_KEYS_MAX + PLACED_KEYS_MAX // 4 + LOG_SLACK


@pytest.mark.parametrize("budget_pages", [0, 50])
def test_fleet_forgets_placed_prompts_beyond_the_memory_of_a_worker(budget_pages: int) -> None:
    """It forgets the deepest pages of the oldest prompts first."""
    fleet = Fleet()
    apply(fleet, budget_bytes=1000 * budget_pages, page_bytes=1000)
    prompts = [tuple(bytes([1, number]) + bytes([page]) for page in range(100)) for number in range(250)]
    for keys in prompts:
        fleet.apply(RequestBooked(A, booking(keys=keys)))
    most = budget_pages or PLACED_KEYS_MAX
    depths = [resident(fleet, A, keys) for keys in prompts]
    assert depths == sorted(depths)
    assert most <= sum(depths) <= most + most // 4 + LOG_SLACK
    assert depths[-1] >= min(100, most)
    roots = [resident(fleet, A, keys[:1]) for keys in prompts]
    assert roots == [min(1, depth) for depth in depths], "the rest of a partly forgotten prompt is a prefix"


def test_rho_is_the_share_of_recently_booked_time() -> None:
    fleet = Fleet()
    assert fleet.rho(0.0) == 0.0
    apply(fleet, worker="prefill-0.1", role="prefill")
    apply(fleet, worker="mixed-0.1", role="mixed")
    apply(fleet)
    for second in range(100):
        fleet.apply(RequestBooked(WorkerId("prefill-0.1"), booking(float(second), seconds=1.2)))
        fleet.apply(RequestBooked(A, booking(float(second), seconds=50.0)))  # it computes no prompts
    assert fleet.rho(99.5) == pytest.approx(0.6, rel=0.03)
    assert fleet.rho(99.5 + RHO_TAU_S) == pytest.approx(0.6 / np.e, rel=0.03)
