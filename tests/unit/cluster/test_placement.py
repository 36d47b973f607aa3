"""Requests go where their prefix is, floods go everywhere, and nothing goes where it was lost."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.fleet import Fleet, Member
from tidemill.cluster.placement import (
    GAP_PAGES_MAX,
    ROW_TOKENS,
    Ask,
    Route,
    bookings,
    held_tokens,
    place,
)
from tidemill.workers.messages import Role, WorkerId, WorkerInfo, WorkerLoad

PROPERTY = settings(deadline=None, derandomize=True, max_examples=120)
P = 4


def member(
    name: str, role: Role = "decode", *held: bytes, queued: int = 0, rows: int = 0, draining: bool = False
) -> Member:
    return Member(
        info=WorkerInfo(
            worker=WorkerId(f"{name}.1"),
            name=name,
            role=role,
            address=f"at:{name}",
            pid=1,
            node="n",
            page_tokens=P,
        ),
        load=WorkerLoad(queued_tokens=queued, running_rows=rows),
        heard_at_s=0.0,
        sequence=0,
        draining=draining,
        held=frozenset(held),
    )


def fleet_of(*members: Member) -> Fleet:
    return Fleet({one.info.worker: one for one in members})


def keys_of(family: str, num_tokens: int) -> tuple[bytes, ...]:
    return tuple(f"{family}{page}".encode() for page in range((num_tokens - 1) // P))


def ask(num_tokens: int = 41, family: str = "f", *avoid: str) -> Ask:
    return Ask(
        request_id=f"r-{family}",
        keys=keys_of(family, num_tokens),
        num_tokens=num_tokens,
        max_new_tokens=8,
        avoid=frozenset(map(WorkerId, avoid)),
    )


def decode_of(route: Route | None) -> str:
    assert route is not None
    return route.decode.split(".")[0]


@st.composite
def member_lists(draw: st.DrawFn) -> list[Member]:
    roles: list[Role] = ["prefill", "decode", "mixed"]
    names = draw(st.lists(st.integers(0, 9), max_size=6, unique=True))
    return [
        member(
            f"w{index}",
            draw(st.sampled_from(roles)),
            *(f"f{page}".encode() for page in draw(st.sets(st.integers(0, 11)))),
            queued=draw(st.integers(0, 30)),
            rows=draw(st.integers(0, 2)),
            draining=draw(st.booleans()),
        )
        for index in names
    ]


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    avoid = (f"w{index}.1" for index in draw(st.sets(st.integers(0, 9))))
    return ask(draw(st.integers(1, 50)), "f", *avoid)


@PROPERTY
@given(member_lists(), asks())
def test_the_best_decode_worker_is_taken(drawn: list[Member], request: Ask) -> None:
    able = [one for one in drawn if one.info.role != "prefill" and not one.draining]
    preferred = [one for one in able if one.info.worker not in request.avoid] or able
    route = place(fleet_of(*drawn), request)
    if route is None:
        assert not able
        return
    scores = {
        one.info.worker: one.queued_tokens
        + ROW_TOKENS * one.rows
        + request.num_tokens
        - held_tokens(one, request)
        for one in preferred
    }
    assert scores[route.decode] == min(scores.values())
    assert route.decode_address == f"at:{decode_of(route)}"


@PROPERTY
@given(member_lists(), asks())
def test_a_prefill_worker_is_taken_for_what_is_worth_a_hop(drawn: list[Member], request: Ask) -> None:
    fleet = fleet_of(*drawn)
    route = place(fleet, request)
    if route is None:
        return
    decode = fleet.members[route.decode]
    able = [one for one in drawn if one.info.role == "prefill" and not one.draining]
    preferred = [one for one in able if one.info.worker not in request.avoid] or able
    gap = request.num_tokens - held_tokens(decode, request)
    if decode.info.role == "mixed" or gap <= GAP_PAGES_MAX * P or not able:
        assert (route.prefill, route.prefill_address, route.gap_tokens_max) == (None, "", None)
        return
    assert route.prefill is not None
    scores = {
        one.info.worker: one.queued_tokens + request.num_tokens - held_tokens(one, request)
        for one in preferred
    }
    assert scores[route.prefill] == min(scores.values())
    assert route.prefill_address == f"at:{route.prefill.split('.')[0]}"
    assert route.gap_tokens_max == GAP_PAGES_MAX * P


@PROPERTY
@given(member_lists(), asks(), st.randoms(use_true_random=False))
def test_routers_that_learned_in_another_order_agree(drawn: list[Member], request: Ask, rng: Random) -> None:
    """Among many that are equal, too."""
    for members in (drawn, [replace(one, load=WorkerLoad(), held=frozenset[bytes]()) for one in drawn]):
        shuffled = rng.sample(members, len(members))
        assert place(fleet_of(*shuffled), request) == place(fleet_of(*members), request)


@PROPERTY
@given(member_lists(), asks())
def test_bookings_are_what_the_workers_lack(drawn: list[Member], request: Ask) -> None:
    fleet = fleet_of(*drawn)
    route = place(fleet, request)
    if route is None:
        return
    booked = {one.worker: one.booking for one in bookings(fleet, request, route, now_s=7.0)}
    assert booked.keys() == {route.decode, route.prefill} - {None}
    assert all((one.rows, one.at_s) == (1, 7.0) for one in booked.values())
    first = route.prefill or route.decode
    assert booked[first].tokens == request.num_tokens - held_tokens(fleet.members[first], request)
    if route.prefill is not None:
        assert booked[route.decode].tokens == P


def test_held_depth_is_the_deepest_boundary_below_the_last_token() -> None:
    keys = keys_of("f", 41)
    assert held_tokens(member("w", "decode"), ask(41)) == 0
    assert held_tokens(member("w", "decode", keys[2]), ask(41)) == 3 * P
    assert held_tokens(member("w", "decode", *keys), ask(41)) == 40
    assert held_tokens(member("w", "decode", *keys), ask(40)) == 36, "the last token is computed"
    assert held_tokens(member("w", "decode", *keys), replace(ask(41), keys=keys[:3])) == 3 * P


@pytest.mark.parametrize("index", range(4))
def test_a_prefix_goes_where_it_is_held_until_that_worker_is_flooded(index: int) -> None:
    others = [member(f"w{other}", "mixed") for other in range(4) if other != index]
    holder = member(f"w{index}", "mixed", *keys_of("f", 41), queued=39)
    assert decode_of(place(fleet_of(*others, holder), ask())) == f"w{index}"
    flooded = replace(holder, load=WorkerLoad(queued_tokens=41))
    assert decode_of(place(fleet_of(*others, flooded), ask())) != f"w{index}"


def test_a_flood_goes_everywhere() -> None:
    """Also within one heartbeat interval: what was placed is booked."""
    fleet = fleet_of(*(member(f"w{index}", "mixed") for index in range(4)))
    taken = Counter[str]()
    for index in range(40):
        request = ask(30, f"family{index}-")
        route = place(fleet, request)
        assert route is not None
        taken[route.decode] += 1
        for booked in bookings(fleet, request, route, now_s=0.0):
            fleet = fleet.apply(booked)
    assert set(taken.values()) == {10}


def test_families_spread_over_equal_workers_and_stay_together() -> None:
    fleet = fleet_of(*(member(f"w{index}", "mixed") for index in range(4)))
    homes = [decode_of(place(fleet, ask(20, f"family{index}-"))) for index in range(60)]
    assert min(Counter(homes).values()) > 5
    assert homes == [decode_of(place(fleet, ask(40, f"family{index}-"))) for index in range(60)]


def test_short_prompts_spread_by_their_request() -> None:
    fleet = fleet_of(*(member(f"w{index}", "mixed") for index in range(4)))
    homes = {decode_of(place(fleet, ask(3, f"{index}"))) for index in range(40)}
    assert len(homes) == 4


def test_a_long_request_id_is_as_good_as_a_short_one() -> None:
    assert place(fleet_of(member("w")), ask(1, "x" * 500)) is not None


def test_where_it_was_lost_is_better_than_nowhere() -> None:
    a, b = member("a"), member("b", queued=1000)
    assert decode_of(place(fleet_of(a, b), ask(5, "f", "a.1"))) == "b"
    assert decode_of(place(fleet_of(a), ask(5, "f", "a.1"))) == "a"


def test_draining_workers_get_nothing() -> None:
    draining = member("a", draining=True)
    assert decode_of(place(fleet_of(draining, member("b", queued=1000)), ask(5))) == "b"
    assert place(fleet_of(draining), ask(5)) is None
    assert place(fleet_of(member("p", "prefill")), ask(5)) is None
