"""Admission: requests that would wait too long are refused, others get a queue offset."""

import asyncio
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster.heartbeats import heartbeat, placement_request
from tests.support.loops import in_virtual_time
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.router.admission import HEAD_START_S, LOOK_S, RETRY_S_MAX, LoadShedder
from tidemill.cluster.router.fleet_view import Booking, RequestBooked
from tidemill.cluster.router.router import Router
from tidemill.workers.messages import Heartbeat, Overloaded, Speed, Unserved, WorkerId

PREFILL, DECODE = WorkerId("prefill-0.a"), WorkerId("decode-0.b")
TOKEN_S = 0.001


@dataclass
class FakeLoad:
    queued: dict[WorkerId, float] = field(default_factory=lambda: {PREFILL: 0.0, DECODE: 0.0})

    def total_queued_tokens(self) -> float:
        return sum(self.queued.values())


def request(tenant: str = "", ttft_s_max: float | None = None, name: str = "r") -> PlacementRequest:
    return placement_request(1, request_id=name, tenant=tenant, ttft_s_max=ttft_s_max)


RESUMED = placement_request(1, resumed=True, ttft_s_max=0.1)


def admit(
    load_shedder: LoadShedder,
    view: FakeLoad,
    request: PlacementRequest,
    *,
    work: int = 1000,
    now_s: float = 0.0,
) -> Route:
    """Admit a request as the router does, predicted in order of arrival, and queue it."""
    queued = view.queued[PREFILL]
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
    placed = load_shedder.admit(request, route, view, booked, now_s)
    view.queued[PREFILL] += work
    return placed


def test_admission_bounds_the_queue_by_the_limit_of_the_server() -> None:
    load_shedder, view = LoadShedder(ttft_s_max=5.0), FakeLoad()
    for number in range(6):  # the sixth waits 5 s for the others
        admit(load_shedder, view, request(name=f"{number}"))
    with pytest.raises(Overloaded) as refused:
        admit(load_shedder, view, request())
    assert refused.value.predicted_s == pytest.approx(7.0)
    assert 1.0 <= refused.value.retry_after_s <= 4.0
    assert "x-slo-ttft-ms" in str(refused.value)
    view.queued[PREFILL] -= 1000
    admit(load_shedder, view, request(), now_s=1.0)


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
    load_shedder, view = LoadShedder(ttft_s_max=limit_s), FakeLoad()
    view.queued[PREFILL] = queued
    if predicted_s is None:
        with pytest.raises(Overloaded):
            admit(load_shedder, view, request(ttft_s_max=wanted_s), work=work)
    else:
        placed = admit(load_shedder, view, request(ttft_s_max=wanted_s), work=work)
        assert placed.predicted_s == pytest.approx(predicted_s)
        assert placed.queue_offset_s == 0.0
    patience_s = load_shedder.patience_s(request(ttft_s_max=wanted_s))
    assert patience_s == min(limit_s, wanted_s or math.inf)


def test_admission_never_refuses_a_resumed_request_and_puts_it_first() -> None:
    load_shedder, view = LoadShedder(ttft_s_max=5.0), FakeLoad()
    view.queued[PREFILL] = 10**6
    assert admit(load_shedder, view, RESUMED).queue_offset_s == -HEAD_START_S
    assert load_shedder.patience_s(RESUMED) == math.inf


def test_admission_refuses_nothing_at_unknown_speed() -> None:
    view = FakeLoad()
    view.queued[PREFILL] = 10**9
    route = Route(decode=DECODE, decode_address="d")
    booked = [RequestBooked(DECODE, Booking(tokens=10, rows=1, at_s=0.0, due_s=0.0))]
    assert LoadShedder().admit(request(), route, view, booked, 0.0).predicted_s == 0.0


def test_admission_keeps_the_queue_of_one_tenant_open_when_that_of_another_is_full() -> None:
    load_shedder, view = LoadShedder(ttft_s_max=5.0), FakeLoad()
    for number in range(6):
        admit(load_shedder, view, request("loud", name=f"{number}"), now_s=number / 100)
    with pytest.raises(Overloaded):
        admit(load_shedder, view, request("loud"), now_s=0.1)
    placed = admit(load_shedder, view, request("calm"), now_s=0.2)
    assert placed.predicted_s == pytest.approx(2.0, rel=0.01), "one request of the other tenant, and its own"
    assert placed.queue_offset_s < -0.1, "it goes before most waiting requests"


def test_admission_does_not_charge_a_refused_request() -> None:
    def offset_after(refusals: int) -> float:
        load_shedder, view = LoadShedder(ttft_s_max=5.0), FakeLoad()
        admit(load_shedder, view, request("a"))
        for _ in range(refusals):
            with pytest.raises(Overloaded):
                admit(load_shedder, view, request("b", ttft_s_max=0.1), now_s=0.1)
        admit(load_shedder, view, request("a"), now_s=1.0)
        return admit(load_shedder, view, request("b"), now_s=2.0).queue_offset_s

    assert offset_after(0) == offset_after(10)


def test_admission_makes_room_when_work_is_done() -> None:
    """The queues of tenants follow the load that the workers report."""
    load_shedder, view = LoadShedder(ttft_s_max=5.0), FakeLoad()
    for number in range(6):
        admit(load_shedder, view, request("a", name=f"{number}"))
    view.queued[PREFILL] = 0
    assert admit(load_shedder, view, request("b"), now_s=LOOK_S).queue_offset_s == 0.0, (
        "no other request waits"
    )
    placed = admit(load_shedder, view, request("a"), now_s=2 * LOOK_S)
    assert placed.predicted_s == pytest.approx(2.0)


@given(
    excess=st.floats(0.0, 1e4),
    names=st.lists(st.text(max_size=8), min_size=1, max_size=8),
)
def test_admission_spreads_the_retries_of_refused_requests(excess: float, names: list[str]) -> None:
    waits: list[float] = []
    for name in names:
        view = FakeLoad()
        view.queued[PREFILL] = 5_001 + excess * 1000
        with pytest.raises(Overloaded) as refused:
            admit(LoadShedder(ttft_s_max=5.0), view, request(name=name))
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


@in_virtual_time
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


@in_virtual_time
async def test_router_waits_for_a_worker_up_to_the_deadline() -> None:
    now_s = asyncio.get_running_loop().time
    router = Router(now_s, broker=False, ttft_s_max=20.0)
    for waiting, wait_s in ((request(), 20.0), (request(ttft_s_max=0.5), 0.5), (RESUMED, 60.0)):
        since_s = now_s()
        with pytest.raises(Unserved, match="no decode worker"):
            await router.place(waiting)
        assert now_s() - since_s == pytest.approx(wait_s)
