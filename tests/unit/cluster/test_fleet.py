"""The fleet view is what the heartbeats said last, and nothing that they did not say."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.fleet import (
    BOOKING_SETTLE_S,
    Booked,
    Booking,
    Fleet,
    Heard,
    Lost,
    wants_full_announcement,
)
from tidemill.workers.messages import Announcement, Heartbeat, WorkerId, WorkerInfo, WorkerLoad

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)
A = WorkerId("decode-0.1")
NO_NEWS = Announcement()


def beat(
    worker: str = A,
    sequence: int = 0,
    announcement: Announcement = NO_NEWS,
    *,
    queued_tokens: int = 0,
    draining: bool = False,
) -> Heartbeat:
    return Heartbeat(
        info=WorkerInfo(
            worker=WorkerId(worker),
            name=worker.partition(".")[0],
            role="decode",
            address=f"at:{worker}",
            pid=1,
            node="n",
        ),
        sequence=sequence,
        load=WorkerLoad(queued_tokens=queued_tokens, running_rows=2, waiting_rows=1),
        announcement=announcement,
        draining=draining,
    )


def heard(fleet: Fleet, heartbeat: Heartbeat, now_s: float = 0.0) -> Fleet:
    return fleet.apply(Heard(heartbeat, now_s))


@PROPERTY
@given(
    st.lists(st.tuples(st.booleans(), *[st.frozensets(st.binary(min_size=1, max_size=1))] * 2), max_size=8)
)
def test_what_is_held_follows_the_announcements(
    news: list[tuple[bool, frozenset[bytes], frozenset[bytes]]],
) -> None:
    fleet, held = Fleet(), set[bytes]()
    for sequence, (full, added, removed) in enumerate(news):
        announcement = Announcement(added=tuple(added), removed=tuple(removed), full=full)
        fleet = heard(fleet, beat(sequence=sequence, announcement=announcement))
        held = ((set[bytes]() if full else held) - removed) | added
        assert fleet.members[A].held == held


def test_a_full_announcement_is_wanted_from_a_stranger_and_after_a_hole() -> None:
    fleet = Fleet()
    full = Announcement(full=True)
    assert wants_full_announcement(fleet, beat(sequence=5))
    assert not wants_full_announcement(fleet, beat(sequence=5, announcement=full))
    fleet = heard(fleet, beat(sequence=5, announcement=full))
    assert not wants_full_announcement(fleet, beat(sequence=6))
    assert wants_full_announcement(fleet, beat(sequence=7))
    assert wants_full_announcement(fleet, beat(sequence=5))
    assert not wants_full_announcement(fleet, beat(sequence=7, announcement=full))
    assert wants_full_announcement(fleet.apply(Lost(A)), beat(sequence=6))


def test_a_later_life_takes_the_place_of_the_earlier_one() -> None:
    fleet = heard(Fleet(), beat("decode-0.1", announcement=Announcement(added=(b"k",), full=True)))
    fleet = heard(fleet, beat("decode-1.1"))
    fleet = heard(fleet, beat("decode-0.2"))
    assert sorted(fleet.members) == ["decode-0.2", "decode-1.1"]
    assert fleet.members[WorkerId("decode-0.2")].held == frozenset()


def test_a_heartbeat_replaces_what_the_last_one_said() -> None:
    fleet = heard(Fleet(), beat(queued_tokens=7, draining=True), now_s=1.0)
    assert fleet.members[A].draining
    fleet = heard(fleet, beat(sequence=1, queued_tokens=3), now_s=2.0)
    member = fleet.members[A]
    assert (member.queued_tokens, member.rows, member.draining) == (3, 3, False)
    assert (member.heard_at_s, member.sequence) == (2.0, 1)


def test_silent_workers_are_named() -> None:
    fleet = heard(heard(Fleet(), beat("a.1"), now_s=10.0), beat("b.1"), now_s=12.0)
    assert fleet.silent(13.0, silence_s_max=3.0) == []
    assert fleet.silent(13.5, silence_s_max=3.0) == ["a.1"]
    assert fleet.silent(16.0, silence_s_max=3.0) == ["a.1", "b.1"]


def test_a_booking_counts_until_the_worker_reports_it_itself() -> None:
    fleet = heard(Fleet(), beat(queued_tokens=5), now_s=0.0)
    fleet = fleet.apply(Booked(A, Booking(tokens=100, rows=1, at_s=1.0)))
    fleet = fleet.apply(Booked(A, Booking(tokens=10, rows=2, at_s=1.4)))
    assert (fleet.members[A].queued_tokens, fleet.members[A].rows) == (115, 6)
    fleet = heard(fleet, beat(sequence=1), now_s=1.0 + BOOKING_SETTLE_S)
    assert (fleet.members[A].queued_tokens, fleet.members[A].rows) == (10, 5)
    fleet = heard(fleet, beat(sequence=2), now_s=9.0)
    assert (fleet.members[A].queued_tokens, fleet.members[A].rows) == (0, 3)


def test_a_booking_on_a_worker_that_is_gone_is_nothing() -> None:
    fleet = heard(Fleet(), beat())
    booked = Booked(WorkerId("other.1"), Booking(tokens=1, rows=1, at_s=0.0))
    assert fleet.apply(booked) == fleet


def test_events_leave_the_view_before_them_alone() -> None:
    before = heard(Fleet(), beat())
    same = replace(before, members=dict(before.members))
    before.apply(Lost(A))
    before.apply(Booked(A, Booking(tokens=1, rows=1, at_s=0.0)))
    heard(before, beat("other.1"))
    assert before == same
    assert before.apply(Lost(WorkerId("other.1"))) == before
