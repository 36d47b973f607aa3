"""The scaler does what autoscale.py decides: it starts workers, and removes them when they are empty."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.cluster.fake_service import worker_status
from tidemill.cluster.messages import Bounds, FleetStatus, Hysteresis, Misses, WorkerStatus
from tidemill.cluster.settings import FleetSettings, RouterSettings, WorkerSettings
from tidemill.cluster.supervisor.scaler import IDLE_LOOKS, Scaler
from tidemill.workers.messages import RequestError, Role, Unserved, WorkerLoad
from tidemill.workers.settings import EngineSettings

ENGINE = EngineSettings(
    model_folder=Path("none"), memory_bytes=0, store_url="memory:", cache_folder=Path("none")
)

HYSTERESIS = Hysteresis()


def settings_of(name: str, role: Role) -> WorkerSettings:
    return WorkerSettings(name=name, role=role, engine=ENGINE, build="somebody's:own")


@dataclass
class FakeCluster:
    """Workers that are ready at once, and do as much as they are told to have to do."""

    workers: dict[str, WorkerStatus] = field(default_factory=dict[str, WorkerStatus])
    load: WorkerLoad = field(default_factory=WorkerLoad)
    drained: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])
    forgotten: list[str] = field(default_factory=list[str])  # removed when they had gone
    is_away: bool = False
    is_full: bool = False
    free: int | None = None  # places; None: as many as one likes
    keeps: frozenset[str] = frozenset()  # refuse to be drained

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None:
        assert routers == RouterSettings()
        if self.is_full:
            raise ValueError(f"{worker.name} is taken")
        assert worker.build == "somebody's:own"
        assert worker.name not in self.workers
        self.workers[worker.name] = replace(worker_status(worker.name, worker.role), load=self.load)

    def unschedulable_reason(self, *workers: WorkerSettings) -> str | None:
        assert workers
        return None if self.free is None or len(workers) <= self.free else f"{workers[-1].name} needs a GPU"

    def remove_worker(self, name: str) -> None:
        worker = self.workers.pop(name, None)
        if worker is None:
            self.forgotten.append(name)
            return
        assert not worker.load.running_rows
        self.removed.append(name)

    async def status(self) -> FleetStatus:
        if self.is_away:
            raise Unserved("no answer from the router")
        return FleetStatus(workers=tuple(self.workers.values()))

    async def drain(self, worker: str, *, drain: bool, force: bool = False) -> None:
        assert drain
        assert not force
        if worker in self.keeps:
            raise RequestError("nobody else does its work")
        self.drained.append(worker)
        self.workers[worker] = replace(self.workers[worker], state="draining")

    def give(self, name: str, role: Role | None = None, state: str = "ready") -> None:
        """What a person says, heard."""
        one = self.workers[name]
        info = replace(one.info, role=role or one.info.role)
        self.workers[name] = replace(one, info=info, state=state)

    def all_have(self, load: WorkerLoad) -> None:
        self.load = load
        self.workers = {name: replace(one, load=load) for name, one in self.workers.items()}


@dataclass
class Case:
    least: int = 1
    most: int = 8
    cluster: FakeCluster = field(default_factory=FakeCluster)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        workers = [settings_of("prefill-0", "prefill"), settings_of("decode-0", "decode")]
        for worker in workers:
            self.cluster.add_worker(worker, RouterSettings())
        bounds: dict[Role, Bounds] = {"prefill": Bounds(least=self.least, most=self.most)}
        fleet = FleetSettings(workers=tuple(workers), bounds=bounds, hysteresis=HYSTERESIS)
        self.scaler = Scaler(self.cluster, self.cluster, fleet, Misses)

    async def looks(self, seconds: float) -> None:
        for _ in range(int(seconds / HYSTERESIS.look_s)):
            await self.scaler.look(self.now_s)
            self.now_s += HYSTERESIS.look_s

    def names(self, state: str = "ready") -> list[str]:
        workers = self.cluster.workers.values()
        return sorted(one.info.name for one in workers if one.info.role == "prefill" and one.state == state)


BUSY = WorkerLoad(queued_tokens=100, queued_s=30.0, running_rows=1)
CALM = WorkerLoad()


def test_workers_come_with_the_load_and_go_after_it_one_by_one() -> None:
    async def main() -> None:
        case = Case(most=3)
        case.cluster.all_have(BUSY)
        await case.looks(120)
        assert case.names() == ["prefill-0", "prefill-1", "prefill-2"]
        case.cluster.all_have(CALM)
        await case.looks(HYSTERESIS.down_s - 60)
        assert len(case.names()) == 3
        await case.looks(3 * HYSTERESIS.down_s)
        assert case.names() == ["prefill-0"]
        assert case.cluster.drained == case.cluster.removed == ["prefill-2", "prefill-1"], "the newest first"

    asyncio.run(main())


def test_a_worker_is_removed_when_it_has_handed_over_all() -> None:
    async def main() -> None:
        case = Case()
        case.cluster.all_have(BUSY)
        await case.looks(60)
        count = len(case.names())
        case.cluster.all_have(WorkerLoad(running_rows=1))
        while not case.cluster.drained:
            await case.looks(HYSTERESIS.look_s)
        await case.looks(50)
        (name,) = case.cluster.drained
        assert case.names("draining") == [name], "it has a stream still"
        assert not case.cluster.removed
        case.cluster.workers[name] = replace(case.cluster.workers[name], load=CALM)
        await case.looks(HYSTERESIS.look_s * (IDLE_LOOKS - 1))
        assert not case.cluster.removed, "something may be on its way"
        await case.looks(HYSTERESIS.look_s)
        assert case.cluster.removed == [name]
        assert len(case.names()) == count - 1
        case.cluster.all_have(BUSY)
        await case.looks(120)
        assert name in case.names(), "its name is used again"

    asyncio.run(main())


def test_who_may_not_go_stays_and_an_unknown_fleet_stays_as_it_is() -> None:
    async def main() -> None:
        case = Case(least=1)
        case.cluster.all_have(BUSY)
        await case.looks(60)
        names = case.names()
        assert len(names) > 1
        case.cluster.is_away = True
        await case.looks(600)
        case.cluster.is_away = False
        assert case.names() == names
        case.cluster.keeps = frozenset(names)
        case.cluster.all_have(CALM)
        await case.looks(2 * HYSTERESIS.down_s)
        assert case.names() == names

    asyncio.run(main())


def test_a_worker_that_cannot_be_started_is_tried_again() -> None:
    async def main() -> None:
        case = Case(most=2)
        case.cluster.all_have(BUSY)
        case.cluster.is_full = True
        await case.looks(60)
        assert case.names() == ["prefill-0"]
        case.cluster.is_full = False
        await case.looks(HYSTERESIS.look_s)
        assert case.names() == ["prefill-0", "prefill-1"]

    asyncio.run(main())


def test_a_worker_that_was_given_another_role_counts_there_and_stays() -> None:
    async def main() -> None:
        case = Case(least=2, most=3)
        cluster = case.cluster
        await case.looks(HYSTERESIS.look_s)
        assert case.names() == ["prefill-0", "prefill-1"]
        cluster.give("decode-0", "prefill")
        await case.looks(2 * HYSTERESIS.down_s)
        assert case.names() == ["decode-0", "prefill-0"], "one more than the least, and so the newest went"
        cluster.give("prefill-0", "decode")
        await case.looks(HYSTERESIS.look_s)
        assert case.names() == ["decode-0", "prefill-1"], "the bounds are for the roles of now"
        cluster.give("prefill-1", "decode")
        await case.looks(HYSTERESIS.look_s)
        assert case.names() == ["decode-0", "prefill-2"]
        assert cluster.drained == ["prefill-1"]

    asyncio.run(main())


def test_too_many_of_a_role_that_a_person_made_stay() -> None:
    async def main() -> None:
        case = Case(most=1)
        case.cluster.give("decode-0", "prefill")
        case.cluster.workers["prefill-0"] = replace(case.cluster.workers["prefill-0"], load=BUSY)
        await case.looks(HYSTERESIS.look_s)
        assert case.cluster.drained == ["prefill-0"], "not the one that a person made"
        hidden, case.cluster.workers = case.cluster.workers, {}  # a router that has begun anew
        await case.looks(HYSTERESIS.look_s)
        case.cluster.workers = hidden
        await case.looks(HYSTERESIS.look_s)
        assert case.cluster.drained == ["prefill-0"], "what was heard is remembered"

    asyncio.run(main())


def test_whom_a_person_drains_does_not_count_and_is_not_removed() -> None:
    async def main() -> None:
        case = Case(least=2)
        await case.looks(HYSTERESIS.look_s)
        case.cluster.give("prefill-1", state="draining")
        await case.looks(2 * HYSTERESIS.down_s)
        assert case.names() == ["prefill-0", "prefill-2"]
        assert not case.cluster.removed
        case.cluster.give("prefill-1")
        await case.looks(HYSTERESIS.look_s)
        assert case.names() == ["prefill-0", "prefill-1", "prefill-2"], "taken back: it counts again"
        case.cluster.give("prefill-2", "decode", state="draining")
        await case.looks(HYSTERESIS.look_s)
        del case.cluster.workers["prefill-2"]  # SIGTERM: it has gone
        await case.looks(HYSTERESIS.look_s * (IDLE_LOOKS - 1))
        assert not case.cluster.forgotten
        await case.looks(HYSTERESIS.look_s)
        assert case.cluster.forgotten == ["prefill-2"]
        case.cluster.all_have(BUSY)
        await case.looks(60)
        assert "prefill-3" in case.names()
        assert "prefill-2" not in case.names(), "the router would tell it to be a decode worker"

    asyncio.run(main())


def test_a_drain_that_a_person_takes_back_is_over() -> None:
    async def main() -> None:
        case = Case()
        case.cluster.all_have(BUSY)
        await case.looks(60)
        case.cluster.all_have(WorkerLoad(running_rows=1))
        while not case.cluster.drained:
            await case.looks(HYSTERESIS.look_s)
        (name,) = case.cluster.drained
        await case.looks(HYSTERESIS.look_s)
        assert name not in case.names()
        case.cluster.give(name)
        case.cluster.all_have(BUSY)
        count = len(case.names())
        await case.looks(HYSTERESIS.up_s / 2)
        assert len(case.names()) == count
        assert name in case.names()
        assert not case.cluster.removed

    asyncio.run(main())
