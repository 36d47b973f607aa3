"""The scaler carries out the decisions of autoscaling.py and the commands of operators: it starts workers and
removes empty ones, and all of a fleet without requests."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast, get_args

import pytest

from tests.support.cluster.fake_engine import worker
from tests.support.cluster.fake_service import worker_status
from tidemill.cluster.messages import Bounds, FleetStatus, Hysteresis, Misses, RoleScale, WorkerStatus
from tidemill.cluster.orders import Drain, SetRole
from tidemill.cluster.processes.scaling.autoscaling import EDGE_SILENT_S_MAX, EdgeReports, EdgeState
from tidemill.cluster.processes.scaling.journal import FleetPlan, Lifecycle, initial_plan
from tidemill.cluster.processes.scaling.scaler import IDLE_CHECKS, Scaler
from tidemill.cluster.settings import FleetSettings, RouterSettings, WorkerSettings
from tidemill.workers.messages import RequestError, Role, Unserved, WorkerId, WorkerLoad

HYSTERESIS = Hysteresis()
LOOK_S = HYSTERESIS.look_s
BUSY = WorkerLoad(queued_tokens=100, queued_s=30.0, running_rows=1)
STREAM = WorkerLoad(running_rows=1)
IDLE = WorkerLoad()


def fleet(
    bounds: Mapping[Role, Bounds] | None = None,
    hysteresis: Hysteresis = HYSTERESIS,
    cold_start_s_max: float | None = None,
) -> FleetSettings:
    workers = (worker("prefill-0", "prefill"), worker("decode-0", "decode"))
    return FleetSettings(
        workers=workers, bounds=bounds or {}, hysteresis=hysteresis, cold_start_s_max=cold_start_s_max
    )


@dataclass
class FakeCluster:
    """A cluster and its router: workers are ready immediately and report the load that the test sets."""

    workers: dict[str, WorkerStatus] = field(default_factory=dict[str, WorkerStatus])
    load: WorkerLoad = field(default_factory=WorkerLoad)
    drained: list[str] = field(default_factory=list[str])
    forced: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])
    forgotten: list[str] = field(default_factory=list[str])  # removed after they had gone
    is_away: bool = False
    is_full: bool = False
    free: int | None = None  # workers that can still be scheduled; None: any number
    refuses_drain: frozenset[str] = frozenset()
    plan: FleetPlan = field(default_factory=FleetPlan)  # as saved last

    def save(self, plan: FleetPlan) -> None:
        self.plan = plan

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None:
        assert routers == RouterSettings()
        if self.is_full:
            raise ValueError(f"{worker.name} is taken")
        assert worker.build.endswith("fake_engine:build")
        assert worker.name not in self.workers
        self.workers[worker.name] = replace(worker_status(worker.name, worker.role), load=self.load)

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None:
        assert workers
        return None if self.free is None or len(workers) <= self.free else f"{workers[-1].name} needs a GPU"

    def remove_worker(self, name: str) -> None:
        if name not in self.workers:
            self.forgotten.append(name)
            return
        assert not self.workers.pop(name).load.running_rows
        self.removed.append(name)

    async def status(self) -> FleetStatus:
        if self.is_away:
            raise Unserved("no answer from the router")
        return FleetStatus(workers=tuple(self.workers.values()))

    async def carry_out(self, order: Drain | SetRole) -> None:
        if order.worker not in self.workers:
            raise RequestError(f"there is no worker {order.worker}")
        if isinstance(order, SetRole):
            self.change(order.worker, order.role)
            return
        assert order.drain
        if order.force:
            self.forced.append(order.worker)
        elif order.worker in self.refuses_drain:
            raise RequestError("no other worker does its work")
        self.drained.append(order.worker)
        self.change(order.worker, state="draining")

    def restart(self, name: str, role: Role) -> None:
        """Let a new process take the place of a worker; it has the role of its start."""
        row = self.workers[name]
        info = replace(row.info, worker=WorkerId(f"{row.info.worker}x"), role=role)
        self.workers[name] = replace(row, info=info, state="ready")

    def change(self, name: str, role: Role | None = None, state: str = "ready") -> None:
        """Apply an operator command to a worker, as the router reports it."""
        row = self.workers[name]
        self.workers[name] = replace(row, info=replace(row.info, role=role or row.info.role), state=state)

    def set_load(self, load: WorkerLoad, *names: str) -> None:
        """Set the load of these workers, or of all and of those that start."""
        if not names:
            self.load = load
        for name in names or self.workers:
            self.workers[name] = replace(self.workers[name], load=load)


@dataclass
class Case:
    """A cluster of one prefill and one decode worker, which a scaler looks after."""

    fleet: FleetSettings = field(default_factory=fleet)
    cluster: FakeCluster = field(default_factory=FakeCluster)
    now_s: float = 0.0
    reports: EdgeReports = field(default_factory=EdgeReports)

    def __post_init__(self) -> None:
        for settings in self.fleet.workers:
            self.cluster.add_worker(settings, RouterSettings())
        self.cluster.save(initial_plan(self.fleet))
        self.restart_supervisor()

    def restart_supervisor(self) -> None:
        self.reports = EdgeReports()
        cluster = self.cluster
        self.scaler = Scaler(cluster, cluster, cluster.save, self.fleet, self.reports, cluster.plan)

    async def advance(self, seconds: float = LOOK_S) -> None:
        for _ in range(int(seconds / LOOK_S)):
            await self.scaler.adjust(self.now_s)
            self.now_s += LOOK_S

    async def scale(self, *, pending: bool = False, **counts: int) -> str | None:
        return await self.scaler.scale(cast("dict[Role, int]", counts), pending=pending)

    async def role(self, name: Role) -> RoleScale:
        (scale,) = [scale for scale in await self.scaler.roles() if scale.role == name]
        return scale

    def names(self, state: str = "ready") -> list[str]:
        workers = self.cluster.workers.values()
        return sorted(at.info.name for at in workers if at.info.role == "prefill" and at.state == state)


def by_load(least: int = 1, most: int = 8) -> Case:
    """Return a case whose prefill workers are scaled by load."""
    return Case(fleet({"prefill": Bounds(least=least, most=most)}))


async def test_scaler_adds_workers_under_load_and_drains_newest_first_after_it() -> None:
    case = by_load(most=3)
    case.cluster.set_load(BUSY)
    await case.advance(120)
    assert case.names() == ["prefill-0", "prefill-1", "prefill-2"]
    case.cluster.set_load(IDLE)
    await case.advance(HYSTERESIS.down_s - 60)
    assert len(case.names()) == 3
    await case.advance(3 * HYSTERESIS.down_s)
    assert case.names() == ["prefill-0"]
    assert case.cluster.drained == case.cluster.removed == ["prefill-2", "prefill-1"], "the newest first"


async def test_scaler_changes_nothing_when_router_is_away_or_refuses_drain() -> None:
    case = by_load()
    case.cluster.set_load(BUSY)
    await case.advance(60)
    names = case.names()
    assert len(names) > 1
    case.cluster.is_away = True
    await case.advance(600)
    case.cluster.is_away = False
    assert case.names() == names
    case.cluster.refuses_drain = frozenset(names)
    case.cluster.set_load(IDLE)
    await case.advance(2 * HYSTERESIS.down_s)
    assert case.names() == names


async def test_scaler_counts_worker_in_its_new_role_and_keeps_it() -> None:
    case = by_load(least=2, most=3)
    cluster = case.cluster
    await case.advance()
    assert case.names() == ["prefill-0", "prefill-1"]
    cluster.change("decode-0", "prefill")
    await case.advance(2 * HYSTERESIS.down_s)
    assert case.names() == ["decode-0", "prefill-0"], "one above the minimum: the newest left"
    cluster.change("prefill-0", "decode")
    await case.advance()
    assert case.names() == ["decode-0", "prefill-1"], "bounds apply to current roles"
    cluster.change("prefill-1", "decode")
    await case.advance()
    assert case.names() == ["decode-0", "prefill-2"]
    assert cluster.drained == ["prefill-1"]


async def test_scaler_keeps_workers_that_an_operator_moved_to_role() -> None:
    case = by_load(most=1)
    case.cluster.change("decode-0", "prefill")
    case.cluster.set_load(BUSY, "prefill-0")
    await case.advance()
    assert case.cluster.drained == ["prefill-0"], "not the one that an operator moved"
    hidden, case.cluster.workers = case.cluster.workers, {}  # a router that has just restarted
    await case.advance()
    case.cluster.workers = hidden
    await case.advance()
    assert case.cluster.drained == ["prefill-0"], "the scaler remembers the last report"


async def test_scaler_neither_counts_nor_removes_worker_drained_by_operator() -> None:
    case = by_load(least=2)
    await case.advance()
    case.cluster.change("prefill-1", state="draining")
    await case.advance(2 * HYSTERESIS.down_s)
    assert case.names() == ["prefill-0", "prefill-2"]
    assert not case.cluster.removed
    case.cluster.change("prefill-1")
    await case.advance()
    assert case.names() == ["prefill-0", "prefill-1", "prefill-2"], "an undrained worker counts"
    case.cluster.change("prefill-2", "decode", state="draining")
    await case.advance()
    del case.cluster.workers["prefill-2"]  # SIGTERM: it has gone
    await case.advance(LOOK_S * (IDLE_CHECKS - 1))
    assert not case.cluster.forgotten
    await case.advance()
    assert case.cluster.forgotten == ["prefill-2"]
    case.cluster.set_load(BUSY)
    await case.advance(60)
    assert "prefill-3" in case.names()
    assert "prefill-2" not in case.names(), "the router would make it a decode worker"


async def disturb(case: Case, rng: Random) -> None:
    """Let an operator scale, move or drain workers, a process restart or start late, the router or the
    supervisor end, or load come or go."""
    cluster = case.cluster
    name = rng.choice(sorted(cluster.workers))
    match rng.randrange(8):
        case 0:
            with suppress(RequestError, Unserved):
                await case.scale(pending=False, **{rng.choice(["prefill", "decode"]): rng.randint(1, 4)})
        case 1:
            cluster.change(name, rng.choice(get_args(Role)), state=cluster.workers[name].state)
        case 2:
            cluster.change(name, state=rng.choice(["ready", "draining"]))
        case 3:
            cluster.restart(name, cluster.plan.workers[name].started_as)
        case 4:
            cluster.is_away, cluster.is_full = rng.random() < 0.2, rng.random() < 0.2
        case 5:
            cluster.set_load(rng.choice([BUSY, STREAM, IDLE]))
        case 6:
            case.restart_supervisor()
        case _:
            row = cluster.workers.pop(name)  # the router does not know it yet
            await case.advance()
            if name in cluster.plan.workers:
                cluster.workers.setdefault(name, row)


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("seed", range(40))
async def test_fleet_becomes_what_was_ordered_whatever_happens_before(seed: int, *, scales: bool) -> None:
    """No worker with a request is removed meanwhile, and names are used again."""
    rng, case = Random(seed), by_load(most=4) if scales else Case()
    cluster = case.cluster
    for _ in range(40):
        if cluster.workers:
            await disturb(case, rng)
        await case.advance(LOOK_S * rng.randint(1, 5))
    cluster.is_away = cluster.is_full = False
    cluster.set_load(IDLE)
    for name, planned in cluster.plan.workers.items():
        if planned.state is Lifecycle.DRAINED and name in cluster.workers:
            cluster.change(name)  # operators take back their drains
    await case.advance(LOOK_S * 4)
    await case.scale(prefill=2, decode=2)
    await case.advance(LOOK_S * 4)
    roles = {name: row.info.role for name, row in cluster.workers.items()}
    assert {name: planned.role for name, planned in cluster.plan.workers.items()} == roles
    ready = Counter(row.info.role for row in cluster.workers.values() if row.state == "ready")
    assert ready["decode"] == 2
    assert 1 <= ready["prefill"] <= 4 if scales else ready["prefill"] == 2


async def test_operator_starts_and_drains_workers() -> None:
    case = Case()
    assert await case.scale(prefill=3) is None
    assert case.names() == ["prefill-0", "prefill-1", "prefill-2"]
    case.cluster.set_load(STREAM)
    case.cluster.set_load(BUSY, "prefill-1")
    await case.scale(prefill=2)
    assert case.cluster.drained == ["prefill-2"], "the newest of equally loaded workers"
    assert (await case.role("prefill")).leaving == ("prefill-2",)
    assert (await case.role("prefill")).workers == 2
    await case.advance(60)
    assert not case.cluster.removed, "it still has a stream"
    case.cluster.set_load(IDLE)
    await case.advance(LOOK_S * IDLE_CHECKS)
    assert case.cluster.removed == ["prefill-2"]
    await case.advance(2 * HYSTERESIS.down_s)
    assert case.names() == ["prefill-0", "prefill-1"], "load does not change it"
    assert await case.role("prefill") == RoleScale(role="prefill", workers=2)
    case.cluster.set_load(BUSY, "prefill-1")
    await case.scale(prefill=1)
    assert case.cluster.drained[-1] == "prefill-0", "the least loaded"


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ({"mixed": 1}, "--mixed"),
        ({"prefill": 0}, "one prefill worker has to stay"),
        ({"decode": 3, "prefill": 0}, "one prefill worker has to stay"),
        ({"prefill": 1}, "--prefill\\)"),
        ({"prefill": 5}, "--prefill-max"),
    ],
)
async def test_impossible_counts_are_refused_and_change_nothing(counts: dict[str, int], named: str) -> None:
    case = by_load(least=2, most=4)
    with pytest.raises(RequestError, match=named) as refused:
        await case.scale(pending=False, **counts)
    assert refused.value.param == "workers"
    assert len(case.cluster.workers) == 2
    assert not case.cluster.drained


async def test_unschedulable_workers_are_refused_unless_pending() -> None:
    case = Case(cluster=FakeCluster(free=1))
    with pytest.raises(RequestError, match="decode-2 needs a GPU") as refused:
        await case.scale(decode=3, prefill=1)
    assert (refused.value.status, refused.value.code) == (409, "no_place")
    assert len(case.cluster.workers) == 2, "none is started, not even the schedulable one"
    assert await case.scale(decode=3, pending=True) == "decode-2 needs a GPU"
    assert len(case.cluster.workers) == 4


async def test_scaler_without_bounds_keeps_drained_worker_that_is_gone() -> None:
    case = Case()
    await case.scale(decode=2)
    case.cluster.change("decode-1", state="draining")
    await case.advance()
    assert (await case.role("decode")).workers == 1
    gone = case.cluster.workers.pop("decode-1")
    await case.advance(10 * LOOK_S)
    assert not case.cluster.forgotten, "Ray restarts it"
    case.cluster.workers["decode-1"] = replace(gone, state="ready")
    await case.advance()
    assert (await case.role("decode")).workers == 2


async def test_operator_learns_that_the_router_is_away_or_refuses() -> None:
    case = Case()
    case.cluster.is_away = True
    with pytest.raises(Unserved):
        await case.scale(decode=2)
    case.cluster.is_away = False
    case.cluster.is_full = True
    with pytest.raises(Unserved, match="decode-1 cannot be started"):
        await case.scale(decode=2)
    case.cluster.is_full = False
    await case.scale(decode=2)
    case.cluster.refuses_drain = frozenset({"decode-0", "decode-1"})
    with pytest.raises(RequestError, match="no other worker does its work"):
        await case.scale(decode=1)
    assert (await case.role("decode")).leaving == ()


ZERO_S = 60.0
ENDS_S = LOOK_S * (IDLE_CHECKS + 1)
FIRST = ["decode-0", "prefill-0"]
FLEET = fleet({"decode": Bounds(least=1, most=4)}, Hysteresis(zero_s=ZERO_S), cold_start_s_max=300.0)


@dataclass
class ZeroCase(Case):
    """A case with one edge, which reports before each check."""

    fleet: FleetSettings = FLEET
    now_s: float = 1000.0
    num_open: int = 0

    def __post_init__(self) -> None:
        self.cluster.refuses_drain = frozenset(FIRST)  # each is the last of its role
        super().__post_init__()

    def report(self, misses: Misses = Misses()) -> None:  # noqa: B008 - frozen
        state = EdgeState(at_s=self.now_s, resets=0, open_requests=self.num_open)
        self.reports.add("edge", misses, state)

    async def advance(self, seconds: float = LOOK_S, *, serves: bool = True) -> None:
        for _ in range(int(seconds / LOOK_S)):
            if serves:
                self.report()
            await super().advance()

    def names(self, state: str = "ready") -> list[str]:
        del state
        return sorted(self.cluster.workers)


async def test_idle_fleet_ends_and_the_next_request_starts_it_under_its_old_names() -> None:
    case = ZeroCase()
    await case.advance(ZERO_S)
    assert case.names() == FIRST
    assert not case.cluster.drained
    await case.advance(ENDS_S)
    assert sorted(case.cluster.forced) == sorted(case.cluster.removed) == FIRST
    await case.advance(10 * ZERO_S)
    assert case.names() == [], "the minimum of a role is for a fleet with requests"
    case.num_open = 1
    await case.advance()
    assert case.names() == FIRST
    await case.advance(10 * ZERO_S)
    assert case.names() == FIRST


async def test_fleet_without_the_setting_keeps_its_workers() -> None:
    case = ZeroCase(fleet({"decode": Bounds(least=1, most=4)}))
    await case.advance(20 * ZERO_S)
    await case.scaler.wake()
    assert case.names() == FIRST


async def test_short_answers_between_two_reports_and_starting_workers_count_as_use() -> None:
    case = ZeroCase()
    for _ in range(8):
        await case.advance(ZERO_S - LOOK_S)
        case.report(Misses(answered=1))
    assert case.names() == FIRST
    hidden, case.cluster.workers = case.cluster.workers, {}  # they start again, and it takes long
    await case.advance(5 * ZERO_S)
    case.cluster.workers = hidden
    await case.advance(ZERO_S - LOOK_S)
    assert not case.cluster.drained


async def test_time_without_requests_begins_when_an_edge_serves() -> None:
    """Another model of the server, or its edges, may take long to start."""
    case = ZeroCase()
    await case.advance(5 * ZERO_S, serves=False)
    await case.advance(ZERO_S - LOOK_S)
    assert not case.cluster.drained
    await case.advance(ENDS_S)
    assert case.names() == []


async def test_workers_that_are_leaving_are_gone_before_the_next_ones_start() -> None:
    """Two workers of one name or on one device would be too many."""
    case = ZeroCase()
    await case.advance(ZERO_S + LOOK_S)
    case.cluster.set_load(STREAM)
    case.num_open = 1
    await case.advance(5 * LOOK_S)
    assert case.names() == FIRST
    assert not case.cluster.removed
    case.cluster.set_load(IDLE)
    await case.advance(ENDS_S)
    assert sorted(case.cluster.removed) == FIRST
    assert case.names() == FIRST, "they are new ones"
    assert {worker.state for worker in case.cluster.workers.values()} == {"ready"}


async def test_supervisor_that_restarts_keeps_a_fleet_at_zero_until_a_server_or_a_request_comes() -> None:
    case = ZeroCase()
    await case.advance(ZERO_S + ENDS_S)
    case.restart_supervisor()
    await case.advance(5 * LOOK_S)
    assert case.names() == []
    await case.scaler.wake()
    assert case.names() == FIRST
    await case.advance(ZERO_S)
    assert case.names() == FIRST, "its time without requests begins with its start"
    await case.advance(ENDS_S)
    assert case.names() == []


def test_open_requests_of_an_edge_that_is_gone_do_not_count() -> None:
    reports = EdgeReports()
    reports.add("a", Misses(), EdgeState(at_s=0.0, resets=1, open_requests=2))
    reports.add("b", Misses(), EdgeState(at_s=2.0, resets=1, open_requests=3))
    assert reports.open_requests(2.0) == 5
    assert reports.open_requests(EDGE_SILENT_S_MAX) == 3
    assert reports.open_requests(EDGE_SILENT_S_MAX + 2.0) == 0
