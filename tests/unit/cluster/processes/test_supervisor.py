"""The supervisor starts, adopts or ends what its journal has; Ray is a record of the calls."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.unit.cluster.processes.scaling.test_journal import Store
from tests.unit.cluster.processes.scaling.test_scaler import fleet
from tidemill.cluster.messages import FleetStatus, Misses
from tidemill.cluster.orders import Reset
from tidemill.cluster.processes import supervisor as module
from tidemill.cluster.processes.scaling import autoscaling
from tidemill.cluster.processes.scaling.journal import ClusterPlan, FleetPlan, Journal
from tidemill.cluster.processes.supervisor import Supervisor, job_has_ended, stop_plan
from tidemill.cluster.settings import ClusterSettings, RouterSettings, StoreProgram, WorkerSettings
from tidemill.workers.messages import Unserved

NAMES = ["router", "prefill-0", "decode-0"]


@dataclass
class Actors:
    """The calls, in order."""

    added: list[str] = field(default_factory=list[str])
    adopted: list[str] = field(default_factory=list[str])
    killed: list[str] = field(default_factory=list[str])

    def add_router(self, name: str, settings: RouterSettings) -> None:
        del settings
        self.added.append(name)

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None:
        del routers
        self.added.append(worker.name)

    def add_store(self, settings: ClusterSettings, *, waits: bool) -> None:
        assert settings.programs
        self.added.append("store that waits" if waits else "store")

    def remove_store(self) -> None:
        self.killed.append("store")

    def adopt(self, name: str) -> None:
        self.adopted.append(name)

    def kill(self, name: str) -> None:
        self.killed.append(name)

    remove_worker = kill


class AwayRouter:
    """The client of routers that do not answer."""

    def __init__(self, *_: object, **__: object) -> None: ...

    async def status(self) -> FleetStatus:
        raise Unserved("there is no router")


class World:
    """A Ray whose journal outlives supervisors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        self.actors = Actors()
        self.settings = ClusterSettings(fleets=(fleet(),), namespace="space")

        fakes: dict[str, Callable[..., object]] = {
            "RayStore": lambda: self.store,
            "Actors": lambda _: self.actors,  # pyright: ignore[reportUnknownLambdaType] - a namespace
            "RouterClient": AwayRouter,
            "nodes": list,
            "start_logs": lambda _: None,  # pyright: ignore[reportUnknownLambdaType] - telemetry
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(module, name, fake)

    def run(self, server: str, until: Callable[[Supervisor], Awaitable[Any]]) -> None:
        """Run a supervisor until `until` returns; then its process ends."""
        self.actors.__init__()

        async def main() -> None:
            await until(Supervisor(self.settings, server, None))

        asyncio.run(main())

    def plan(self) -> ClusterPlan:
        return Journal(self.store, "space").open()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_supervisor_starts_the_cluster_and_its_successor_adopts_it(world: World) -> None:
    async def serves(supervisor: Supervisor) -> None:
        assert not (await supervisor.started()).served
        await supervisor.serves()

    world.run("a", serves)
    assert world.actors.added == NAMES
    assert world.plan().server == "a"
    assert all(worker.created for worker in world.plan().fleets[0].workers.values())

    async def adopts(supervisor: Supervisor) -> None:
        assert (await supervisor.started()).served

    world.run("a", adopts)
    assert world.actors.added == ["router"], "which is there, so that nothing changes"
    assert world.actors.adopted == ["prefill-0", "decode-0"]
    assert not world.actors.killed


def test_store_answers_before_the_first_worker_opens_it_and_is_adopted_later(world: World) -> None:
    world.settings = replace(world.settings, programs=(StoreProgram(name="master", arguments=()),))

    async def serves(supervisor: Supervisor) -> None:
        await supervisor.started()
        await supervisor.serves()

    world.run("a", serves)
    assert world.actors.added == ["router", "store that waits", "prefill-0", "decode-0"]
    world.run("a", lambda supervisor: supervisor.started())
    assert world.actors.added == ["router", "store"]


def test_supervisor_completes_a_start_that_was_interrupted(world: World) -> None:
    world.run("a", lambda supervisor: supervisor.started())
    plan = world.plan()
    workers = {
        name: replace(worker, created=name != "decode-0") for name, worker in plan.fleets[0].workers.items()
    }
    journal = Journal(world.store, "space")
    journal.open()
    journal.write(replace(plan, fleets=(replace(plan.fleets[0], workers=workers),)))
    world.run("a", lambda supervisor: supervisor.started())
    assert world.actors.added == ["router", "decode-0"]


def test_endpoint_that_starts_wakes_a_fleet_at_zero(world: World) -> None:
    world.settings = replace(
        world.settings, fleets=(replace(world.settings.fleets[0], cold_start_s_max=60.0),)
    )
    world.run("a", lambda supervisor: supervisor.started())
    journal = Journal(world.store, "space")
    journal.write(replace(journal.open(), served=True, fleets=(FleetPlan(),)))

    async def only_runs(supervisor: Supervisor) -> None:
        await supervisor.report("router", "a", Misses(), 0)

    world.run("a", only_runs)
    assert world.actors.added == ["router"]
    world.run("a", lambda supervisor: supervisor.started())
    assert world.actors.added == NAMES


def test_supervisor_of_a_stopped_cluster_ends_it(world: World) -> None:
    world.run("a", lambda supervisor: supervisor.started())
    assert stop_plan("space").stopped

    async def waits(supervisor: Supervisor) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.started(), 0.2)

    world.run("a", waits)
    assert world.actors.killed == ["prefill-0", "decode-0", "router", "store", "supervisor"]
    assert not world.actors.added
    world.run("b", lambda supervisor: supervisor.started())
    assert world.actors.added == NAMES, "the next server starts"
    assert not world.actors.killed


def test_next_server_removes_what_one_without_an_end_has_left(world: World) -> None:
    world.run("a", lambda supervisor: supervisor.started())
    world.run("b", lambda supervisor: supervisor.started())
    assert world.actors.killed == ["prefill-0", "decode-0", "router", "store"]
    assert world.actors.added == NAMES
    assert world.plan().server == "b"


def test_lease_is_that_of_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"JobID": "01", "IsDead": True}, {"JobID": "02", "IsDead": False}]
    monkeypatch.setattr(module, "jobs", lambda: rows)
    assert [job_has_ended(job) for job in ("01", "02", "03")] == [True, False, False]


def test_reports_of_all_edges_reach_the_autoscaler(world: World) -> None:
    async def reports(supervisor: Supervisor) -> None:
        await supervisor.report("router", "a", Misses(answered=3, late=1), 0)
        await supervisor.report("router", "b", Misses(answered=2, refused=4), 0)
        assert supervisor.misses("router") == Misses(answered=5, late=1, refused=4)

    world.run("a", reports)


def test_reset_is_done_when_every_edge_knows_it_and_outlives_the_supervisor(world: World) -> None:
    async def resets(supervisor: Supervisor) -> None:
        await supervisor.report("router", "a", Misses(), 0)
        await supervisor.report("router", "b", Misses(), 0)
        reset = asyncio.create_task(supervisor.carry_out("router", Reset("a")))
        while await supervisor.report("router", "a", Misses(), 0) == 0:  # noqa: ASYNC110 - a thread writes
            await asyncio.sleep(0.01)
        assert not reset.done(), "b does not know it yet"
        assert await supervisor.report("router", "b", Misses(), 0) == 1
        assert not reset.done()
        assert await supervisor.report("router", "b", Misses(), 1) == 1
        assert await reset == 1

    world.run("a", resets)

    async def still_counts(supervisor: Supervisor) -> None:
        assert await supervisor.report("router", "a", Misses(), 1) == 1
        assert await supervisor.carry_out("router", Reset("a")) == 2

    world.run("a", still_counts)


def test_reset_does_not_wait_for_an_edge_that_is_gone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "EDGE_SILENT_S_MAX", 0.2)

    async def resets(supervisor: Supervisor) -> None:
        await supervisor.report("router", "gone", Misses(), 0)
        assert await supervisor.carry_out("router", Reset("a")) == 1

    world.run("a", resets)
