"""Families of prompts have homes: where they are, what a request bears to stay there, and how ties break."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from tests.unit.cluster.router.test_placement import (
    SPEED,
    P,
    ask,
    beat,
    book,
    decode_of,
    fleet_of,
    keys_of,
    prefill_of,
)
from tidemill.cluster.router.fleet_view import Booking, Fleet, HeartbeatArrived, RequestBooked
from tidemill.cluster.router.placement import HOME_SHARE, place
from tidemill.workers.messages import WorkerId


def test_a_checkpoint_says_where_a_prompt_resumes_and_pages_where_it_belongs() -> None:
    """Pages without a checkpoint spare nothing now: they count when the fleet is busy, for those who come."""
    slow, request = replace(SPEED, fetch_bytes_per_s=1.0), ask()

    def workers() -> Fleet:
        fleet = fleet_of(
            beat("p0", "prefill", speed=slow, state_bytes=1 << 26),
            beat("p1", "prefill", speed=slow, state_bytes=1 << 26),
            beat("d", speed=slow, state_bytes=1 << 26, queued_s=9.0),
        )
        fleet.apply(
            RequestBooked(WorkerId("p0.1"), Booking(tokens=0, rows=0, at_s=0.0, due_s=0.0, keys=request.keys))
        )
        fleet.apply(
            HeartbeatArrived(beat("p0", "prefill", speed=slow, state_bytes=1 << 26, queued_s=0.95), 1.0)
        )
        return fleet

    route = place(workers(), request, 1.0)
    assert route is not None
    assert route.prefill == "p1.1"
    busy = workers()
    for worker in ("p0.1", "p1.1"):
        busy.apply(
            RequestBooked(WorkerId(worker), Booking(tokens=0, rows=0, at_s=1.0, due_s=1.0, seconds=8.0))
        )
    route = place(busy, request, 1.0)
    assert route is not None
    assert route.prefill == "p0.1"


def test_a_family_stays_together_in_a_flood_of_families() -> None:
    """What the load term is for: each worker computes the prefixes of a few families, not all of all."""
    fleet = fleet_of(
        *(beat(f"p{index}", "prefill", speed=replace(SPEED, fetch_bytes_per_s=1.0)) for index in range(4)),
        beat("d", queued_s=99.0),
    )
    homes: dict[int, set[str]] = {}
    rng = Random(1)
    for index in range(400):
        family = rng.randrange(12)
        request = ask(4097, f"family{family}-")
        tail = tuple(f"tail{index}-{page}".encode() for page in range(20))
        request = replace(request, keys=request.keys + tail, num_tokens=request.num_tokens + 20 * P)
        route = book(fleet, request, now_s=0.1 * index)
        assert route.prefill is not None
        homes.setdefault(family, set()).add(route.prefill)
    assert sum(map(len, homes.values())) <= 24, "of 48"


@pytest.mark.parametrize(
    ("work_s", "home_s", "other_s", "prefill"),
    [
        (0.0, 1.25, 0.0, "home"),  # 0.43 s of work, counted twice more
        (0.0, 1.32, 0.0, "other"),
        (11.0, 1.69, 0.0, "home"),  # 6 times more, but not longer than 1.3 s
        (11.0, 1.76, 0.0, "other"),
        (11.0, 4.90, 2.0, "home"),  # ... on top of what all must wait
        (11.0, 5.10, 2.0, "other"),
    ],
)
def test_a_request_waits_for_its_home_so_long_and_no_longer(
    work_s: float, home_s: float, other_s: float, prefill: str
) -> None:
    """The longer, the more the fleet has to do: others would wait for what is computed twice."""
    slow, request = replace(SPEED, fetch_bytes_per_s=1.0), ask()
    beats = [
        beat("home", "prefill", keys_of("f", 4097), speed=slow, queued_s=home_s),
        beat("other", "prefill", speed=slow, queued_s=other_s),
        beat("d", speed=slow, queued_s=99.0),
    ]
    fleet = fleet_of(*beats)
    fleet.apply(
        RequestBooked(WorkerId("other.1"), Booking(tokens=0, rows=0, at_s=0.0, due_s=0.0, seconds=work_s))
    )
    for heartbeat in beats:  # it is done
        fleet.apply(HeartbeatArrived(heartbeat, 1.0))
    route = place(fleet, request, 1.0)
    assert route is not None
    assert route.prefill == f"{prefill}.1"


def test_what_it_costs_others_wherever_it_goes_says_nothing() -> None:
    """In a fleet with more to do than it can, where nobody has the prompt, the shorter wait counts."""
    beats = [
        beat("p0", "prefill", queued_s=4.1),
        beat("p1", "prefill", queued_s=4.0),
        beat("d", queued_s=99.0),
    ]
    fleet = fleet_of(*beats)
    for worker in ("p0.1", "p1.1"):
        work = Booking(tokens=0, rows=0, at_s=0.0, due_s=0.0, seconds=40.0)
        fleet.apply(RequestBooked(WorkerId(worker), work))
    for heartbeat in beats:
        fleet.apply(HeartbeatArrived(heartbeat, 1.0))
    for index in range(20):
        route = place(fleet, ask(4097, f"family{index}-"), 1.0)
        assert route is not None
        assert route.prefill == "p1.1"


def test_prompts_that_share_their_first_page_alone_spread_over_an_idle_fleet() -> None:
    """A page that all prompts begin with is no family."""
    fleet = fleet_of(*(beat(f"w{index}", "mixed", keys_of("system", 65)) for index in range(4)))
    taken: list[str] = []
    for index in range(60):
        request = ask(321, f"family{index}-")
        taken.append(decode_of(fleet, replace(request, keys=keys_of("system", 65) + request.keys[1:])))
    assert len(Counter(taken)) == 4
    assert min(Counter(taken).values()) > 5


def test_families_spread_over_equal_workers_and_stay_together() -> None:
    fleet = fleet_of(*(beat(f"w{index}", "mixed") for index in range(4)))
    homes = [decode_of(fleet, ask(200, f"family{index}-")) for index in range(60)]
    assert min(Counter(homes).values()) > 5
    assert homes == [decode_of(fleet, ask(400, f"family{index}-")) for index in range(60)]


def test_a_worker_more_moves_its_share_alone() -> None:
    """Rendezvous hashing: nobody else gets other families."""
    four = [beat(f"w{index}", "mixed") for index in range(4)]
    families = [ask(200, f"family{index}-") for index in range(80)]
    before = [decode_of(fleet_of(*four), family) for family in families]
    after = [decode_of(fleet_of(*four, beat("w4", "mixed")), family) for family in families]
    assert all(now in {then, "w4"} for then, now in zip(before, after, strict=True))
    assert 5 < after.count("w4") < 35


def test_short_prompts_spread_by_their_request() -> None:
    fleet = fleet_of(*(beat(f"w{index}", "mixed") for index in range(4)))
    homes = {decode_of(fleet, ask(3, f"{index}")) for index in range(40)}
    assert len(homes) == 4
    assert place(fleet, ask(1, "x" * 500), 0.0) is not None


def test_a_prompt_that_has_a_home_is_computed_there() -> None:
    """Who goes on from it would find only half of it there; unless the decode worker has as much."""
    request = ask(1025)
    share = int(HOME_SHARE * len(request.keys))

    def taken(home: int, here: int) -> str | None:
        slow = replace(SPEED, fetch_bytes_per_s=1.0)
        busy = beat("p", "prefill", request.keys[:home], speed=slow, queued_s=2.0)
        return prefill_of(fleet_of(busy, beat("d", "decode", request.keys[:here], speed=slow)), request)

    assert taken(share, 0) is None
    assert taken(share + 1, 0) == "p"
    assert taken(share + 1, share + 1) is None
