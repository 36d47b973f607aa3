"""Memory shared by several workers in virtual time: through the flow, and with two models on a device."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from random import Random

import pytest

from tests.support.sim.faulty_store import FaultyStore
from tests.support.sim.fold import VOCABULARY, FoldRunner, expected, fold_layout
from tests.support.sim.loop import simulate
from tests.support.sim.world import World, WorldSettings
from tidemill.cluster.edge.flow import serve
from tidemill.cluster.router.router import Router
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.engine.engine import Engine
from tidemill.workers.engine.memory_plan import extents_for
from tidemill.workers.messages import (
    EngineInfo,
    Heartbeat,
    Poisonous,
    Request,
    Sampling,
    WorkerId,
    WorkerInfo,
)
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

VIRTUAL_S_MAX = 36_000.0
LONGEST = 60
LOOK_S = 0.05


def mapped_bytes(memory: Mapping[str, int]) -> int:
    return sum(memory.values()) - memory["unmapped"]


@pytest.mark.parametrize("seed", range(12))
def test_prefill_and_decode_workers_share_the_memory_of_a_device(seed: int) -> None:
    """Long prompts and long answers alternate, with crashes. Every stream is exact, and the workers never map
    more than the memory of the device."""
    rng = Random(seed)
    layout = fold_layout(rng.choice([1, 4]), hybrid=rng.random() < 0.8, extent_bytes_min=256)
    floor = extents_for(layout, LONGEST + 40)
    share = floor * rng.choice([1, 2, 4])
    settings = WorldSettings(
        crash=rng.choice([0, 0, 0.005]),
        delay_s_max=0.01,
        step_s_max=0.05,
        restart_s=2.0,
        num_extents=share,
        extents_min=floor,
        extents_max=2 * share,
        resize_s=0,
        strategy="lazy",
        checkpoint_interval=1,
        checkpoints_per_path=16,
        policy="value",
        prefill=1,
        decode=1,
        mixed=0,
        broker=True,
    )

    async def main() -> None:
        store = FaultyStore(rng, drop=0, evict=0, corrupt=0, refuse=0, delay_s_max=0.01)
        world = World(rng, settings, lambda: store, layout)
        watch = asyncio.create_task(_check_mapped(world, 2 * share * layout.extent_bytes))
        try:
            async with asyncio.timeout(VIRTUAL_S_MAX):
                for step in range(4):
                    async with asyncio.TaskGroup() as clients:
                        for index in range(6):
                            clients.create_task(_stream(world, rng, f"{step}.{index}", long=step % 2 == 0))
        finally:
            watch.cancel()
            await world.stop()
        with suppress(asyncio.CancelledError):
            await watch

    simulate(seed, main())


async def _check_mapped(world: World, total_bytes: int) -> None:
    while True:
        running = [worker for worker in world.workers.values() if not worker.ended.is_set()]
        mapped = sum(mapped_bytes(worker.engine.load().memory) for worker in running)
        assert mapped <= total_bytes
        await asyncio.sleep(LOOK_S)


async def _stream(world: World, rng: Random, name: str, *, long: bool) -> None:
    num_tokens, max_new_tokens = (LONGEST, 4) if long else (4, 40)
    request = Request(
        request_id=name,
        tokens=tuple(rng.randrange(VOCABULARY) for _ in range(num_tokens)),
        max_new_tokens=max_new_tokens,
        sampling=Sampling(seed=1),
    )
    got: list[int] = []
    want = expected(request, hybrid=world.layout.has_states, window=world.layout.window_tokens)
    with suppress(Poisonous):  # a second worker was lost while it ran only this request
        await serve(
            request,
            world,
            world,
            world.root_of,
            EngineInfo(page_tokens=world.layout.page_tokens),
            lambda piece: got.extend(piece.tokens),
        )
        assert got == want
    assert got == want[: len(got)]


@dataclass(frozen=True)
class Model:
    """One of the models on a device, with its own layout and router and an equal share of the memory.

    `broker` is the router that sets the budgets.
    """

    name: str
    layout: Layout
    share_bytes: int
    router: Router
    broker: Router
    store: MemoryStore

    def extents(self, num_bytes: int) -> int:
        return num_bytes // self.layout.extent_bytes


class DeviceWorker:
    """The worker of a model, which reports to its router and to the broker. Any answer may be lost."""

    def __init__(self, model: Model, rng: Random, loss: float) -> None:
        layout = model.layout
        floor, most = extents_for(layout, LONGEST), model.extents(2 * model.share_bytes)
        backing = Fixed(layout.extent_bytes * most)
        memory = backing.memory.numpy().data
        self.model, self._rng, self._loss = model, rng, loss
        cache = Cache(layout, Arena(layout, most, backing, floor), PrefixIndex(layout, "value"))
        self.ledger = Ledger(cache, 16)
        self.engine = Engine(
            self.ledger,
            Transfer(layout, DirectIO(model.store, memory)),
            FoldRunner(layout, memory, rng, 0.02),
            EngineLimits(
                budget=Budget(tokens_max=8 + layout.page_tokens, rows_max=8, page_tokens=layout.page_tokens),
                capacity_tokens=LONGEST,
                extents_min=floor,
            ),
            self._root_of,
        )
        self.info = WorkerInfo(
            worker=WorkerId(f"{model.name}.1"),
            name=model.name,
            role="mixed",
            address="",
            pid=0,
            node="sim",
            fingerprint=model.name,
            page_tokens=layout.page_tokens,
            device="sim",
            memory_bytes=model.share_bytes,
            memory_floor_bytes=floor * layout.extent_bytes,
            memory_max_bytes=most * layout.extent_bytes,
        )

    @property
    def budget_bytes(self) -> int:
        return self.engine.load().budget_bytes

    async def send_heartbeats(self) -> None:
        sequence, full = 0, True
        while True:
            announcement = self.engine.take_announcement(full=full)
            load = self.engine.load()
            report = Heartbeat(info=self.info, sequence=sequence, load=load, announcement=announcement)
            ack = self.model.router.heartbeat(report)
            budget = ack.budget_bytes
            if self.model.broker is not self.model.router:
                assert budget is None
                budget = self.model.broker.budget_for(report)
            full = self._rng.random() < self._loss or ack.want_full
            if not full and budget is not None:
                self.engine.resize(budget)
            sequence += 1
            self.ledger.check()
            await asyncio.sleep(self._rng.random())

    async def check_answer(self, name: str) -> int:
        """Check an answer, and return the number of prompt tokens computed for it.

        A name has the same prompt with every model.
        """
        rng = Random(name)
        num_tokens = rng.randrange(1, LONGEST - 20)
        request = Request(
            request_id=name,
            tokens=tuple(rng.randrange(VOCABULARY) for _ in range(num_tokens)),
            max_new_tokens=rng.randrange(1, 20),
        )
        got: list[int] = []
        computed = 0
        async with aclosing(self.engine.generate(request)) as deltas:
            async for delta in deltas:
                got += delta.tokens
                computed += delta.provenance.computed_tokens if delta.provenance else 0
        assert got == expected(request, hybrid=self.model.layout.hybrid)
        return computed

    def _root_of(self, salt: str) -> PageKey:
        return Namespace(model=self.model.name, layout=self.model.layout.describe(), salt=salt).root()


@pytest.mark.parametrize("seed", range(6))
def test_two_models_share_the_memory_of_a_device(seed: int) -> None:
    """A hybrid and an attention model, with different pages and extents, alternate with the same prompts.

    The memory goes to the busy one, every answer is exact, and together they never map more than the device
    has. They share the store, but no objects in it.
    """
    rng = Random(seed)
    layouts = (
        fold_layout(rng.choice([2, 4]), hybrid=True, extent_bytes_min=1024),
        fold_layout(rng.choice([1, 16]), hybrid=False, extent_bytes_min=256),
    )
    share = max(extents_for(layout, LONGEST) * layout.extent_bytes for layout in layouts) * rng.choice([2, 4])

    async def main() -> None:
        now_s, store = asyncio.get_running_loop().time, MemoryStore(1 << 20)
        first = Router(now_s)
        routers = (first, Router(now_s, has_budgets=False))
        loss = rng.choice([0, 0.3])
        workers = [
            DeviceWorker(Model(f"model-{i}", layout, share, router, first, store), rng, loss)
            for i, (layout, router) in enumerate(zip(layouts, routers, strict=True))
        ]
        tasks = [
            asyncio.create_task(loop)
            for worker in workers
            for loop in (worker.engine.run(), worker.send_heartbeats())
        ]
        try:
            async with asyncio.timeout(VIRTUAL_S_MAX):
                for step in range(3):
                    await _load_one_model(workers, workers[step % 2], 2 * share)
                for worker, router in zip(workers, routers, strict=True):
                    assert [row.info.name for row in router.status().workers] == [worker.model.name]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for worker in workers:
            await worker.engine.drain_publications()
            assert worker.ledger.num_leases == 0
            worker.ledger.check()

    simulate(seed, main())


async def _load_one_model(workers: list[DeviceWorker], busy: DeviceWorker, total_bytes: int) -> None:
    """Load one model with more than fits, until it has most of the memory, and the other one a little."""
    other = next(worker for worker in workers if worker is not busy)
    running = {asyncio.create_task(busy.check_answer(f"r{index}")) for index in range(80)}
    running.add(asyncio.create_task(other.check_answer("r")))
    had_most = False
    while running:
        assert sum(mapped_bytes(worker.engine.load().memory) for worker in workers) <= total_bytes
        assert sum(worker.budget_bytes for worker in workers) <= total_bytes
        had_most |= busy.budget_bytes > total_bytes * 0.6
        done, running = await asyncio.wait(running, timeout=LOOK_S)
        for task in done:
            task.result()
    assert had_most


@pytest.mark.parametrize("seed", range(4))
def test_model_finds_no_pages_of_another_model_in_the_store(seed: int) -> None:
    """A worker of the same model fetches the same prompts from the store.

    A worker of another model computes every token.
    """
    rng = Random(seed)
    layout = fold_layout(rng.choice([1, 2, 4]), hybrid=rng.random() < 0.5)
    share = 64 * extents_for(layout, LONGEST) * layout.extent_bytes
    prompts = [f"p{index}" for index in range(6)]

    async def main() -> None:
        store, router = MemoryStore(1 << 20), Router(asyncio.get_running_loop().time)
        workers = [
            DeviceWorker(Model(name, layout, share, router, router, store), rng, 0.0)
            for name in ("one", "one", "two")
        ]
        tasks = [asyncio.create_task(worker.engine.run()) for worker in workers]
        computed: list[list[int]] = []
        for worker in workers:
            computed.append([await worker.check_answer(name) for name in prompts])
            await worker.engine.drain_publications()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        first, second, other = computed
        assert other == first
        assert sum(second) < sum(first)

    simulate(seed, main())
