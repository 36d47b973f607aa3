"""What would come too late is refused at once; what is taken knows its place among others."""

import asyncio
import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sim.loop import simulate
from tidemill.cluster.messages import TTFT_S_MAX, PlacementRequest, Route
from tidemill.cluster.router.admission import BEGUN_S, LOOK_S, RETRY_S_MAX, LoadShedder
from tidemill.cluster.router.fleet_view import Booking, RequestBooked
from tidemill.cluster.router.router import Router
from tidemill.workers.messages import (
    Announcement,
    Heartbeat,
    Overloaded,
    Speed,
    Unserved,
    WorkerId,
    WorkerInfo,
    WorkerLoad,
)

PREFILL, DECODE = WorkerId("prefill-0.a"), WorkerId("decode-0.b")
TOKEN_S = 0.001


@dataclass
class FakeView:
    queued: dict[WorkerId, float] = field(default_factory=lambda: {PREFILL: 0.0, DECODE: 0.0})

    def queued_tokens_of_all(self) -> float:
        return sum(self.queued.values())


def ask(tenant: str = "", ttft_s_max: float | None = None, name: str = "r") -> PlacementRequest:
    return PlacementRequest(
        request_id=name, keys=(), num_tokens=1, max_new_tokens=1, tenant=tenant, ttft_s_max=ttft_s_max
    )


def admit(
    admission: LoadShedder, view: FakeView, asked: PlacementRequest, *, work: int = 1000, now_s: float = 0.0
) -> Route:
    """As the router does: the prediction is that of order of arrival; what is taken is queued then."""
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
    placed = admission.admit(asked, route, view, booked, now_s)
    view.queued[PREFILL] += work
    return placed


def test_what_comes_in_time_is_taken_and_its_time_is_told() -> None:
    placed = admit(LoadShedder(), FakeView(), ask())
    assert placed.predicted_s == pytest.approx(1.0)
    assert placed.queue_offset_s == 0.0


def test_a_queue_is_as_long_as_the_deadline() -> None:
    admission, view = LoadShedder(ttft_s_max=5.0), FakeView()
    for number in range(6):  # the sixth waits for five others, for 5 s
        admit(admission, view, ask(name=f"{number}"))
    with pytest.raises(Overloaded) as refused:
        admit(admission, view, ask())
    assert refused.value.predicted_s == pytest.approx(7.0)
    assert 1.0 <= refused.value.retry_after_s <= 4.0
    assert "x-slo-ttft-ms" in str(refused.value)
    view.queued[PREFILL] -= 1000
    admit(admission, view, ask(), now_s=1.0)


def test_a_deadline_of_its_own_counts_for_the_whole_time() -> None:
    with pytest.raises(Overloaded):
        admit(LoadShedder(), FakeView(), ask(ttft_s_max=0.9))
    admit(LoadShedder(), FakeView(), ask(ttft_s_max=1.1))


def test_the_servers_deadline_is_the_longest() -> None:
    view = FakeView()
    view.queued[PREFILL] = 61_000
    with pytest.raises(Overloaded):
        admit(LoadShedder(), view, ask(ttft_s_max=1000.0))
    assert LoadShedder().patience_s(ask(ttft_s_max=1000.0)) == TTFT_S_MAX


def test_an_idle_fleet_serves_prompts_of_any_length() -> None:
    assert admit(LoadShedder(), FakeView(), ask(), work=10**6).predicted_s == pytest.approx(1000.0)


def test_a_request_that_was_taken_before_is_never_refused_and_goes_first() -> None:
    admission, view = LoadShedder(ttft_s_max=5.0), FakeView()
    view.queued[PREFILL] = 10**6
    assert admit(admission, view, ask(ttft_s_max=math.inf)).queue_offset_s == -BEGUN_S
    assert admission.patience_s(ask(ttft_s_max=math.inf)) == math.inf


def test_an_unknown_speed_refuses_nothing() -> None:
    view = FakeView()
    view.queued[PREFILL] = 10**9
    route = Route(decode=DECODE, decode_address="d")
    booked = [RequestBooked(DECODE, Booking(tokens=10, rows=1, at_s=0.0, due_s=0.0))]
    assert LoadShedder().admit(ask(), route, view, booked, 0.0).predicted_s == 0.0


def test_a_full_queue_of_one_tenant_is_not_full_for_another() -> None:
    admission, view = LoadShedder(ttft_s_max=5.0), FakeView()
    for number in range(6):
        admit(admission, view, ask("loud", name=f"{number}"), now_s=number / 100)
    with pytest.raises(Overloaded):
        admit(admission, view, ask("loud"), now_s=0.1)
    placed = admit(admission, view, ask("calm"), now_s=0.2)
    assert placed.predicted_s == pytest.approx(2.0, rel=0.01), "one of the other's, and its own"
    assert placed.queue_offset_s < -0.1, "it goes before most of those that wait"


def test_a_refused_request_is_not_charged() -> None:
    def lag_after(refusals: int) -> float:
        admission, view = LoadShedder(ttft_s_max=5.0), FakeView()
        admit(admission, view, ask("a"))
        for _ in range(refusals):
            with pytest.raises(Overloaded):
                admit(admission, view, ask("b", ttft_s_max=0.1), now_s=0.1)
        admit(admission, view, ask("a"), now_s=1.0)
        return admit(admission, view, ask("b"), now_s=2.0).queue_offset_s

    assert lag_after(0) == lag_after(10)


def test_work_that_was_done_makes_place() -> None:
    """The lines of tenants follow what the workers report, a moment later at most."""
    admission, view = LoadShedder(ttft_s_max=5.0), FakeView()
    for number in range(6):
        admit(admission, view, ask("a", name=f"{number}"))
    view.queued[PREFILL] = 0
    assert admit(admission, view, ask("b"), now_s=LOOK_S).queue_offset_s == 0.0, "it passes nobody"
    placed = admit(admission, view, ask("a"), now_s=2 * LOOK_S)
    assert placed.predicted_s == pytest.approx(2.0)


@given(
    excess=st.floats(0.0, 1e4),
    names=st.lists(st.text(max_size=8), min_size=1, max_size=8),
)
def test_those_refused_together_come_back_apart(excess: float, names: list[str]) -> None:
    waits: list[float] = []
    for name in names:
        view = FakeView()
        view.queued[PREFILL] = 5_001 + excess * 1000
        with pytest.raises(Overloaded) as refused:
            admit(LoadShedder(ttft_s_max=5.0), view, ask(name=name))
        waits.append(refused.value.retry_after_s)
    assert all(1.0 <= wait_s <= RETRY_S_MAX for wait_s in waits)
    assert len(set(waits)) == len(set(names)) or max(waits) == RETRY_S_MAX


def busy_worker(queued_s: float) -> Heartbeat:
    info = WorkerInfo(worker=DECODE, name="mixed-0", role="mixed", address="d", pid=1, node="n")
    load = WorkerLoad(
        queued_tokens=int(queued_s / TOKEN_S), queued_s=queued_s, speed=Speed(step_s=1e-6, token_s=TOKEN_S)
    )
    return Heartbeat(info=info, sequence=1, load=load, announcement=Announcement(full=True))


def test_the_router_refuses_by_what_its_workers_report() -> None:
    async def main() -> None:
        router = Router(asyncio.get_running_loop().time, broker=False, ttft_s_max=20.0)
        router.heartbeat(busy_worker(50.0))
        for asked in (ask(), ask(ttft_s_max=49.0)):
            with pytest.raises(Overloaded) as refused:
                await router.place(asked)
            assert refused.value.predicted_s == pytest.approx(50.0, rel=0.1)
        again = await router.place(ask(ttft_s_max=math.inf))
        assert again.decode == DECODE
        assert again.queue_offset_s == -BEGUN_S
        router.heartbeat(replace(busy_worker(1.0), sequence=2))
        assert (await router.place(ask())).queue_offset_s == 0.0

    simulate(0, main())


def test_nobody_waits_for_a_worker_beyond_the_deadline() -> None:
    async def main() -> None:
        now_s = asyncio.get_running_loop().time
        router = Router(now_s, broker=False, ttft_s_max=20.0)
        for asked, wait_s in ((ask(), 20.0), (ask(ttft_s_max=0.5), 0.5), (ask(ttft_s_max=math.inf), 60.0)):
            since_s = now_s()
            with pytest.raises(Unserved, match="no decode worker"):
                await router.place(asked)
            assert now_s() - since_s == pytest.approx(wait_s)

    simulate(0, main())
