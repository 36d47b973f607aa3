"""Requests go where their prefix is and where it costs least, floods go everywhere, and nothing goes where it
was lost."""

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.fleet_view import Fleet, HeartbeatArrived
from tidemill.cluster.router.placement import (
    ANSWER_TOKENS,
    GAP_PAGES_MAX,
    GAP_S_MAX,
    HOP_S,
    KAPPA,
    PATIENCE_S,
    TIED,
    bookings,
    place,
)
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

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)
P = 64
PAGE_BYTES = 1 << 20
SPEED = Speed(step_s=0.01, token_s=1e-4, pair_s=1e-9, row_s=1e-4, fetch_bytes_per_s=10e9)
UNKNOWN = Speed()


def beat(
    name: str,
    role: Role = "decode",
    held: tuple[bytes, ...] = (),
    *,
    speed: Speed = SPEED,
    queued_s: float = 0.0,
    queued: int = 0,
    rows: int = 0,
    live: int = 0,
    budget: int = 0,
    draining: bool = False,
    state_bytes: int = 0,
) -> Heartbeat:
    return Heartbeat(
        info=WorkerInfo(
            worker=WorkerId(f"{name}.1"),
            name=name,
            role=role,
            address=f"at:{name}",
            pid=1,
            node="n",
            page_tokens=P,
            page_bytes=PAGE_BYTES,
            state_bytes=state_bytes,
        ),
        load=WorkerLoad(
            queued_tokens=queued,
            queued_s=queued_s,
            running_rows=rows,
            memory=MemoryUse(pages_live=live),
            budget_bytes=budget,
            speed=speed,
        ),
        sequence=0,
        announcement=Announcement(added=held, full=True),
        draining=draining,
    )


def fleet_of(*beats: Heartbeat) -> Fleet:
    fleet = Fleet()
    for heartbeat in beats:
        fleet.apply(HeartbeatArrived(heartbeat, 0.0))
    return fleet


def keys_of(family: str, num_tokens: int) -> tuple[bytes, ...]:
    return tuple(f"{family}{page}".encode() for page in range((num_tokens - 1) // P))


def ask(num_tokens: int = 4097, family: str = "f", *avoid: str, max_new_tokens: int = 8) -> PlacementRequest:
    return PlacementRequest(
        request_id=f"r-{family}",
        keys=keys_of(family, num_tokens),
        num_tokens=num_tokens,
        max_new_tokens=max_new_tokens,
        avoid=frozenset(map(WorkerId, avoid)),
    )


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_a_prompt_that_is_wanted_whole_takes_no_hop(speed: Speed) -> None:
    fleet = fleet_of(
        beat("p", "prefill", speed=speed), beat("d", speed=speed), beat("e", speed=speed, rows=9)
    )
    assert placed(fleet, ask()).prefill == "p.1"
    route = placed(fleet, replace(ask(), keys=(), recompute_all=True))
    assert (route.decode, route.prefill, route.gap_tokens_max) == ("d.1", None, None)


def placed(fleet: Fleet, request: PlacementRequest) -> Route:
    route = place(fleet, request, 0.0)
    assert route is not None
    return route


def decode_of(fleet: Fleet, request: PlacementRequest) -> str:
    return placed(fleet, request).decode.split(".")[0]


def prefill_of(fleet: Fleet, request: PlacementRequest) -> str | None:
    prefill = placed(fleet, request).prefill
    return None if prefill is None else prefill.split(".")[0]


def book(fleet: Fleet, request: PlacementRequest, now_s: float = 0.0) -> Route:
    route = place(fleet, request, now_s)
    assert route is not None
    for booked in bookings(fleet, request, route, now_s):
        fleet.apply(booked)
    return route


@st.composite
def fleets(draw: st.DrawFn) -> list[Heartbeat]:
    roles: list[Role] = ["prefill", "decode", "mixed"]
    names = draw(st.lists(st.integers(0, 9), max_size=6, unique=True))
    measured = draw(st.booleans())
    keys = keys_of("f", 12 * P)
    return [
        beat(
            f"w{index}",
            draw(st.sampled_from(roles)),
            keys[: draw(st.integers(0, 11))],
            speed=draw(st.sampled_from([SPEED, UNKNOWN, replace(SPEED, token_s=2e-4)]))
            if measured
            else UNKNOWN,
            queued_s=draw(st.sampled_from([0.0, 0.01, 0.5, 20.0])),
            queued=draw(st.sampled_from([0, 30, 3000])),
            rows=draw(st.integers(0, 2)),
            draining=draw(st.booleans()),
            state_bytes=draw(st.sampled_from([0, 1 << 26])),
        )
        for index in names
    ]


@st.composite
def asks(draw: st.DrawFn) -> PlacementRequest:
    avoid = (f"w{index}.1" for index in draw(st.sets(st.integers(0, 9))))
    return ask(draw(st.integers(1, 13 * P)), "f", *avoid)


@PROPERTY
@given(fleets(), asks())
def test_only_those_that_can_are_taken_and_none_it_was_lost_on(
    drawn: list[Heartbeat], request: PlacementRequest
) -> None:
    route = place(fleet_of(*drawn), request, 0.0)
    able = [result.info for result in drawn if result.info.role != "prefill" and not result.draining]
    if route is None:
        assert not able
        return
    preferred = [info for info in able if info.worker not in request.avoid] or able
    decode = next(info for info in preferred if info.worker == route.decode)
    assert route.decode_address == decode.address
    computing = [result.info for result in drawn if result.info.role == "prefill" and not result.draining]
    if decode.role == "mixed" or not computing:
        assert route.prefill is None
    if route.prefill is None:
        assert (route.prefill_address, route.gap_tokens_max) == ("", None)
        return
    preferred = [info for info in computing if info.worker not in request.avoid] or computing
    assert (route.prefill, route.prefill_address) in {(info.worker, info.address) for info in preferred}
    assert route.gap_tokens_max == GAP_PAGES_MAX * P


@PROPERTY
@given(fleets(), asks(), st.integers(0, 99))
def test_routers_that_learned_in_another_order_agree(
    drawn: list[Heartbeat], request: PlacementRequest, seed: int
) -> None:
    """Among many that are equal, too."""
    equal = [replace(result, load=WorkerLoad(), announcement=Announcement(full=True)) for result in drawn]
    for beats in (drawn, equal):
        shuffled = Random(seed).sample(beats, len(beats))
        assert place(fleet_of(*shuffled), request, 0.0) == place(fleet_of(*beats), request, 0.0)


@PROPERTY
@given(fleets(), asks())
def test_placing_changes_nothing(drawn: list[Heartbeat], request: PlacementRequest) -> None:
    fleet = fleet_of(*drawn)
    table = fleet.table.copy()
    route = place(fleet, request, 0.0)
    if route is not None:
        booked = bookings(fleet, request, route, 0.0)
        assert bookings(fleet, request, route, 0.0) == booked
        assert {event.worker for event in booked} == {route.decode, route.prefill} - {None}
        assert all(
            event.booking.rows == 1 and event.booking.due_s >= event.booking.at_s == 0.0 for event in booked
        )
    assert place(fleet, request, 0.0) == route
    assert np.array_equal(fleet.table, table)


@PROPERTY
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 64)), min_size=1, max_size=8),
    st.integers(66, 5000),
)
def test_the_prefill_worker_has_it_first_or_is_its_home(
    workers: list[tuple[float, int]], num_tokens: int
) -> None:
    """While the fleet is idle, to leave home costs others little, and never more than a request bears."""
    request = ask(num_tokens)
    beats = [
        beat(
            f"p{index}",
            "prefill",
            keys_of("f", num_tokens)[:pages],
            queued_s=wait_s,
            speed=replace(SPEED, fetch_bytes_per_s=1.0),
        )
        for index, (wait_s, pages) in enumerate(workers)
    ]
    slow = replace(SPEED, token_s=1.0)
    route = placed(fleet_of(*beats, beat("d", speed=slow)), request)
    if route.prefill is None:
        assert num_tokens <= 2 * P
        return
    depths = [min(pages, (num_tokens - 1) // P) * P for _, pages in workers]
    own_s = [SPEED.prefill_s(depth, (num_tokens - 1) // P * P, 8192) for depth in depths]
    borne_s = PATIENCE_S + min(wait_s for wait_s, _ in workers)
    score_s = [
        wait_s + one_s + min(KAPPA * one_s, KAPPA * min(own_s) + borne_s)
        for (wait_s, _), one_s in zip(workers, own_s, strict=True)
    ]
    assert score_s[int(route.prefill[1:-2])] <= min(score_s) * TIED + 1e-12


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
@pytest.mark.parametrize("index", range(4))
def test_a_prefix_goes_where_it_is_held_until_that_worker_is_flooded(index: int, speed: Speed) -> None:
    slow = replace(speed, fetch_bytes_per_s=0.0)
    others = [beat(f"w{other}", "mixed", speed=slow) for other in range(4) if other != index]
    holder = beat(f"w{index}", "mixed", keys_of("f", 4097), speed=slow, queued_s=0.01, queued=100)
    assert decode_of(fleet_of(*others, holder), ask()) == f"w{index}"
    flooded = replace(holder, load=replace(holder.load, queued_tokens=4097, queued_s=0.5))
    assert decode_of(fleet_of(*others, flooded), ask()) != f"w{index}"


def test_what_the_store_has_is_fetched_if_that_is_faster() -> None:
    holder = beat("p0", "prefill", keys_of("f", 4097), queued_s=0.1)
    idle = beat("p1", "prefill")
    assert prefill_of(fleet_of(holder, idle, beat("d")), ask()) == "p1", "64 MiB at 10 GB/s"
    lame = replace(idle, load=replace(idle.load, speed=replace(SPEED, fetch_bytes_per_s=1e8)))
    assert prefill_of(fleet_of(holder, lame, beat("d")), ask()) == "p0"


def test_a_flood_goes_everywhere() -> None:
    """Also within one heartbeat interval: what was placed is booked."""
    for speed in (SPEED, UNKNOWN):
        fleet = fleet_of(*(beat(f"w{index}", "mixed", speed=speed) for index in range(4)))
        taken = Counter(book(fleet, ask(3000, f"family{index}-")).decode for index in range(40))
        assert len(taken) == 4
        assert min(taken.values()) >= 8


def test_where_it_was_lost_is_better_than_nowhere() -> None:
    a, b = beat("a"), beat("b", queued_s=1000.0)
    assert decode_of(fleet_of(a, b), ask(5, "f", "a.1", "gone.1")) == "b"
    assert decode_of(fleet_of(a), ask(5, "f", "a.1")) == "a"


def test_draining_workers_get_nothing() -> None:
    draining = beat("a", draining=True)
    assert decode_of(fleet_of(draining, beat("b", queued_s=1000.0)), ask(5)) == "b"
    assert place(fleet_of(draining), ask(5), 0.0) is None
    assert place(fleet_of(beat("p", "prefill")), ask(5), 0.0) is None
    assert place(Fleet(), ask(5), 0.0) is None


HOLDERS: list[tuple[str, Role]] = [("p", "prefill"), ("d", "decode")]


def test_a_short_gap_is_not_worth_a_hop() -> None:
    fleet = fleet_of(*(beat(name, role, keys_of("f", 4097)[:40]) for name, role in HOLDERS))
    assert prefill_of(fleet, ask(40 * P + 128)) is None
    assert prefill_of(fleet, ask(40 * P + 129)) == "p"
    assert prefill_of(fleet, ask(128, "other")) is None


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_a_worker_of_another_version_computes_alone(speed: Speed) -> None:
    """In an upgrade: pages of the old prefill worker have other names, and are of no use to it."""

    def of(version: str, name: str, role: Role = "decode") -> Heartbeat:
        one = beat(name, role, speed=speed)
        return replace(one, info=replace(one.info, layout=version))

    fleet = fleet_of(of("v1", "prefill-0", "prefill"), of("v2", "decode-0"))
    assert (decode_of(fleet, ask()), prefill_of(fleet, ask())) == ("decode-0", None)
    fleet.apply(HeartbeatArrived(of("v1", "decode-1"), 0.0))
    old = ask(4097, "f", "decode-0.1")
    assert (decode_of(fleet, old), prefill_of(fleet, old)) == ("decode-1", "prefill-0")


def test_a_longer_gap_is_computed_at_once_if_the_prefill_workers_are_busy() -> None:
    longest = int((GAP_S_MAX - SPEED.step_s) / SPEED.token_s)
    busy = beat("p", "prefill", queued_s=2.0)
    assert prefill_of(fleet_of(busy, beat("d")), ask(longest - 40)) is None
    assert prefill_of(fleet_of(beat("p", "prefill"), beat("d")), ask(longest - 40)) == "p"
    assert prefill_of(fleet_of(busy, beat("d")), ask(longest + 200)) == "p", "streams would wait too long"
    assert prefill_of(fleet_of(busy, beat("d", rows=1)), ask(longest - 40)) == "p", (
        "... and beside streams sooner"
    )
    assert prefill_of(fleet_of(busy, beat("d", speed=UNKNOWN)), ask(longest - 40)) is None


def test_streams_go_where_rows_are_few() -> None:
    beats = [beat("a", rows=30), beat("b", rows=10), beat("c", rows=20)]
    assert decode_of(fleet_of(*beats), ask(100, max_new_tokens=500)) == "b"
    unknown = [replace(heartbeat, load=replace(heartbeat.load, speed=UNKNOWN)) for heartbeat in beats]
    assert decode_of(fleet_of(*unknown), ask(100, max_new_tokens=500)) == "b"


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_a_worker_whose_memory_is_full_is_the_last_choice(speed: Speed) -> None:
    """However long the wait elsewhere; among full ones the one with the least beyond its budget."""
    request = ask(640, max_new_tokens=ANSWER_TOKENS)
    budget = 100 * PAGE_BYTES
    full = beat("a", "mixed", speed=speed, live=90 * PAGE_BYTES, budget=budget)
    free = beat(
        "b", "mixed", speed=speed, live=80 * PAGE_BYTES, budget=budget, queued_s=20.0, queued=20_000, rows=5
    )
    assert decode_of(fleet_of(full, free), request) == "b"
    fuller = replace(free, load=replace(free.load, memory=MemoryUse(pages_live=budget)))
    assert decode_of(fleet_of(full, fuller), request) == "a"


def test_the_prediction_is_wait_and_fetch_and_compute_and_hop() -> None:
    request = ask(4097)
    alone = placed(fleet_of(beat("m", "mixed", queued_s=0.5)), request)
    assert alone.predicted_s == pytest.approx(0.5 + SPEED.prefill_s(0, 4097, 8192) + SPEED.step_s)
    fleet = fleet_of(beat("p", "prefill", queued_s=0.5), beat("d"))
    fetch_s = 64 * PAGE_BYTES / SPEED.fetch_bytes_per_s
    tail_s = SPEED.prefill_s(4096, 4097, 8192) + SPEED.step_s
    assert placed(fleet, request).predicted_s == pytest.approx(
        0.5 + SPEED.prefill_s(0, 4096, 8192) + HOP_S + fetch_s + tail_s
    )
    later = place(fleet, request, 0.3)
    assert later is not None
    assert later.predicted_s == pytest.approx(placed(fleet, request).predicted_s - 0.3), "time has passed"
    assert placed(fleet_of(beat("m", "mixed", speed=UNKNOWN, queued_s=9.0)), request).predicted_s == 0.0


def test_what_nobody_has_measured_yet_is_like_the_others() -> None:
    fleet = fleet_of(
        beat("m0", "mixed", queued_s=1.0),
        beat("m1", "mixed", queued_s=1.0),
        beat("new", "mixed", speed=UNKNOWN),
    )
    route = placed(fleet, ask())
    assert route.decode == "new.1"
    assert route.predicted_s == pytest.approx(SPEED.prefill_s(0, 4097, 8192) + SPEED.step_s)


def test_bookings_are_what_the_workers_get_to_do() -> None:
    request = ask(4097, max_new_tokens=100)
    fleet = fleet_of(beat("p", "prefill", keys_of("f", 4097)[:32], queued_s=0.5), beat("d"))
    route = placed(fleet, request)
    produced, streamed = (booking.booking for booking in bookings(fleet, request, route, 0.25))
    seconds = SPEED.prefill_s(2048, 4096, 8192)
    assert produced.seconds == pytest.approx(seconds)
    assert (produced.tokens, produced.rows, produced.num_bytes) == (2049, 1, 65 * PAGE_BYTES)
    assert (produced.at_s, produced.due_s, produced.keys) == (0.25, 0.25, request.keys)
    assert streamed.due_s == pytest.approx(0.5 + seconds), "it comes when the prompt is computed"
    assert (streamed.tokens, streamed.rows, streamed.num_bytes) == (P, 1, 66 * PAGE_BYTES)
    (alone,) = bookings(fleet, request, Route(decode=WorkerId("d.1"), decode_address=""), 0.25)
    assert alone.worker == "d.1"
    assert alone.booking.seconds == pytest.approx(
        32 * PAGE_BYTES / SPEED.fetch_bytes_per_s + SPEED.prefill_s(2048, 4097, 8192)
    ), "the store has what the other one announced"
