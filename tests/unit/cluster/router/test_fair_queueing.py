"""Tenants share a fleet as if each had its part of it, whatever the others ask for; nobody waits for ever."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.cluster.router.fair_queueing import TENANTS_MAX, FairQueue


@dataclass(frozen=True, kw_only=True)
class Job:
    tenant: str
    at_s: float
    work: float


@dataclass
class Machine:
    """One worker that does a unit of work in a second, in the order of (arrival + lag), never interrupted.

    The router hears of the queue `late_s` after it was so.
    """

    late_s: float = 0.0
    shares: FairQueue = field(default_factory=FairQueue)

    def run(self, jobs: Sequence[Job]) -> list[tuple[Job, float, float]]:
        """Each job with its lag and the time at which it ended."""
        waiting: list[tuple[float, int]] = []
        arrivals = sorted(jobs, key=lambda job: job.at_s)
        lags: list[float] = []
        ends: dict[int, float] = {}
        free_s = 0.0
        for number, job in enumerate(arrivals):
            free_s = self._serve(waiting, arrivals, ends, (free_s, job.at_s))
            heard_s = job.at_s - self.late_s
            queued = sum(
                arrival.work for arrival in arrivals[:number] if arrival.at_s > heard_s
            )  # its own bookings
            queued += sum(
                arrival.work
                for index, arrival in enumerate(arrivals[:number])
                if arrival.at_s <= heard_s and ends.get(index, heard_s + 1) > heard_s
            )
            self.shares.advance(queued)
            lags.append(self.shares.charge(job.tenant, job.work, job.at_s))
            self.shares.check()
            heapq.heappush(waiting, (job.at_s + lags[-1], number))
        self._serve(waiting, arrivals, ends, (free_s, float("inf")))
        return [(job, lags[index], ends[index]) for index, job in enumerate(arrivals)]

    @staticmethod
    def _serve(
        waiting: list[tuple[float, int]],
        arrivals: Sequence[Job],
        ends: dict[int, float],
        span_s: tuple[float, float],
    ) -> float:
        """Begin whatever can begin before the end of the span."""
        free_s, until_s = span_s
        while waiting and max(free_s, 0.0) < until_s:
            number = heapq.heappop(waiting)[1]
            free_s = max(free_s, arrivals[number].at_s) + arrivals[number].work
            ends[number] = free_s
        return free_s


def alone_at(speed: float, jobs: Sequence[Job]) -> list[float]:
    """When each job would end on a machine of this speed that does nothing else."""
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
def test_beside_a_flood_a_tenant_has_half_of_the_machine(
    light: list[tuple[float, float]], seed: int, late_s: float
) -> None:
    rng = Random(seed)
    flood = [Job(tenant="flood", at_s=rng.uniform(0, 60), work=rng.uniform(0.05, 2.0)) for _ in range(300)]
    calm = [Job(tenant="calm", at_s=at_s, work=work) for at_s, work in light]
    ended = [end for job, _, end in Machine(late_s).run([*flood, *calm]) if job.tenant == "calm"]
    largest = 2.0
    for end, bound in zip(sorted(ended), sorted(alone_at(0.5, calm)), strict=True):
        assert end <= bound + 2 * largest + 2 * late_s, "one job of the other's is under way, and one may tie"


@settings(max_examples=60, deadline=None)
@given(light=light_jobs, seed=st.integers(0, 10**6))
def test_the_flood_gets_all_that_the_others_leave(light: list[tuple[float, float]], seed: int) -> None:
    rng = Random(seed)
    flood = [Job(tenant="flood", at_s=rng.uniform(0, 60), work=rng.uniform(0.05, 2.0)) for _ in range(200)]
    calm = [Job(tenant="calm", at_s=at_s, work=work) for at_s, work in light]
    rows = Machine().run([*flood, *calm])
    floods = [(job.at_s, end) for job, _, end in rows if job.tenant == "flood"]
    assert floods == sorted(floods), "a tenant's own requests keep their order"
    for job, _, end in rows:  # nobody starves: the machine has never more to do than what has come
        before = sum(row.work for row, _, _ in rows if row.at_s <= end)
        assert end <= job.at_s + before + 1e-6


@settings(max_examples=60, deadline=None)
@given(light=light_jobs)
def test_a_single_tenant_is_in_order_of_arrival(light: list[tuple[float, float]]) -> None:
    rows = Machine().run([Job(tenant="", at_s=at_s, work=work) for at_s, work in light])
    assert {queue_offset_s for _, queue_offset_s, _ in rows} == {0.0}


def test_many_floods_share_equally() -> None:
    rng = Random(5)
    jobs = [
        Job(tenant=f"{index % 4}", at_s=rng.uniform(0, 5.0 * (1 + index % 4)), work=0.1)
        for index in range(2000)
    ]
    rows = Machine().run(jobs)
    done = [
        sum(1 for job, _, end in rows if job.tenant == f"{number}" and 20 < end < 100) for number in range(4)
    ]
    assert max(done) - min(done) <= 0.1 * max(done), done


def test_a_request_predicts_what_is_before_it() -> None:
    shares = FairQueue()
    assert shares.ahead("a", 10) == 1.0
    shares.charge("a", 100, 0.0)
    shares.advance(100)
    assert shares.ahead("a", 10) == 1.0
    assert shares.ahead("b", 10) == pytest.approx(0.1), "at equal shares a is ahead by as much as b asks for"
    assert shares.charge("b", 50, 3.0) == 0.0, "both lines begin at the same place"
    assert shares.charge("a", 10, 4.0) == 0.0
    assert shares.charge("b", 10, 5.0) == pytest.approx(-1.5), "half of the way between 3 s and 4 s"


def test_work_that_was_done_is_forgotten() -> None:
    shares = FairQueue()
    shares.charge("a", 100, 0.0)
    shares.charge("b", 10, 1.0)
    shares.advance(60)  # 50 were done, of a and of b alike
    assert shares.ahead("b", 1) == pytest.approx(1 / 60)
    shares.advance(0)
    assert shares.charge("b", 1, 10.0) == 0.0
    assert shares.ahead("a", 1) == pytest.approx(1.0), "nothing is left of what it asked for: it is behind b"


def test_tenants_are_bounded() -> None:
    shares = FairQueue()
    for number in range(3 * TENANTS_MAX):
        shares.charge(f"{number}", 1.0, number / 100)
        shares.check()
