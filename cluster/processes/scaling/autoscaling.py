"""Decide the number of workers of each role from the load that the fleet has had, and collect what edges
report of it. `decide` and `take_sample` are pure.

Demand is counted in workers. It is the sum of the busy workers, the workers that would have stopped
the queue from growing, and those that would empty it within `drain_s`. It is scaled up by the share
of refused requests. The fleet grows when the demand over `up_s` exceeds HIGH of the workers. It
shrinks, one worker at a time, when the peak demand over `down_s` is at most LOW of one worker
fewer. In between nothing changes:

    demand on n workers    0 ........ LOW * (n - 1) ........ HIGH * n ........
                           shrink     |           keep              |    grow
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.cluster.messages import Bounds, FleetStatus, Hysteresis, Misses, WorkerStatus
from tidemill.workers.messages import Role

HIGH, LOW = 0.8, 0.6
MISSED_SHARE_MAX = 0.01
BUSY_MIN = 0.5
"""The role with the highest demand per worker grows by one worker if a larger share than MISSED_SHARE_MAX of
the requests within `up_s` was refused or late. Its workers must have been busy for more than BUSY_MIN."""

GROWTH_MAX = 4
"""The maximum growth factor per decision."""


EDGE_SILENT_S_MAX = 3.0
"""The time after which an edge that has not reported is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeState:
    """The latest report of an edge: the resets of the prefix cache that it knows, and its open requests."""

    at_s: float
    resets: int
    open_requests: int


class EdgeReports:
    """The reports of all edges of a fleet. `misses` are their totals."""

    def __init__(self) -> None:
        self.misses = Misses()
        self._edges: dict[str, EdgeState] = {}

    def add(self, edge: str, misses: Misses, state: EdgeState) -> None:
        """Take a report: what the edge has answered or refused since its last one, and its state."""
        self.misses += misses
        self._edges = {**self._alive(state.at_s), edge: state}

    @property
    def has_any(self) -> bool:
        """True if an edge has ever reported. Before that, clients cannot reach the fleet."""
        return bool(self._edges)

    def open_requests(self, now_s: float) -> int:
        """Return the requests that the edges had open in their latest reports."""
        return sum(state.open_requests for state in self._alive(now_s).values())

    def lags(self, edge: str, resets: int, now_s: float) -> bool:
        """Return whether an edge other than `edge` runs and knows fewer resets."""
        return any(state.resets < resets for other, state in self._alive(now_s).items() if other != edge)

    def _alive(self, now_s: float) -> dict[str, EdgeState]:
        since_s = now_s - EDGE_SILENT_S_MAX
        return {edge: state for edge, state in self._edges.items() if state.at_s > since_s}


class IdleClock:
    """Measures for how long a fleet has had no requests."""

    def __init__(self, reports: EdgeReports) -> None:
        self._reports = reports
        self._used_s: float | None = None
        self._misses = Misses()  # then

    def idle_s(self, now_s: float, *, starts: bool) -> float:
        """Return the seconds without requests; a fleet that `starts`, or that no edge serves yet, counts as
        one with requests."""
        starts = starts or not self._reports.has_any
        is_used = self._reports.open_requests(now_s) or self._reports.misses != self._misses
        if starts or is_used or self._used_s is None:
            self._used_s, self._misses = now_s, self._reports.misses
        return now_s - self._used_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """The load of a role: `wanted` is the intended number of workers, `ready` the number that serves. Means
    over the ready workers: `busy` is the used share of a worker, `queue_s` its queued work in seconds."""

    wanted: int
    ready: int
    busy: float = 0.0
    queue_s: float = 0.0

    @property
    def used(self) -> float:
        return self.ready * self.busy

    @property
    def queued_s(self) -> float:
        """The queued work in seconds of one worker."""
        return self.ready * self.queue_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at_s: float
    roles: Mapping[Role, RoleLoad]
    misses: Misses = field(default_factory=Misses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An order to add `by` workers of a role, or to remove -`by` of them."""

    role: Role
    by: int
    reason: str


def decide(history: Sequence[Sample], bounds: Mapping[Role, Bounds], hysteresis: Hysteresis) -> list[Change]:
    """Return the changes to make now. `history` ascends in time; samples older than `down_s` are ignored."""
    if not history:
        return []
    recent = _since(history, history[-1].at_s - hysteresis.up_s)
    loads = {
        role: _demand(recent, role, hysteresis) / max(1, history[-1].roles[role].wanted) for role in bounds
    }
    tightest = max(loads, key=lambda role: loads[role], default=None)
    changes: list[Change] = []
    for role, bound in bounds.items():
        blamed = recent if role == tightest and loads[role] > BUSY_MIN else recent[-1:]
        change = _grow(history, role, bound, blamed, hysteresis) or _shrink(history, role, bound, hysteresis)
        if change is not None:
            changes.append(change)
    return changes


def role_load(workers: Sequence[WorkerStatus], wanted: int) -> RoleLoad:
    ready = [worker for worker in workers if worker.state == "ready"]
    count = max(1, len(ready))
    return RoleLoad(
        wanted=wanted,
        ready=len(ready),
        busy=sum(map(_busy, ready)) / count,
        queue_s=sum(worker.load.queued_s for worker in ready) / count,
    )


def take_sample(status: FleetStatus, wanted: Mapping[Role, int], misses: Misses, at_s: float) -> Sample:
    return Sample(
        at_s=at_s,
        roles={
            role: role_load([worker for worker in status.workers if worker.info.role == role], count)
            for role, count in wanted.items()
        },
        misses=misses,
    )


def _busy(worker: WorkerStatus) -> float:
    """Return the used share of a worker: of its compute for prefill, of its memory for decode. Over many
    samples, the share of those with a prompt in computation is the share of busy time. Memory is measured
    against at least what the worker brought, because its budget follows its need."""
    load, info = worker.load, worker.info
    computing = float(load.queued_tokens > 0)
    memory_bytes = max(1, load.budget_bytes, info.memory_bytes)
    filled = (load.live_bytes + load.wanted_bytes) / memory_bytes
    return {"prefill": computing, "decode": filled, "mixed": max(computing, filled)}[info.role]


def _grow(
    history: Sequence[Sample], role: Role, bound: Bounds, blamed: Sequence[Sample], hysteresis: Hysteresis
) -> Change | None:
    """Return the growth of a role; `blamed` are the samples whose refused and late requests count for it."""
    now_s, load = history[-1].at_s, history[-1].roles[role]
    if load.wanted < bound.least:
        return Change(role=role, by=bound.least - load.wanted, reason=f"the minimum is {bound.least}")
    if load.ready < load.wanted and now_s - _changed_s(history, role, 1) < hysteresis.start_s_max:
        return None
    if max(history[0].at_s, _ready_s(history, role)) > now_s - hysteresis.up_s:
        return None  # not observed for long enough
    refused, missed = _missed_shares(blamed[0].misses, blamed[-1].misses)
    served = _demand(_since(history, now_s - hysteresis.up_s), role, hysteresis)
    demand = served / max(1 - refused, 1 / GROWTH_MAX)
    count = max(math.ceil(demand / HIGH), load.wanted + (missed > MISSED_SHARE_MAX))
    count = min(count, max(1, load.wanted) * GROWTH_MAX, bound.most)
    if count <= load.wanted:
        return None
    detail = f", {missed:.0%} of the requests were refused or late" if missed else ""
    return Change(role=role, by=count - load.wanted, reason=f"the demand is {demand:.1f} workers{detail}")


def _shrink(history: Sequence[Sample], role: Role, bound: Bounds, hysteresis: Hysteresis) -> Change | None:
    now_s, load = history[-1].at_s, history[-1].roles[role]
    if load.wanted > bound.most:
        return Change(role=role, by=bound.most - load.wanted, reason=f"the maximum is {bound.most}")
    up_s, down_s = hysteresis.up_s, hysteresis.down_s
    is_settled = (
        history[0].at_s <= now_s - down_s
        and now_s - _changed_s(history, role, 1) >= down_s
        and now_s - _changed_s(history, role, -1) >= hysteresis.cool_s
    )
    if not is_settled or load.wanted <= bound.least:
        return None
    samples = _since(history, now_s - down_s)
    starts = [samples[0].at_s + up_s * step for step in range(math.ceil(down_s / up_s))]
    spans = [[sample for sample in samples if start <= sample.at_s < start + up_s] for start in starts]
    peak = max(_demand(span, role, hysteresis) for span in spans if span)
    if peak > LOW * (load.wanted - 1):
        return None
    return Change(role=role, by=-1, reason=f"the demand was at most {peak:.1f} workers for {down_s:g} s")


def _since(history: Sequence[Sample], since_s: float) -> list[Sample]:
    return [sample for sample in history if sample.at_s >= since_s]


def _demand(samples: Sequence[Sample], role: Role, hysteresis: Hysteresis) -> float:
    """Return the number of workers that could have done the work that arrived."""
    first, last = samples[0], samples[-1]
    used = sum(sample.roles[role].used for sample in samples) / len(samples)
    queued_s = last.roles[role].queued_s
    span_s = last.at_s - first.at_s
    growth = (queued_s - first.roles[role].queued_s) / span_s if span_s else 0.0
    return max(0.0, used + growth + queued_s / hysteresis.drain_s)


def _missed_shares(first: Misses, last: Misses) -> tuple[float, float]:
    """Return the shares of the requests between the two that were refused, and that were refused or late."""
    refused, late = last.refused - first.refused, last.late - first.late
    num_requests = max(1, last.answered - first.answered + refused)
    return refused / num_requests, (refused + late) / num_requests


def _changed_s(history: Sequence[Sample], role: Role, sign: int) -> float:
    """Return the time at which the intended number last rose (`sign` 1) or fell (-1)."""
    after = history[-1]
    for before in reversed(history):
        if (after.roles[role].wanted - before.roles[role].wanted) * sign > 0:
            return after.at_s
        after = before
    return -math.inf


def _ready_s(history: Sequence[Sample], role: Role) -> float:
    """Return the time since which as many workers have been ready as now; earlier samples do not compare."""
    for sample in reversed(history):
        if sample.roles[role].ready < history[-1].roles[role].ready:
            return sample.at_s
    return -math.inf
