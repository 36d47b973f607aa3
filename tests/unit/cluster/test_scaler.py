"""The scaler does what autoscale.py decides: it starts workers, and removes them when they are empty."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.unit.cluster.fake_service import worker_status
from tidemill.cluster.autoscale import DOWN_S, Bounds, Misses
from tidemill.cluster.scaler import IDLE_LOOKS, LOOK_S, Scaler
from tidemill.cluster.service import FleetStatus, WorkerStatus
from tidemill.cluster.settings import WorkerSettings
from tidemill.workers.messages import RequestError, Role, Unserved, WorkerLoad
from tidemill.workers.settings import EngineSettings

ENGINE = EngineSettings(
    model_folder=Path("none"), memory_bytes=0, store_url="memory:", cache_folder=Path("none")
)


def settings_of(name: str, role: Role) -> WorkerSettings:
    return WorkerSettings(name=name, role=role, engine=ENGINE, build="somebody's:own")


@dataclass
class FakeCluster:
    """Workers that are ready at once, and do as much as they are told to have to do."""

    workers: dict[str, WorkerStatus] = field(default_factory=dict[str, WorkerStatus])
    load: WorkerLoad = field(default_factory=WorkerLoad)
    drained: list[str] = field(default_factory=list[str])
    removed: list[str] = field(default_factory=list[str])
    is_away: bool = False
    is_full: bool = False
    keeps: frozenset[str] = frozenset()  # refuse to be drained

    def add_worker(self, worker: WorkerSettings) -> None:
        if self.is_full:
            raise ValueError(f"{worker.name} is taken")
        assert worker.build == "somebody's:own"
        assert worker.name not in self.workers
        self.workers[worker.name] = replace(worker_status(worker.name, worker.role), load=self.load)

    def remove_worker(self, name: str) -> None:
        assert not self.workers.pop(name).load.running_rows
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
            self.cluster.add_worker(worker)
        bounds: dict[Role, Bounds] = {"prefill": Bounds(least=self.least, most=self.most)}
        self.scaler = Scaler(self.cluster, self.cluster, workers, bounds, Misses)

    async def looks(self, seconds: float) -> None:
        for _ in range(int(seconds / LOOK_S)):
            await self.scaler.look(self.now_s)
            self.now_s += LOOK_S

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
        await case.looks(DOWN_S - 60)
        assert len(case.names()) == 3
        await case.looks(3 * DOWN_S)
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
            await case.looks(LOOK_S)
        await case.looks(50)
        (name,) = case.cluster.drained
        assert case.names("draining") == [name], "it has a stream still"
        assert not case.cluster.removed
        case.cluster.workers[name] = replace(case.cluster.workers[name], load=CALM)
        await case.looks(LOOK_S * (IDLE_LOOKS - 1))
        assert not case.cluster.removed, "something may be on its way"
        await case.looks(LOOK_S)
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
        await case.looks(2 * DOWN_S)
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
        await case.looks(LOOK_S)
        assert case.names() == ["prefill-0", "prefill-1"]

    asyncio.run(main())
