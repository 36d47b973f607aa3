"""Placement by prefix, load and role: eligible workers, predictions, gaps, memory, homes and patience."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.fleet_view import Booking, Fleet, HeartbeatArrived, RequestBooked
from tidemill.cluster.router.placement import ANSWER_TOKENS, GAP_PAGES_MAX, GAP_S_MAX, HOP_S, bookings, place
from tidemill.workers.messages import NO_MEMORY, Announcement, Heartbeat, Role, Speed, WorkerId, WorkerLoad

P = 64
PAGE_BYTES = 1 << 20
SPEED = Speed(step_s=0.01, token_s=1e-4, pair_s=1e-9, row_s=1e-4, fetch_bytes_per_s=10e9)
UNKNOWN = Speed()

measured = partial(heartbeat, speed=SPEED, page_bytes=PAGE_BYTES)
"""A heartbeat of a worker that has measured its speed."""


def fleet_of(*heartbeats: Heartbeat) -> Fleet:
    fleet = Fleet()
    for report in heartbeats:
        fleet.apply(HeartbeatArrived(report, 0.0))
    return fleet


def keys_of(family: str, num_tokens: int) -> tuple[bytes, ...]:
    return tuple(f"{family}{page}".encode() for page in range((num_tokens - 1) // P))


def prompt(
    num_tokens: int = 4097, family: str = "f", *avoid: str, max_new_tokens: int = 8
) -> PlacementRequest:
    return placement_request(
        num_tokens,
        request_id=f"r-{family}",
        keys=keys_of(family, num_tokens),
        max_new_tokens=max_new_tokens,
        avoid=frozenset(map(WorkerId, avoid)),
    )


def placed(fleet: Fleet, request: PlacementRequest, now_s: float = 0.0) -> Route:
    route = place(fleet, request, now_s)
    assert route is not None
    return route


def decode_of(fleet: Fleet, request: PlacementRequest) -> str:
    return placed(fleet, request).decode.split(".")[0]


def prefill_of(fleet: Fleet, request: PlacementRequest) -> str | None:
    prefill = placed(fleet, request).prefill
    return None if prefill is None else prefill.split(".")[0]


def book(fleet: Fleet, request: PlacementRequest, now_s: float = 0.0) -> Route:
    route = placed(fleet, request, now_s)
    for event in bookings(fleet, request, route, now_s):
        fleet.apply(event)
    return route


@st.composite
def fleets(draw: st.DrawFn) -> list[Heartbeat]:
    roles: list[Role] = ["prefill", "decode", "mixed"]
    names = draw(st.lists(st.integers(0, 9), max_size=6, unique=True))
    speeds = [SPEED, UNKNOWN, replace(SPEED, token_s=2e-4)] if draw(st.booleans()) else [UNKNOWN]
    keys = keys_of("f", 12 * P)
    return [
        measured(
            f"w{index}",
            draw(st.sampled_from(roles)),
            keys[: draw(st.integers(0, 11))],
            speed=draw(st.sampled_from(speeds)),
            queued_s=draw(st.sampled_from([0.0, 0.01, 0.5, 20.0])),
            queued_tokens=draw(st.sampled_from([0, 30, 3000])),
            running_rows=draw(st.integers(0, 2)),
            draining=draw(st.booleans()),
            state_bytes=draw(st.sampled_from([0, 1 << 26])),
        )
        for index in names
    ]


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    avoid = (f"w{index}.1" for index in draw(st.sets(st.integers(0, 9))))
    return prompt(draw(st.integers(1, 13 * P)), "f", *avoid)


@given(fleets(), requests())
def test_placement_takes_eligible_workers_and_avoids_failed_ones(
    heartbeats: list[Heartbeat], request: PlacementRequest
) -> None:
    route = place(fleet_of(*heartbeats), request, 0.0)
    ready = [report.info for report in heartbeats if not report.draining]
    able = [info for info in ready if info.role != "prefill"]
    if route is None:
        assert not able
        return
    preferred = [info for info in able if info.worker not in request.avoid] or able
    decode = next(info for info in preferred if info.worker == route.decode)
    assert route.decode_address == decode.address
    prefilling = [info for info in ready if info.role == "prefill"]
    if decode.role == "mixed" or not prefilling:
        assert route.prefill is None
    if route.prefill is None:
        assert (route.prefill_address, route.gap_tokens_max) == ("", None)
        return
    preferred = [info for info in prefilling if info.worker not in request.avoid] or prefilling
    assert (route.prefill, route.prefill_address) in {(info.worker, info.address) for info in preferred}
    assert route.gap_tokens_max == GAP_PAGES_MAX * P


@given(fleets(), requests(), st.integers(0, 99))
def test_placement_does_not_depend_on_the_order_of_heartbeats(
    heartbeats: list[Heartbeat], request: PlacementRequest, seed: int
) -> None:
    """Nor does it among many equal workers."""
    equal = [
        replace(report, load=WorkerLoad(), announcement=Announcement(full=True)) for report in heartbeats
    ]
    for reports in (heartbeats, equal):
        shuffled = Random(seed).sample(reports, len(reports))
        assert place(fleet_of(*shuffled), request, 0.0) == place(fleet_of(*reports), request, 0.0)


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_placement_without_hop_when_all_is_recomputed(speed: Speed) -> None:
    fleet = fleet_of(
        measured("p", "prefill", speed=speed),
        measured("d", speed=speed),
        measured("e", speed=speed, running_rows=9),
    )
    assert placed(fleet, prompt()).prefill == "p.1"
    route = placed(fleet, replace(prompt(), keys=(), recompute_all=True))
    assert (route.decode, route.prefill, route.gap_tokens_max) == ("d.1", None, None)


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
@pytest.mark.parametrize("index", range(4))
def test_placement_follows_the_prefix_until_its_worker_is_flooded(index: int, speed: Speed) -> None:
    slow = replace(speed, fetch_bytes_per_s=0.0)
    others = [measured(f"w{other}", "mixed", speed=slow) for other in range(4) if other != index]
    holder = measured(f"w{index}", "mixed", keys_of("f", 4097), speed=slow, queued_s=0.01, queued_tokens=100)
    assert decode_of(fleet_of(*others, holder), prompt()) == f"w{index}"
    flooded = replace(holder, load=replace(holder.load, queued_tokens=4097, queued_s=0.5))
    assert decode_of(fleet_of(*others, flooded), prompt()) != f"w{index}"


def test_placement_spreads_a_flood_within_one_heartbeat_interval() -> None:
    for speed in (SPEED, UNKNOWN):
        fleet = fleet_of(*(measured(f"w{index}", "mixed", speed=speed) for index in range(4)))
        chosen = Counter(book(fleet, prompt(3000, f"family{index}-")).decode for index in range(40))
        assert len(chosen) == 4
        assert min(chosen.values()) >= 8


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_placement_makes_no_hop_between_versions(speed: Speed) -> None:
    """During an upgrade the pages of an old prefill worker are useless to a new decode worker."""
    version = partial(measured, speed=speed)
    fleet = fleet_of(version("prefill-0", "prefill", layout="v1"), version("decode-0", layout="v2"))
    assert (decode_of(fleet, prompt()), prefill_of(fleet, prompt())) == ("decode-0", None)
    fleet.apply(HeartbeatArrived(version("decode-1", layout="v1"), 0.0))
    old = prompt(4097, "f", "decode-0.1")
    assert (decode_of(fleet, old), prefill_of(fleet, old)) == ("decode-1", "prefill-0")


def test_placement_makes_no_hop_for_a_longer_gap_to_busy_prefill_workers() -> None:
    longest = int((GAP_S_MAX - SPEED.step_s) / SPEED.token_s)
    busy = measured("p", "prefill", queued_s=2.0)
    assert prefill_of(fleet_of(busy, measured("d")), prompt(longest - 40)) is None
    assert prefill_of(fleet_of(measured("p", "prefill"), measured("d")), prompt(longest - 40)) == "p"
    assert prefill_of(fleet_of(busy, measured("d")), prompt(longest + 200)) == "p", "streams would wait"
    beside = measured("d", running_rows=1, streams=1, itl_target_s=0.1)
    assert prefill_of(fleet_of(busy, beside), prompt(longest - 40)) == "p", (
        "beside streams the limit is lower"
    )
    assert prefill_of(fleet_of(busy, measured("d", speed=UNKNOWN)), prompt(longest - 40)) is None


def test_placement_follows_a_prompt_that_a_decode_worker_computes() -> None:
    """Prompts that begin alike find its pages there, although no heartbeat has announced them. Where the wait
    is longer than the pages are worth, it decides."""
    fleet = fleet_of(measured("p", "prefill", queued_s=2.0), measured("d"), measured("e"))
    first = book(fleet, prompt(640))
    assert first.prefill is None
    routes = [book(fleet, prompt(640), 0.01) for _ in range(9)]
    assert routes[0].decode == first.decode
    assert {route.decode for route in routes} == {"d.1", "e.1"}


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_placement_takes_full_workers_last(speed: Speed) -> None:
    """It takes one with free memory however long its queue, else the one that is least over its budget."""
    request = prompt(640, max_new_tokens=ANSWER_TOKENS)
    worker = partial(measured, role="mixed", speed=speed, budget_bytes=100 * PAGE_BYTES)
    full = worker("a", memory=NO_MEMORY | {"pages_live": 90 * PAGE_BYTES})
    busy = partial(worker, "b", queued_s=20.0, queued_tokens=20_000, running_rows=5)
    free = busy(memory=NO_MEMORY | {"pages_live": 80 * PAGE_BYTES})
    assert decode_of(fleet_of(full, free), request) == "b"
    fuller = busy(memory=NO_MEMORY | {"pages_live": 100 * PAGE_BYTES})
    assert decode_of(fleet_of(full, fuller), request) == "a"


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_placement_counts_pages_that_requests_share_once(speed: Speed) -> None:
    """Requests with one system prompt need its memory once."""
    budget = 100 * PAGE_BYTES
    free, home = (measured(name, "mixed", speed=speed, budget_bytes=budget) for name in "ab")
    fleet = fleet_of(free, replace(home, announcement=Announcement(added=keys_of("f", 5120), full=True)))
    assert [book(fleet, prompt(5121, max_new_tokens=1)).decode for _ in range(4)] == ["b.1"] * 4


def test_placement_spreads_new_prompts_over_workers_that_seem_slower() -> None:
    """A prompt that no worker has is no duplicate work anywhere. Otherwise a worker that seems slower gets no
    new prompts, and the memory of the others is soon too small."""
    slower = replace(SPEED, token_s=SPEED.token_s * 1.2)
    seems = measured("a", "mixed", speed=slower)
    waits = measured("b", "mixed", queued_s=SPEED.token_s * 1280 * 0.3, queued_tokens=384)
    assert decode_of(fleet_of(seems, waits), prompt(1280)) == "a"


@pytest.mark.parametrize("speed", [SPEED, UNKNOWN])
def test_placement_puts_new_prompts_where_fewer_pages_give_way(speed: Speed) -> None:
    """Caches of one size fill alike. Where a queue is longer than the pages are worth, it decides."""
    worker = partial(measured, role="mixed", speed=speed, budget_bytes=100 * PAGE_BYTES)
    caches = worker("a", memory=NO_MEMORY | {"pages_cached": 90 * PAGE_BYTES})
    tokens = 640
    for queued, chosen in ((tokens // 3, "b"), (2 * tokens, "a")):
        waits = worker("b", queued_s=SPEED.token_s * queued, queued_tokens=queued)
        assert decode_of(fleet_of(caches, waits), prompt(tokens)) == chosen


def test_placement_predicts_wait_compute_hop_and_fetch() -> None:
    request = prompt(4097)
    alone = placed(fleet_of(measured("m", "mixed", queued_s=0.5)), request)
    assert alone.predicted_s == pytest.approx(0.5 + SPEED.prefill_s(0, 4097, 8192) + SPEED.step_s)
    fleet = fleet_of(measured("p", "prefill", queued_s=0.5), measured("d"))
    fetch_s = 64 * PAGE_BYTES / SPEED.fetch_bytes_per_s
    tail_s = SPEED.prefill_s(4096, 4097, 8192) + SPEED.step_s
    predicted_s = placed(fleet, request).predicted_s
    assert predicted_s == pytest.approx(0.5 + SPEED.prefill_s(0, 4096, 8192) + HOP_S + fetch_s + tail_s)
    assert placed(fleet, request, 0.3).predicted_s == pytest.approx(predicted_s - 0.3), "time has passed"
    unknown = fleet_of(measured("m", "mixed", speed=UNKNOWN, queued_s=9.0))
    assert placed(unknown, request).predicted_s == 0.0
    for publishes, fetched in ((True, 64), (False, 0)):
        other = measured("o", "mixed", keys_of("f", 4097), draining=True, publishes=publishes)
        served_s = fetched * PAGE_BYTES / SPEED.fetch_bytes_per_s
        served_s += SPEED.prefill_s(fetched * P, 4097, 8192) + SPEED.step_s
        assert placed(fleet_of(measured("m", "mixed"), other), request).predicted_s == pytest.approx(served_s)


def with_work(heartbeats: Sequence[Heartbeat], work_s: Mapping[str, float]) -> Fleet:
    """Return a fleet whose workers have these loads now, and had this much booked work a second ago."""
    fleet = fleet_of(*heartbeats)
    for worker, seconds in work_s.items():
        work = Booking(tokens=0, rows=0, at_s=0.0, due_s=0.0, seconds=seconds)
        fleet.apply(RequestBooked(WorkerId(worker), work))
    for report in heartbeats:  # without the booked work, which is done
        fleet.apply(HeartbeatArrived(report, 1.0))
    return fleet


SLOW = replace(SPEED, fetch_bytes_per_s=1.0)


def test_placement_resumes_at_checkpoints_and_makes_its_home_at_pages() -> None:
    """Pages without a checkpoint save this request nothing. In a busy fleet they count for later ones."""
    request, hybrid = prompt(), partial(measured, speed=SLOW, state_bytes=1 << 26)
    fleet = fleet_of(hybrid("p0", "prefill"), hybrid("p1", "prefill"), hybrid("d", queued_s=9.0))
    pages = Booking(tokens=0, rows=0, at_s=0.0, due_s=0.0, keys=request.keys)
    fleet.apply(RequestBooked(WorkerId("p0.1"), pages))
    fleet.apply(HeartbeatArrived(hybrid("p0", "prefill", queued_s=0.95), 1.0))
    assert placed(fleet, request, 1.0).prefill == "p1.1"
    for worker in ("p0.1", "p1.1"):
        work = Booking(tokens=0, rows=0, at_s=1.0, due_s=1.0, seconds=8.0)
        fleet.apply(RequestBooked(WorkerId(worker), work))
    assert placed(fleet, request, 1.0).prefill == "p0.1"


def test_placement_keeps_families_together_in_a_flood() -> None:
    """The load term makes each worker compute the prefixes of a few families, not of all."""
    workers = [measured(f"p{index}", "prefill", speed=SLOW) for index in range(4)]
    fleet = fleet_of(*workers, measured("d", queued_s=99.0))
    homes: dict[int, set[str]] = {}
    rng = Random(1)
    for index in range(400):
        family = rng.randrange(12)
        request = prompt(4097, f"family{family}-")
        tail = tuple(f"tail{index}-{page}".encode() for page in range(20))
        request = replace(request, keys=request.keys + tail, num_tokens=request.num_tokens + 20 * P)
        route = book(fleet, request, now_s=0.1 * index)
        assert route.prefill is not None
        homes.setdefault(family, set()).add(route.prefill)
    assert sum(map(len, homes.values())) <= 24, "of 48"


@pytest.mark.parametrize(
    ("work_s", "home_s", "other_s", "prefill"),
    [
        (0.0, 1.25, 0.0, "home"),  # 0.43 s of work, counted two more times
        (0.0, 1.32, 0.0, "other"),
        (11.0, 1.69, 0.0, "home"),  # counted 6 times, but at most 1.3 s
        (11.0, 1.76, 0.0, "other"),
        (11.0, 4.90, 2.0, "home"),  # in addition to the least wait
        (11.0, 5.10, 2.0, "other"),
    ],
)
def test_placement_waits_for_the_home_up_to_the_patience_of_a_request(
    work_s: float, home_s: float, other_s: float, prefill: str
) -> None:
    """The wait is longer in a busy fleet, because others would wait for duplicate work."""
    heartbeats = [
        measured("home", "prefill", keys_of("f", 4097), speed=SLOW, queued_s=home_s),
        measured("other", "prefill", speed=SLOW, queued_s=other_s),
        measured("d", speed=SLOW, queued_s=99.0),
    ]
    fleet = with_work(heartbeats, {"other.1": work_s})
    assert placed(fleet, prompt(), 1.0).prefill == f"{prefill}.1"


def test_placement_spreads_prompts_that_share_only_their_first_page() -> None:
    """A page that all prompts start with does not make a family."""
    fleet = fleet_of(*(measured(f"w{index}", "mixed", keys_of("system", 65)) for index in range(4)))
    chosen: list[str] = []
    for index in range(60):
        request = prompt(321, f"family{index}-")
        chosen.append(decode_of(fleet, replace(request, keys=keys_of("system", 65) + request.keys[1:])))
    assert len(Counter(chosen)) == 4
    assert min(Counter(chosen).values()) > 5


def test_placement_moves_only_a_share_of_families_to_a_new_worker() -> None:
    """No old worker gets a family of another one, because of rendezvous hashing."""
    four = [measured(f"w{index}", "mixed") for index in range(4)]
    families = [prompt(200, f"family{index}-") for index in range(80)]
    before = [decode_of(fleet_of(*four), request) for request in families]
    after = [decode_of(fleet_of(*four, measured("w4", "mixed")), request) for request in families]
    assert all(now in {then, "w4"} for then, now in zip(before, after, strict=True))
    assert 5 < after.count("w4") < 35


def test_route_names_who_else_can_restore_most_of_the_prompt() -> None:
    keys = prompt().keys

    def holding(name: str, num_keys: int, *, layout: str = "a", queued_s: float = 0.0) -> Heartbeat:
        added = Announcement(added=keys[:num_keys])
        return measured(name, "mixed", announcement=added, layout=layout, queued_s=queued_s)

    route = placed(fleet_of(holding("near", 3), holding("far", 40, queued_s=60)), prompt())
    assert (route.decode, route.elsewhere, route.elsewhere_pages) == ("near.1", "far.1", 40)
    best = placed(fleet_of(holding("near", 40), holding("far", 3, queued_s=60)), prompt())
    assert (best.decode, best.elsewhere, best.elsewhere_pages) == ("near.1", "far.1", 3)
    other = placed(fleet_of(holding("near", 3), holding("far", 40, layout="b", queued_s=60)), prompt())
    assert (other.elsewhere, other.elsewhere_pages) == (None, 0), "its pages have other names"
    prefill = measured("prefill", "prefill", announcement=Announcement(added=keys[:5]))
    decode = measured("decode", "decode", announcement=Announcement(added=keys[:9]))
    hop = placed(fleet_of(prefill, decode), prompt())
    assert (hop.prefill, hop.elsewhere, hop.elsewhere_pages) == ("prefill.1", "decode.1", 9)


@pytest.mark.parametrize("measures", [True, False])
def test_a_worker_that_computes_prompts_pools_and_without_one_any_other(*, measures: bool) -> None:
    report = measured if measures else heartbeat
    asked = replace(prompt(max_new_tokens=0), pools=True)
    decodes = [report("decode-0"), report("decode-1")]
    fleet = fleet_of(*decodes, report("prefill-0", "prefill"))
    route = placed(fleet, asked)
    assert (route.decode, route.prefill, route.gap_tokens_max) == ("prefill-0.1", None, None)
    assert (route.predicted_s > 0) is measures
    assert {event.worker for event in bookings(fleet, asked, route, 0.0)} == {"prefill-0.1"}
    fleet = fleet_of(*decodes)
    route = placed(fleet, asked)
    assert route.decode in {"decode-0.1", "decode-1.1"}
    assert placed(fleet, replace(asked, avoid=frozenset({route.decode}))).decode != route.decode
    assert decode_of(fleet_of(report("mixed-0", "mixed")), asked) == "mixed-0"
    assert place(fleet_of(), asked, 0.0) is None


def test_what_pools_goes_where_its_prefix_is() -> None:
    fleet = fleet_of(*(measured(f"prefill-{index}", "prefill") for index in range(4)))
    asked = replace(prompt(max_new_tokens=0), pools=True)
    home = book(fleet, asked).decode
    longer = replace(asked, request_id="r-other", num_tokens=asked.num_tokens + 20)
    assert placed(fleet, longer, now_s=10.0).decode == home
