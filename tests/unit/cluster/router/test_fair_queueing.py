"""Fair queueing: each tenant has its share of the fleet, and no request waits forever."""

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
    """A worker that does one unit of work a second, in order of arrival plus offset, without preemption.

    The router learns of its queue with a delay of `late_s`.
    """

    late_s: float = 0.0
    fair_queue: FairQueue = field(default_factory=FairQueue)

    def run(self, jobs: Sequence[Job]) -> list[tuple[Job, float, float]]:
        """Return each job with its queue offset and the time of its end."""
        waiting: list[tuple[float, int]] = []
        arrivals = sorted(jobs, key=lambda job: job.at_s)
        offsets: list[float] = []
        ends: dict[int, float] = {}
        free_s = 0.0
        for number, job in enumerate(arrivals):
            free_s = self._serve(waiting, arrivals, ends, (free_s, job.at_s))
            reported_s = job.at_s - self.late_s
            queued = sum(
                other.work for other in arrivals[:number] if other.at_s > reported_s
            )  # its own bookings
            queued += sum(
                other.work
                for index, other in enumerate(arrivals[:number])
                if other.at_s <= reported_s and ends.get(index, reported_s + 1) > reported_s
            )
            self.fair_queue.advance(queued)
            offsets.append(self.fair_queue.charge(job.tenant, job.work, job.at_s))
            self.fair_queue.check()
            heapq.heappush(waiting, (job.at_s + offsets[-1], number))
        self._serve(waiting, arrivals, ends, (free_s, float("inf")))
        return [(job, offsets[index], ends[index]) for index, job in enumerate(arrivals)]

    @staticmethod
    def _serve(
        waiting: list[tuple[float, int]],
        arrivals: Sequence[Job],
        ends: dict[int, float],
        span_s: tuple[float, float],
    ) -> float:
        """Start all jobs that can start before the end of the span."""
        free_s, until_s = span_s
        while waiting and max(free_s, 0.0) < until_s:
            number = heapq.heappop(waiting)[1]
            free_s = max(free_s, arrivals[number].at_s) + arrivals[number].work
            ends[number] = free_s
        return free_s


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
def test_fair_queue_gives_a_tenant_half_of_the_machine_beside_a_flood(
    light: list[tuple[float, float]], seed: int, late_s: float
) -> None:
    rng = Random(seed)
    flood = [Job(tenant="flood", at_s=rng.uniform(0, 60), work=rng.uniform(0.05, 2.0)) for _ in range(300)]
    calm = [Job(tenant="calm", at_s=at_s, work=work) for at_s, work in light]
    ended = [end for job, _, end in Machine(late_s).run([*flood, *calm]) if job.tenant == "calm"]
    largest = 2.0
    for end, bound in zip(sorted(ended), sorted(alone_at(0.5, calm)), strict=True):
        # One job of the other tenant runs, one may tie, and the virtual time may lag a job of each.
        assert end <= bound + 4 * largest + 2 * late_s


@settings(max_examples=60, deadline=None)
@given(light=light_jobs, seed=st.integers(0, 10**6))
def test_fair_queue_gives_a_flood_all_that_others_leave(light: list[tuple[float, float]], seed: int) -> None:
    rng = Random(seed)
    flood = [Job(tenant="flood", at_s=rng.uniform(0, 60), work=rng.uniform(0.05, 2.0)) for _ in range(200)]
    calm = [Job(tenant="calm", at_s=at_s, work=work) for at_s, work in light]
    rows = Machine().run([*flood, *calm])
    floods = [(job.at_s, end) for job, _, end in rows if job.tenant == "flood"]
    assert floods == sorted(floods), "the requests of one tenant keep their order"
    for job, _, end in rows:  # no job starves: the machine never has more work than has arrived
        before = sum(other.work for other, _, _ in rows if other.at_s <= end)
        assert end <= job.at_s + before + 1e-6


@settings(max_examples=60, deadline=None)
@given(light=light_jobs)
def test_fair_queue_serves_a_single_tenant_in_order_of_arrival(light: list[tuple[float, float]]) -> None:
    rows = Machine().run([Job(tenant="", at_s=at_s, work=work) for at_s, work in light])
    assert {queue_offset_s for _, queue_offset_s, _ in rows} == {0.0}


def test_fair_queue_shares_equally_among_many_floods() -> None:
    rng = Random(5)
    jobs = [
        Job(tenant=f"{index % 4}", at_s=rng.uniform(0, 5.0 * (1 + index % 4)), work=0.1)
        for index in range(2000)
    ]
    rows = Machine().run(jobs)
    done = [
        sum(1 for job, _, end in rows if job.tenant == f"{index}" and 20 < end < 100) for index in range(4)
    ]
    assert max(done) - min(done) <= 0.1 * max(done), done


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
