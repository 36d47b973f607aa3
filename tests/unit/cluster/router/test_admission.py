"""Admission refuses requests that would wait too long; fair queueing gives each tenant its share."""

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tests.support.loops import IN_VIRTUAL_TIME
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.admission import HEAD_START_S, LOOK_S, RETRY_S_MAX, LoadShedder
from tidemill.cluster.router.fair_queueing import TENANTS_MAX, FairQueue
from tidemill.cluster.router.fleet_view import Booking, RequestBooked
from tidemill.cluster.router.router import Router
from tidemill.workers.messages import Heartbeat, Overloaded, Speed, Unserved, WorkerId

pytestmark = IN_VIRTUAL_TIME

PREFILL, DECODE = WorkerId("prefill-0.a"), WorkerId("decode-0.b")
TOKEN_S = 0.001


def request(tenant: str = "", ttft_s_max: float | None = None, name: str = "r") -> PlacementRequest:
    return placement_request(1, request_id=name, tenant=tenant, ttft_s_max=ttft_s_max)


RESUMED = placement_request(1, resumed=True, ttft_s_max=0.1)


def admit(
    load_shedder: LoadShedder, asked: PlacementRequest, queued: float, *, work: int = 1000, now_s: float = 0.0
) -> Route:
    """Admit a request as the router does, predicted in order of arrival behind the queued tokens."""
    route = Route(
        decode=DECODE,
        decode_address="d",
        prefill=PREFILL,
        prefill_address="p",
        predicted_s=TOKEN_S * (queued + work),
    )
    booked = [
        RequestBooked(PREFILL, Booking(tokens=work, rows=1, at_s=now_s, due_s=now_s, seconds=TOKEN_S * work)),
        RequestBooked(DECODE, Booking(tokens=1, rows=1, at_s=now_s, due_s=now_s)),
    ]
    return load_shedder.admit(asked, route, lambda: queued, booked, now_s)


def full(tenant: str = "") -> LoadShedder:
    """Return one with six requests of 1,000 tokens, of which the last waits 5 s for the others."""
    load_shedder = LoadShedder(ttft_s_max=5.0)
    for number in range(6):
        admit(load_shedder, request(tenant, name=f"{number}"), 1000 * number)
    return load_shedder


def test_admission_bounds_the_queue_by_the_limit_of_the_server() -> None:
    load_shedder = full()
    with pytest.raises(Overloaded) as refused:
        admit(load_shedder, request(), 6000)
    assert refused.value.predicted_s == pytest.approx(7.0)
    assert 1.0 <= refused.value.retry_after_s <= 4.0
    assert "x-slo-ttft-ms" in str(refused.value)
    admit(load_shedder, request(), 5000, now_s=1.0)


@pytest.mark.parametrize(
    ("limit_s", "wanted_s", "queued", "work", "predicted_s"),
    [
        (math.inf, None, 0, 1000, 1.0),
        (math.inf, None, 0, 10**6, 1000.0),  # a prompt of any length in an idle fleet
        (math.inf, None, 10**9, 1000, 1_000_001.0),
        (math.inf, 1.1, 0, 1000, 1.0),
        (math.inf, 0.9, 0, 1000, None),  # the whole prediction counts for a client
        (math.inf, 1000.0, 10**9, 1000, None),
        (60.0, 1000.0, 61_000, 1000, None),  # the limit of the server is never exceeded
    ],
)
def test_admission_compares_predictions_with_limits(
    limit_s: float, wanted_s: float | None, queued: int, work: int, predicted_s: float | None
) -> None:
    load_shedder, asked = LoadShedder(ttft_s_max=limit_s), request(ttft_s_max=wanted_s)
    if predicted_s is None:
        with pytest.raises(Overloaded):
            admit(load_shedder, asked, queued, work=work)
    else:
        placed = admit(load_shedder, asked, queued, work=work)
        assert placed.predicted_s == pytest.approx(predicted_s)
        assert placed.queue_offset_s == 0.0
    assert load_shedder.patience_s(asked) == min(limit_s, wanted_s or math.inf)


def test_admission_keeps_the_queue_of_one_tenant_open_when_that_of_another_is_full() -> None:
    load_shedder = full("loud")
    with pytest.raises(Overloaded):
        admit(load_shedder, request("loud"), 6000, now_s=0.1)
    placed = admit(load_shedder, request("calm"), 6000, now_s=0.2)
    assert placed.predicted_s == pytest.approx(2.0, rel=0.01), "one request of the other tenant, and its own"
    assert placed.queue_offset_s < -0.1, "it goes before most waiting requests"


def test_admission_makes_room_when_work_is_done() -> None:
    """The queues of tenants follow the load that the workers report."""
    load_shedder = full("a")
    assert admit(load_shedder, request("b"), 0, now_s=LOOK_S).queue_offset_s == 0.0, "no other request waits"
    assert admit(load_shedder, request("a"), 1000, now_s=2 * LOOK_S).predicted_s == pytest.approx(2.0)


@given(
    excess=st.floats(0.0, 1e4),
    names=st.lists(st.text(max_size=8), min_size=1, max_size=8),
)
def test_admission_spreads_the_retries_of_refused_requests(excess: float, names: list[str]) -> None:
    waits: list[float] = []
    for name in names:
        with pytest.raises(Overloaded) as refused:
            admit(LoadShedder(ttft_s_max=5.0), request(name=name), 5_001 + excess * 1000)
        waits.append(refused.value.retry_after_s)
    assert all(1.0 <= wait_s <= RETRY_S_MAX for wait_s in waits)
    assert len(set(waits)) == len(set(names)) or max(waits) == RETRY_S_MAX


def busy_worker(queued_s: float, sequence: int = 0) -> Heartbeat:
    return heartbeat(
        "mixed-0",
        "mixed",
        sequence=sequence,
        queued_tokens=int(queued_s / TOKEN_S),
        queued_s=queued_s,
        speed=Speed(step_s=1e-6, token_s=TOKEN_S),
    )


async def test_router_refuses_by_the_reported_load() -> None:
    router = Router(asyncio.get_running_loop().time, broker=False, ttft_s_max=20.0)
    router.heartbeat(busy_worker(50.0))
    for refused_request in (request(), request(ttft_s_max=49.0)):
        with pytest.raises(Overloaded) as refused:
            await router.place(refused_request)
        assert refused.value.predicted_s == pytest.approx(50.0, rel=0.1)
    again = await router.place(RESUMED)
    assert again.decode == "mixed-0.1"
    assert again.queue_offset_s == -HEAD_START_S
    router.heartbeat(busy_worker(1.0, sequence=1))
    assert (await router.place(request())).queue_offset_s == 0.0


async def test_router_waits_for_a_worker_up_to_the_deadline() -> None:
    now_s = asyncio.get_running_loop().time
    router = Router(now_s, broker=False, ttft_s_max=20.0)
    for waiting, wait_s in ((request(), 20.0), (request(ttft_s_max=0.5), 0.5), (RESUMED, 60.0)):
        since_s = now_s()
        with pytest.raises(Unserved, match="no decode worker"):
            await router.place(waiting)
        assert now_s() - since_s == pytest.approx(wait_s)


@dataclass(frozen=True, kw_only=True)
class Job:
    tenant: str
    at_s: float
    work: float


def run(jobs: Sequence[Job], late_s: float = 0.0) -> list[tuple[Job, float]]:
    """Return each job with its end on a worker that does one unit of work a second, in order of arrival plus
    offset, without preemption. The router learns of its queue with a delay of `late_s`."""
    fair_queue, waiting, ends = FairQueue(), list[tuple[float, int]](), dict[int, float]()
    arrivals = sorted(jobs, key=lambda job: job.at_s)
    free_s = 0.0

    def serve(until_s: float) -> None:
        nonlocal free_s
        while waiting and free_s < until_s:
            number = heapq.heappop(waiting)[1]
            free_s = max(free_s, arrivals[number].at_s) + arrivals[number].work
            ends[number] = free_s

    for number, job in enumerate(arrivals):
        serve(job.at_s)
        known_s = job.at_s - late_s
        queued = sum(
            other.work
            for index, other in enumerate(arrivals[:number])
            if other.at_s > known_s or ends.get(index, math.inf) > known_s  # booked since, or not done then
        )
        fair_queue.advance(queued)
        offset_s = fair_queue.charge(job.tenant, job.work, job.at_s)
        fair_queue.check()
        heapq.heappush(waiting, (job.at_s + offset_s, number))
    serve(math.inf)
    return [(job, ends[index]) for index, job in enumerate(arrivals)]


def alone_at(speed: float, jobs: Sequence[Job]) -> list[float]:
    """Return the end of each job on a machine of this speed without other work."""
    ends: list[float] = []
    free_s = 0.0
    for job in sorted(jobs, key=lambda job: job.at_s):
        free_s = max(free_s, job.at_s) + job.work / speed
        ends.append(free_s)
    return ends


works = st.floats(0.05, 2.0)
light_jobs = st.lists(st.tuples(st.floats(0.0, 60.0), works), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(light=light_jobs, seed=st.integers(0, 10**6), late_s=st.sampled_from([0.0, 0.3, 1.0]))
def test_fair_queue_gives_a_tenant_half_of_the_machine_and_a_flood_the_rest(
    light: list[tuple[float, float]], seed: int, late_s: float
) -> None:
    rng = Random(seed)
    flood = [Job(tenant="flood", at_s=rng.uniform(0, 60), work=rng.uniform(0.05, 2.0)) for _ in range(300)]
    calm = [Job(tenant="calm", at_s=at_s, work=work) for at_s, work in light]
    rows = run([*flood, *calm], late_s)
    ended = [end for job, end in rows if job.tenant == "calm"]
    largest = 2.0
    for end, bound in zip(sorted(ended), sorted(alone_at(0.5, calm)), strict=True):
        # One job of the other tenant runs, one may tie, and the virtual time may lag a job of each.
        assert end <= bound + 4 * largest + 2 * late_s
    floods = [(job.at_s, end) for job, end in rows if job.tenant == "flood"]
    assert floods == sorted(floods), "the requests of one tenant keep their order"
    for job, end in rows:  # no job starves: the machine never has more work than has arrived
        before = sum(other.work for other, _ in rows if other.at_s <= end)
        assert end <= job.at_s + before + 1e-6


def test_fair_queue_shares_equally_among_many_floods() -> None:
    rng = Random(5)
    jobs = [
        Job(tenant=f"{index % 4}", at_s=rng.uniform(0, 5.0 * (1 + index % 4)), work=0.1)
        for index in range(2000)
    ]
    done = Counter(job.tenant for job, end in run(jobs) if 20 < end < 100)
    assert len(done) == 4
    assert max(done.values()) - min(done.values()) <= 0.1 * max(done.values()), done


def test_fair_queue_predicts_the_share_of_work_ahead_of_a_request() -> None:
    fair_queue = FairQueue()
    assert fair_queue.ahead("a", 10) == 1.0
    fair_queue.charge("a", 100, 0.0)
    fair_queue.advance(100)
    assert fair_queue.ahead("a", 10) == 1.0
    assert fair_queue.ahead("b", 10) == pytest.approx(0.1), (
        "at equal shares as much work of a is ahead as b requests"
    )
    assert fair_queue.charge("b", 50, 3.0) == 0.0, "both queues start at the same position"
    assert fair_queue.charge("a", 10, 4.0) == 0.0
    assert fair_queue.charge("b", 10, 5.0) == pytest.approx(-1.5), "halfway between 3 s and 4 s"


def test_fair_queue_forgets_work_that_is_done() -> None:
    fair_queue = FairQueue()
    fair_queue.charge("a", 100, 0.0)
    fair_queue.charge("b", 10, 1.0)
    fair_queue.advance(60)  # 50 are done, shared equally by a and b
    assert fair_queue.ahead("b", 1) == pytest.approx(1 / 60)
    fair_queue.advance(0)
    assert fair_queue.charge("b", 1, 10.0) == 0.0
    assert fair_queue.ahead("a", 1) == pytest.approx(1.0), "its work is done: it is behind b"


def test_fair_queue_bounds_the_number_of_tenants() -> None:
    fair_queue = FairQueue()
    for number in range(3 * TENANTS_MAX):
        fair_queue.charge(f"{number}", 1.0, number / 100)
        fair_queue.check()
