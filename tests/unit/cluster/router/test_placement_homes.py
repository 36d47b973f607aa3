"""The homes of prompt families: locality, the patience of requests, and ties."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest

from tests.unit.cluster.router.test_placement import (
    SPEED,
    P,
    book,
    decode_of,
    fleet_of,
    keys_of,
    measured,
    placed,
    prefill_of,
    prompt,
)
from tidemill.cluster.router.fleet_view import Booking, Fleet, HeartbeatArrived, RequestBooked
from tidemill.cluster.router.placement import HOME_SHARE
from tidemill.workers.messages import Heartbeat, WorkerId


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


def test_placement_ignores_the_cost_to_others_that_all_workers_share() -> None:
    """The shorter wait counts in an overloaded fleet without the prompt."""
    heartbeats = [
        measured("p0", "prefill", queued_s=4.1),
        measured("p1", "prefill", queued_s=4.0),
        measured("d", queued_s=99.0),
    ]
    fleet = with_work(heartbeats, {"p0.1": 40.0, "p1.1": 40.0})
    for index in range(20):
        assert placed(fleet, prompt(4097, f"family{index}-"), 1.0).prefill == "p1.1"


def test_placement_spreads_prompts_that_share_only_their_first_page() -> None:
    """A page that all prompts start with does not make a family."""
    fleet = fleet_of(*(measured(f"w{index}", "mixed", keys_of("system", 65)) for index in range(4)))
    chosen: list[str] = []
    for index in range(60):
        request = prompt(321, f"family{index}-")
        chosen.append(decode_of(fleet, replace(request, keys=keys_of("system", 65) + request.keys[1:])))
    assert len(Counter(chosen)) == 4
    assert min(Counter(chosen).values()) > 5


def test_placement_spreads_families_over_equal_workers_and_keeps_each_together() -> None:
    fleet = fleet_of(*(measured(f"w{index}", "mixed") for index in range(4)))
    homes = [decode_of(fleet, prompt(200, f"family{index}-")) for index in range(60)]
    assert min(Counter(homes).values()) > 5
    assert homes == [decode_of(fleet, prompt(400, f"family{index}-")) for index in range(60)]


def test_placement_moves_only_a_share_of_families_to_a_new_worker() -> None:
    """No old worker gets a family of another one, because of rendezvous hashing."""
    four = [measured(f"w{index}", "mixed") for index in range(4)]
    families = [prompt(200, f"family{index}-") for index in range(80)]
    before = [decode_of(fleet_of(*four), request) for request in families]
    after = [decode_of(fleet_of(*four, measured("w4", "mixed")), request) for request in families]
    assert all(now in {then, "w4"} for then, now in zip(before, after, strict=True))
    assert 5 < after.count("w4") < 35


def test_placement_spreads_short_prompts_by_request_id() -> None:
    fleet = fleet_of(*(measured(f"w{index}", "mixed") for index in range(4)))
    homes = {decode_of(fleet, prompt(3, f"{index}")) for index in range(40)}
    assert len(homes) == 4
    assert placed(fleet, prompt(1, "x" * 500))


def test_placement_computes_a_prompt_at_its_home() -> None:
    """Otherwise later requests would miss its pages there, unless the decode worker has as many."""
    request = prompt(1025)
    share = int(HOME_SHARE * len(request.keys))

    def prefill(home: int, here: int) -> str | None:
        slow = SLOW
        busy = measured("p", "prefill", request.keys[:home], speed=slow, queued_s=2.0)
        return prefill_of(fleet_of(busy, measured("d", "decode", request.keys[:here], speed=slow)), request)

    assert prefill(share, 0) is None
    assert prefill(share + 1, 0) == "p"
    assert prefill(share + 1, share + 1) is None
