"""How many workers of each role there shall be, by what the fleet has seen. Pure.

Demand is counted in workers: those that were busy, those that would have kept the queue from growing, those
that work it off in `drain_s`, and by as much more as requests were refused. More workers are wanted when it
was more than HIGH of those there are, over `up_s`; fewer, one at a time, when its highest over `down_s` is no
more than LOW of the fewer. Between the two nothing changes:

    demand of n workers    0 ........ LOW * (n - 1) ........ HIGH * n ........
                           fewer      |        as they are          |     more
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.cluster.messages import Bounds, FleetStatus, Hysteresis, Misses, WorkerStatus
from tidemill.workers.messages import Role

HIGH, LOW = 0.8, 0.6
MISSED_SHARE = 0.01
BUSY_MIN = 0.5
"""Of the requests of `up_s` that were refused or answered late: more than these are worth a worker of the
tightest role, if its workers were busy for so much of the time."""

PER_STEP = 4
"""At most so many times the workers there are, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """What the workers of a role had to do. `wanted` of them there shall be, `ready` serve. Means over these:
    `busy` is the share of the worker that is used, `queue_s` the work that waits for it."""

    wanted: int
    ready: int
    busy: float = 0.0
    queue_s: float = 0.0

    @property
    def used(self) -> float:
        """Workers."""
        return self.ready * self.busy

    @property
    def queued_s(self) -> float:
        """Seconds of one worker."""
        return self.ready * self.queue_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    at_s: float
    roles: Mapping[Role, RoleLoad]
    misses: Misses = field(default_factory=Misses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """So many workers of a role more, or fewer."""

    role: Role
    by: int
    reason: str


def decide(history: Sequence[Sample], bounds: Mapping[Role, Bounds], hysteresis: Hysteresis) -> list[Change]:
    """What to change now. `history` ascends in time; older than `down_s` is not looked at."""
    if not history:
        return []
    lately = _since(history, history[-1].at_s - hysteresis.up_s)
    loads = {
        role: _demand(lately, role, hysteresis) / max(1, history[-1].roles[role].wanted) for role in bounds
    }
    tightest = max(loads, key=lambda role: loads[role], default=None)
    changes: list[Change] = []
    for role, bound in bounds.items():
        blamed = lately if role == tightest and loads[role] > BUSY_MIN else lately[-1:]
        change = _more(history, role, bound, blamed, hysteresis) or _fewer(history, role, bound, hysteresis)
        if change is not None:
            changes.append(change)
    return changes


def role_load(workers: Sequence[WorkerStatus], wanted: int) -> RoleLoad:
    """Of the workers of one role that are ready."""
    ready = [one for one in workers if one.state == "ready"]
    count = max(1, len(ready))
    return RoleLoad(
        wanted=wanted,
        ready=len(ready),
        busy=sum(map(_busy, ready)) / count,
        queue_s=sum(one.load.queued_s for one in ready) / count,
    )


def sample_of(status: FleetStatus, wanted: Mapping[Role, int], misses: Misses, at_s: float) -> Sample:
    return Sample(
        at_s=at_s,
        roles={
            role: role_load([one for one in status.workers if one.info.role == role], count)
            for role, count in wanted.items()
        },
        misses=misses,
    )


def _busy(worker: WorkerStatus) -> float:
    """Seen often enough, the share of the looks that find a prompt being computed is the share of the time.
    Streams fill memory instead, measured by what the worker brought: its budget follows its need."""
    load, info = worker.load, worker.info
    computes = float(load.queued_tokens > 0)
    memory_bytes = max(1, load.budget_bytes, info.memory_bytes)
    filled = (load.memory.live + load.wanted_bytes) / memory_bytes
    return {"prefill": computes, "decode": filled, "mixed": max(computes, filled)}[info.role]


def _more(
    history: Sequence[Sample], role: Role, bound: Bounds, blamed: Sequence[Sample], hysteresis: Hysteresis
) -> Change | None:
    """`blamed` are the samples whose refused and late requests are for this role to account for."""
    now_s, load = history[-1].at_s, history[-1].roles[role]
    if load.wanted < bound.least:
        return Change(role=role, by=bound.least - load.wanted, reason=f"{bound.least} are the least")
    if load.ready < load.wanted and now_s - _changed_s(history, role, 1) < hysteresis.start_s_max:
        return None
    if max(history[0].at_s, _ready_s(history, role)) > now_s - hysteresis.up_s:
        return None  # not seen for long enough
    refused, missed = _shares(blamed[0].misses, blamed[-1].misses)
    used = _demand(_since(history, now_s - hysteresis.up_s), role, hysteresis)
    demand = used / max(1 - refused, 1 / PER_STEP)
    count = max(math.ceil(demand / HIGH), load.wanted + (missed > MISSED_SHARE))
    count = min(count, max(1, load.wanted) * PER_STEP, bound.most)
    if count <= load.wanted:
        return None
    why = f", {missed:.0%} of the requests were refused or late" if missed else ""
    return Change(role=role, by=count - load.wanted, reason=f"{demand:.1f} would be busy{why}")


def _fewer(history: Sequence[Sample], role: Role, bound: Bounds, hysteresis: Hysteresis) -> Change | None:
    now_s, load = history[-1].at_s, history[-1].roles[role]
    if load.wanted > bound.most:
        return Change(role=role, by=bound.most - load.wanted, reason=f"{bound.most} are the most")
    up_s, down_s = hysteresis.up_s, hysteresis.down_s
    is_settled = (
        history[0].at_s <= now_s - down_s
        and now_s - _changed_s(history, role, 1) >= down_s
        and now_s - _changed_s(history, role, -1) >= hysteresis.cool_s
    )
    if not is_settled or load.wanted <= bound.least:
        return None
    seen = _since(history, now_s - down_s)
    begins = [seen[0].at_s + up_s * step for step in range(math.ceil(down_s / up_s))]
    spans = [[one for one in seen if begin <= one.at_s < begin + up_s] for begin in begins]
    peak = max(_demand(span, role, hysteresis) for span in spans if span)
    if peak > LOW * (load.wanted - 1):
        return None
    return Change(role=role, by=-1, reason=f"no more than {peak:.1f} were busy for {down_s:g} s")


def _since(history: Sequence[Sample], since_s: float) -> list[Sample]:
    return [sample for sample in history if sample.at_s >= since_s]


def _demand(samples: Sequence[Sample], role: Role, hysteresis: Hysteresis) -> float:
    """Workers that could have done what came."""
    first, last = samples[0], samples[-1]
    used = sum(sample.roles[role].used for sample in samples) / len(samples)
    queued_s = last.roles[role].queued_s
    span_s = last.at_s - first.at_s
    growth = (queued_s - first.roles[role].queued_s) / span_s if span_s else 0.0
    return max(0.0, used + growth + queued_s / hysteresis.drain_s)


def _shares(first: Misses, last: Misses) -> tuple[float, float]:
    """Of the requests between the two, those that were refused, and those with the late ones."""
    refused, late = last.refused - first.refused, last.late - first.late
    asked = max(1, last.answered - first.answered + refused)
    return refused / asked, (refused + late) / asked


def _changed_s(history: Sequence[Sample], role: Role, sign: int) -> float:
    """When there were last to be more (1) or fewer (-1)."""
    after = history[-1]
    for before in reversed(history):
        if (after.roles[role].wanted - before.roles[role].wanted) * sign > 0:
            return after.at_s
        after = before
    return -math.inf


def _ready_s(history: Sequence[Sample], role: Role) -> float:
    """Since when those that are ready now have been so: what the fewer before them saw says little."""
    for sample in reversed(history):
        if sample.roles[role].ready < history[-1].roles[role].ready:
            return sample.at_s
    return -math.inf
