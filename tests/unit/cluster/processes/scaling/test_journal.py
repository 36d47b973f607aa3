"""The journal over random orders, crashes and concurrent supervisors, and a scaler that resumes from it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.loops import run_by
from tests.unit.cluster.processes.scaling.test_scaler import FakeCluster, fleet
from tidemill.cluster.processes.scaling.autoscaling import EdgeReports
from tidemill.cluster.processes.scaling.journal import (
    ClusterPlan,
    Fenced,
    FleetPlan,
    Journal,
    Lifecycle,
    initial_plan,
)
from tidemill.cluster.processes.scaling.scaler import Scaler
from tidemill.cluster.settings import RouterSettings, WorkerSettings
from tidemill.workers.messages import Role

STEPS_MAX = 30
DEPTH_MAX = 2


class Crash(Exception):
    """The end of a supervisor's process."""


@dataclass
class Store:
    """A store in memory; `before` runs before each operation."""

    values: dict[str, bytes] = field(default_factory=dict[str, bytes])
    before: Callable[[], None] = lambda: None

    def put_new(self, key: str, value: bytes) -> bool:
        self.before()
        return self.values.setdefault(key, value) is value

    def get(self, key: str) -> bytes | None:
        self.before()
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.before()
        self.values.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        self.before()
        return [key for key in self.values if key.startswith(prefix)]


@dataclass
class Supervisor:
    """A user of the journal: the names of routers in its plan are the orders that led to it."""

    journal: Journal
    plan: ClusterPlan = field(default_factory=ClusterPlan)


class World:
    """Supervisors of which any may open the journal, write and end while another one is about to."""

    def __init__(self, data: st.DataObject) -> None:
        self.store = Store(before=self.interfere)
        self.acted: list[str] = []
        self._data = data
        self._supervisors: list[Supervisor] = []
        self._depth = 0
        self._orders = 0

    def step(self) -> None:
        self._depth += 1
        try:
            if not self._supervisors or self._data.draw(st.booleans(), "open"):
                opened = Supervisor(Journal(self.store, "space"))
                opened.plan = opened.journal.open()
                self._supervisors.append(opened)
            else:
                self._write(self._data.draw(st.sampled_from(self._supervisors), "writer"))
        except Crash:
            pass
        finally:
            self._depth -= 1

    def interfere(self) -> None:
        if self._depth > DEPTH_MAX:
            return
        match self._data.draw(st.sampled_from(["go on", "go on", "go on", "step", "crash"]), "meanwhile"):
            case "step":
                self.step()
            case "crash":
                raise Crash
            case _:
                pass

    def _write(self, writer: Supervisor) -> None:
        self._supervisors.remove(writer)  # back if its write succeeds
        self._orders += 1
        order = str(self._orders)
        plan = replace(writer.plan, routers=(*writer.plan.routers, order))
        try:
            writer.journal.write(plan)
        except Fenced:
            return
        self.acted.append(order)
        writer.plan = plan
        self._supervisors.append(writer)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_orders_that_were_acted_on_are_in_every_later_plan(data: st.DataObject) -> None:
    """Crash anywhere, and replace a supervisor in the middle of an order."""
    world = World(data)
    for _ in range(data.draw(st.integers(1, STEPS_MAX), "steps")):
        world.step()
    world.store.before = lambda: None
    assert set(world.acted) <= set(Journal(world.store, "space").open().routers)


def test_replaced_supervisor_cannot_write() -> None:
    store = Store()
    first, second = Journal(store, "space"), Journal(store, "space")
    first.open()
    first.write(ClusterPlan(server="a"))
    assert second.open() == ClusterPlan(server="a")
    with pytest.raises(Fenced):
        first.write(ClusterPlan(server="b"))
    for _ in range(3):  # the number that the first one would use is free again
        second.write(ClusterPlan(server="c"))
        with pytest.raises(Fenced):
            first.write(ClusterPlan(server="b"))
    assert Journal(store, "space").open() == ClusterPlan(server="c")
    assert len(store.values) == 1, "earlier entries are removed"
    assert Journal(store, "other").open() == ClusterPlan(), "a namespace has its own"


@dataclass
class CrashingCluster(FakeCluster):
    """A cluster whose supervisor may end before or after each of its acts."""

    crashes: Callable[[], bool] = lambda: False

    def _may_crash(self) -> None:
        if self.crashes():
            raise Crash

    def save(self, plan: FleetPlan) -> None:
        self._may_crash()
        super().save(plan)
        self._may_crash()

    def add_worker(self, worker: WorkerSettings, routers: RouterSettings) -> None:
        self._may_crash()
        planned = self.plan.workers[worker.name]
        assert not planned.created, "it was written to the journal first"
        if worker.name not in self.workers:  # Ray finds it by its name
            super().add_worker(worker, routers)
        self._may_crash()

    def remove_worker(self, name: str) -> None:
        self._may_crash()
        assert self.plan.workers[name].state is not Lifecycle.SERVING, "it was written to the journal first"
        super().remove_worker(name)
        self._may_crash()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
@run_by(asyncio.run)
async def test_resumed_scaler_does_what_the_journal_has(seed: int) -> None:
    """In the end as many workers run as were ordered last, whichever act a crash interrupted."""
    rng = Random(seed)  # draws of threads are no draws of hypothesis
    cluster = CrashingCluster(plan=initial_plan(fleet()))

    def started() -> Scaler:
        return Scaler(cluster, cluster, cluster.save, fleet(), EdgeReports(), cluster.plan)

    scaler, now_s = started(), 0.0
    for _ in range(rng.randint(1, 8)):
        counts: dict[Role, int] = {"decode": rng.randint(1, 4)}
        cluster.crashes = lambda: rng.random() < 0.1
        try:
            await scaler.start()
            await scaler.scale(counts, pending=False)
            await scaler.adjust(now_s)
        except Crash:
            scaler = started()
        now_s += 1.0
    cluster.crashes = lambda: False
    scaler = started()
    await scaler.start()
    await scaler.scale({"decode": 3}, pending=False)
    for _ in range(4):
        await scaler.adjust(now_s)
    states = {name: worker.state for name, worker in cluster.plan.workers.items()}
    assert set(states.values()) == {Lifecycle.SERVING}
    assert states.keys() == cluster.workers.keys(), "the plan is what runs"
    assert sum(name.startswith("decode") for name in states) == 3
