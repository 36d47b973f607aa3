"""The supervisor starts, adopts or ends what its journal has; Ray is a record of the calls."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from tests.unit.cluster.processes.scaling.test_journal import Store
from tests.unit.cluster.processes.scaling.test_scaler import fleet
from tidemill.cluster.messages import FleetStatus, Misses
from tidemill.cluster.orders import Reset
from tidemill.cluster.processes import supervisor as module
from tidemill.cluster.processes.scaling import autoscaling
from tidemill.cluster.processes.scaling.journal import ClusterPlan, FleetPlan, Journal
from tidemill.cluster.processes.supervisor import Supervisor, job_has_ended, stop_plan
from tidemill.cluster.settings import ClusterSettings, StoreProgram
from tidemill.workers.messages import Unserved

NAMES = ["router", "prefill-0", "decode-0"]


class AwayRouter:
    """The client of routers that do not answer."""

    def __init__(self, *_: object, **__: object) -> None: ...

    async def status(self) -> FleetStatus:
        raise Unserved("there is no router")


class World:
    """A Ray whose journal outlives supervisors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = Store()
        self.actors = Mock(unschedulable_reason=Mock(return_value=None))
        self.settings = ClusterSettings(fleets=(fleet(),), namespace="space")

        fakes: dict[str, Callable[..., object]] = {
            "RayStore": lambda: self.store,
            "Actors": lambda _: self.actors,
            "RouterClient": AwayRouter,
            "nodes": list,
            "start_logs": lambda _: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(module, name, fake)

    @asynccontextmanager
    async def run(self, server: str) -> AsyncGenerator[Supervisor]:
        """Run a supervisor for the block; then its process ends."""
        self.actors.reset_mock()
        before = asyncio.all_tasks()
        yield Supervisor(self.settings, server, None)
        left = asyncio.all_tasks() - before
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def start(self, server: str, *, serves: bool = False) -> ClusterPlan:
        async with self.run(server) as supervisor:
            plan = await supervisor.started()
            if serves:
                await supervisor.serves()
            return plan

    def _called(self, *kinds: str) -> list[str]:
        """Return the names of the actors in calls of these kinds in the last run, in order."""
        calls = (call for call in self.actors.method_calls if call[0] in kinds)
        return [_name(*call) for call in calls]

    @property
    def added(self) -> list[str]:
        return self._called("add_router", "add_worker", "add_store")

    @property
    def killed(self) -> list[str]:
        return self._called("kill", "remove_worker", "remove_store")

    @property
    def adopted(self) -> list[str]:
        return self._called("adopt")

    def plan(self) -> ClusterPlan:
        return Journal(self.store, "space").open()


def _name(kind: str, given: tuple[Any, ...], options: dict[str, object]) -> str:
    if kind.endswith("store"):
        return "store that waits" if options.get("waits") else "store"
    return given[0] if isinstance(given[0], str) else given[0].name


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_supervisor_starts_the_cluster_and_its_successor_adopts_it(world: World) -> None:
    assert not (await world.start("a", serves=True)).served
    assert world.added == NAMES
    assert world.plan().server == "a"
    assert all(worker.created for worker in world.plan().fleets[0].workers.values())
    assert (await world.start("a")).served
    assert world.added == ["router"], "which is there, so that nothing changes"
    assert world.adopted == ["prefill-0", "decode-0"]
    assert not world.killed


async def test_store_answers_before_the_first_worker_opens_it_and_is_adopted_later(world: World) -> None:
    world.settings = replace(world.settings, programs=(StoreProgram(name="master", arguments=()),))
    await world.start("a", serves=True)
    assert world.added == ["router", "store that waits", "prefill-0", "decode-0"]
    await world.start("a")
    assert world.added == ["router", "store"]


async def test_supervisor_completes_a_start_that_was_interrupted(world: World) -> None:
    await world.start("a")
    journal = Journal(world.store, "space")
    plan = journal.open()
    workers = {
        name: replace(worker, created=name != "decode-0") for name, worker in plan.fleets[0].workers.items()
    }
    journal.write(replace(plan, fleets=(replace(plan.fleets[0], workers=workers),)))
    await world.start("a")
    assert world.added == ["router", "decode-0"]


async def test_endpoint_that_starts_wakes_a_fleet_at_zero(world: World) -> None:
    [known] = world.settings.fleets
    world.settings = replace(world.settings, fleets=(replace(known, cold_start_s_max=60.0),))
    await world.start("a")
    journal = Journal(world.store, "space")
    journal.write(replace(journal.open(), served=True, fleets=(FleetPlan(),)))
    async with world.run("a") as supervisor:
        await supervisor.report("router", "a", Misses(), 0)
    assert world.added == ["router"]
    await world.start("a")
    assert world.added == NAMES


async def test_supervisor_of_a_stopped_cluster_ends_it(world: World) -> None:
    await world.start("a")
    assert stop_plan("space").stopped
    async with world.run("a") as supervisor:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.started(), 0.2)
    assert world.killed == ["prefill-0", "decode-0", "router", "store", "supervisor"]
    assert not world.added
    await world.start("b")
    assert world.added == NAMES, "the next server starts"
    assert not world.killed


async def test_next_server_removes_what_one_without_an_end_has_left(world: World) -> None:
    await world.start("a")
    await world.start("b")
    assert world.killed == ["prefill-0", "decode-0", "router", "store"]
    assert world.added == NAMES
    assert world.plan().server == "b"


def test_lease_is_that_of_its_own_job(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"JobID": "01", "IsDead": True}, {"JobID": "02", "IsDead": False}]
    monkeypatch.setattr(module, "jobs", lambda: rows)
    assert [job_has_ended(job) for job in ("01", "02", "03")] == [True, False, False]


async def test_rounds_that_fail_are_counted_for_the_metrics(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AwayRouter, "status", AsyncMock(side_effect=AssertionError("a bug")))
    async with world.run("a") as supervisor:
        before = supervisor.failed_rounds()
        await supervisor.started()
        async with asyncio.timeout(10):
            while supervisor.failed_rounds() == before:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.01)


async def test_reset_is_done_when_every_edge_knows_it_and_outlives_the_supervisor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world.run("a") as supervisor:
        await supervisor.report("router", "a", Misses(answered=3, late=1), 0)
        await supervisor.report("router", "b", Misses(answered=2, refused=4), 0)
        assert supervisor.misses("router") == Misses(answered=5, late=1, refused=4)
        reset = asyncio.create_task(supervisor.carry_out("router", Reset("a")))
        while await supervisor.report("router", "a", Misses(), 0) == 0:  # noqa: ASYNC110 - a thread writes
            await asyncio.sleep(0.01)
        assert not reset.done(), "b does not know it yet"
        assert await supervisor.report("router", "b", Misses(), 0) == 1
        assert not reset.done()
        assert await supervisor.report("router", "b", Misses(), 1) == 1
        assert await reset == 1
    async with world.run("a") as supervisor:
        assert await supervisor.report("router", "a", Misses(), 1) == 1
        assert await supervisor.carry_out("router", Reset("a")) == 2
        monkeypatch.setattr(autoscaling, "EDGE_SILENT_S_MAX", 0.2)
        await supervisor.report("router", "gone", Misses(), 0)
        assert await supervisor.carry_out("router", Reset("a")) == 3
