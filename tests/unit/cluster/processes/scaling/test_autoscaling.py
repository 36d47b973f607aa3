"""The fleet follows its load: it grows soon, shrinks slowly, and does not oscillate."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cluster.fake_service import worker_status
from tidemill.cluster.messages import Bounds, FleetStatus, Hysteresis, Misses
from tidemill.cluster.processes.scaling.autoscaling import (
    HIGH,
    LOW,
    Change,
    RoleLoad,
    Sample,
    decide,
    role_load,
    take_sample,
)
from tidemill.workers.messages import NO_MEMORY, Role, WorkerLoad

STEP_S = 2.0
START_S = 20.0
HYSTERESIS = Hysteresis()


@dataclass
class Fleet:
    """Workers of one role under a load that changes with time, counted in workers.

    Work beyond their capacity queues; work that queues for longer than `timeout_s` is refused.
    """

    load: Callable[[float], float]
    bounds: Bounds = field(default_factory=lambda: Bounds(least=1, most=16))
    role: Role = "prefill"
    noise: float = 0.0
    timeout_s: float = 60.0
    rng: Random = field(default_factory=lambda: Random(1))
    counts: list[int] = field(default_factory=list[int])
    refused: int = 0

    def run(self, seconds: float, start: int = 1) -> list[int]:
        """Return the intended number of workers at each sample."""
        history = deque[Sample](maxlen=160)
        ready_at_s = [0.0] * start
        queue, answered = 0.0, 0
        for step in range(int(seconds / STEP_S)):
            now_s = step * STEP_S
            ready = sum(1 for at_s in ready_at_s if at_s <= now_s)
            work = self.load(now_s) * max(0.0, 1 + self.noise * self.rng.gauss(0, 1)) * STEP_S
            done = min(queue + work, ready * STEP_S)
            queue = queue + work - done
            if queue > ready * self.timeout_s:
                self.refused += math.ceil(queue - ready * self.timeout_s)
                queue = ready * self.timeout_s
            answered += math.ceil(done)
            load = RoleLoad(
                wanted=len(ready_at_s),
                ready=ready,
                busy=done / STEP_S / max(1, ready),
                queue_s=queue / max(1, ready),
            )
            misses = Misses(answered=answered, refused=self.refused)
            history.append(Sample(at_s=now_s, roles={self.role: load}, misses=misses))
            for change in decide(history, {self.role: self.bounds}, HYSTERESIS):
                assert change.reason
                if change.by > 0:
                    ready_at_s += [now_s + START_S] * change.by
                else:
                    assert change.by == -1
                    ready_at_s.pop()
            assert self.bounds.least <= len(ready_at_s) <= self.bounds.most
            self.counts.append(len(ready_at_s))
        return self.counts


def reversals(counts: list[int]) -> int:
    """Return how often the direction changed."""
    signs = [b > a for a, b in pairwise(counts) if a != b]
    return sum(a != b for a, b in pairwise(signs))


def at(counts: list[int], at_s: float) -> int:
    return counts[int(at_s / STEP_S)]


@pytest.mark.parametrize("ready_s", [0, 20])
def test_fleet_grows_only_after_up_s_of_samples(ready_s: int) -> None:
    """The time counts from the first sample, and again from when the last new worker was ready."""
    history = [
        Sample(
            at_s=float(at_s),
            roles={"prefill": RoleLoad(wanted=2, ready=1 + (at_s >= ready_s), busy=1.0, queue_s=50)},
        )
        for at_s in range(100)
    ]
    bounds: dict[Role, Bounds] = {"prefill": Bounds(least=1, most=4)}
    first = next(n for n in range(1, 101) if decide(history[:n], bounds, HYSTERESIS))
    assert history[first - 1].at_s == max(0, ready_s - 1) + HYSTERESIS.up_s


def test_fleet_follows_load_step_up_within_minutes() -> None:
    counts = Fleet(lambda now_s: 0.5 if now_s < 100 else 5.0).run(900)
    assert at(counts, 99) == 1
    assert at(counts, 180) >= 4
    assert at(counts, 260) >= 7, "5 busy workers are 0.8 of 7"
    assert max(counts) <= 10
    assert reversals(counts) <= 1, "workers added to empty the queue may leave again"


def test_fleet_follows_load_step_down_slowly_one_worker_at_a_time() -> None:
    counts = Fleet(lambda now_s: 5.0 if now_s < 600 else 1.0).run(2400, start=7)
    assert at(counts, 600) in {7, 8}
    assert at(counts, 600 + HYSTERESIS.down_s - HYSTERESIS.up_s) == at(counts, 600)
    assert counts[-1] == 2, "one is busy, more than 0.6 of a single worker"
    assert all(a - b <= 1 for a, b in pairwise(counts))
    assert reversals(counts) == 0


@settings(max_examples=12, deadline=None)
@given(
    level=st.floats(0.1, 10.0),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 1000),
    start=st.integers(1, 16),
)
def test_fleet_settles_under_steady_noisy_load(level: float, noise: float, seed: int, start: int) -> None:
    counts = Fleet(lambda _: level, noise=noise, rng=Random(seed)).run(4000, start=start)
    settled = counts[len(counts) // 2 :]
    assert len(set(settled)) <= 2, counts
    assert reversals(counts) <= 3
    assert HIGH * settled[-1] >= level * 0.8, "the fleet can do the work"
    assert settled[-1] <= math.ceil(level * 1.6 / LOW) + 2, "the fleet is not much too large"


@settings(max_examples=8, deadline=None)
@given(period_s=st.floats(60, 3000), seed=st.integers(0, 100))
def test_fleet_does_not_oscillate_under_periodic_load(period_s: float, seed: int) -> None:
    fleet = Fleet(
        lambda now_s: 3 + 2.5 * math.sin(now_s * 2 * math.pi / period_s), noise=0.1, rng=Random(seed)
    )
    counts = fleet.run(3600, start=3)
    assert reversals(counts) <= 2 * 3600 / max(period_s, 2 * HYSTERESIS.down_s) + 4


def test_refusals_add_worker_to_busiest_role() -> None:
    """The queue is short because many requests are refused; prefill is the busier role."""

    def changes(busy: Mapping[Role, float]) -> list[Change]:
        roles: dict[Role, RoleLoad] = {
            role: RoleLoad(wanted=2, ready=2, busy=share) for role, share in busy.items()
        }
        misses = [Misses(answered=10 * second, refused=second) for second in range(40)]
        history = [Sample(at_s=at_s, roles=roles, misses=seen) for at_s, seen in enumerate(misses)]
        return decide(history, dict.fromkeys(busy, Bounds(least=1, most=4)), HYSTERESIS)

    (change,) = changes({"prefill": 0.75, "decode": 0.6})
    assert (change.role, change.by) == ("prefill", 1)
    assert not changes({"prefill": 0.2}), "more workers would not help: no request waits"


def test_decide_enforces_bounds_at_any_load() -> None:
    idle = Sample(at_s=0.0, roles={"decode": RoleLoad(wanted=1, ready=0)})
    (growth,) = decide([idle], {"decode": Bounds(least=3, most=4)}, HYSTERESIS)
    assert growth.by == 2
    many = Sample(at_s=0.0, roles={"decode": RoleLoad(wanted=9, ready=9, busy=1.0)})
    (shrinkage,) = decide([many], {"decode": Bounds(least=3, most=4)}, HYSTERESIS)
    assert shrinkage.by == -5
    assert not decide([], {"decode": Bounds(least=3, most=4)}, HYSTERESIS)


def test_decide_waits_for_starting_workers_up_to_start_s_max() -> None:
    start_s = 40
    busy = [
        Sample(
            at_s=at_s,
            roles={"prefill": RoleLoad(wanted=1 + (at_s >= start_s), ready=1, busy=1.0, queue_s=200)},
        )
        for at_s in range(200)
    ]
    bounds: dict[Role, Bounds] = {"prefill": Bounds(least=1, most=4)}
    assert decide(busy[:start_s], bounds, HYSTERESIS)
    first = next(n for n in range(start_s + 1, 201) if decide(busy[:n], bounds, HYSTERESIS))
    assert busy[first - 1].at_s == start_s + HYSTERESIS.start_s_max


@pytest.mark.parametrize(("role", "busy"), [("prefill", 0.0), ("decode", 0.25), ("mixed", 0.25)])
def test_busy_share_depends_on_role(role: Role, busy: float) -> None:
    status = worker_status("w", role)  # 2 MiB of streams; its budget is 4 MiB, it brought 8 MiB
    half = worker_status("v", role, state="draining")
    load = WorkerLoad(memory=NO_MEMORY | {"pages_live": 2 << 20}, budget_bytes=4 << 20)
    shrunk = replace(status, load=load, set_bytes=0)
    assert role_load([shrunk, half], 2) == RoleLoad(wanted=2, ready=1, busy=busy)
    sample = take_sample(FleetStatus(workers=(shrunk, half)), {role: 2}, Misses(), 3.0)
    assert sample.roles[role].ready == 1
    assert HYSTERESIS.up_s < HYSTERESIS.down_s
