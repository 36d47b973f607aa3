"""A whole cluster in virtual time: real flow, router, engines and ledgers; a faulty store, faulty workers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from tests.sim.fold import VOCABULARY, Broke, FoldRunner
from tests.sim.watched import WatchedEngine
from tidemill.cluster.placement import Ask, Route
from tidemill.cluster.router import Router
from tidemill.kvstore.arena import Arena
from tidemill.kvstore.backing import Fixed
from tidemill.kvstore.cache import Cache
from tidemill.kvstore.index import PrefixIndex
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.ledger import Ledger
from tidemill.kvstore.store import PageStore
from tidemill.kvstore.worth import Policy
from tidemill.workers.build import capacity_tokens
from tidemill.workers.limits import Limits
from tidemill.workers.messages import (
    Delta,
    Heartbeat,
    Produced,
    Request,
    Role,
    WorkerGone,
    WorkerId,
    WorkerInfo,
)
from tidemill.workers.places import Direct
from tidemill.workers.plan import Budget
from tidemill.workers.settings import CheckpointStrategy
from tidemill.workers.step import Step
from tidemill.workers.transfer import Transfer

T = TypeVar("T")

POISON = "poison"
"""How the names of requests begin that break every step in which they draw."""


@dataclass(frozen=True, kw_only=True)
class Weather:
    """How bad it gets, and how tight. Probabilities are per message; times are virtual seconds.

    Memory in extents: `extents_min` is the floor, `num_extents` the budget at the start, `extents_max` what
    is reserved; `resize_s` is the mean time between two changes of the budget of a worker, 0 for none.
    """

    crash: float
    delay_s_max: float
    step_s_max: float
    restart_s: float
    num_extents: int
    extents_min: int
    extents_max: int
    resize_s: float
    strategy: CheckpointStrategy
    checkpoint_interval: int
    checkpoints_per_path: int
    policy: Policy
    prefill: int
    decode: int
    mixed: int
    broker: bool = False  # all workers share one device, and start at their floors
    overlap: bool = True
    drafts_max: int = 0
    vocabulary: int = VOCABULARY
    breaks: float = 0.0  # of a step with several rows: each of them alone would not have broken it


class SimWorker:
    """One life of a worker: an engine, its step loop and its heartbeats, until it is killed."""

    def __init__(self, world: "World", name: str, role: Role) -> None:
        self.world, self.name = world, name
        layout = world.layout
        weather = world.weather
        backing = Fixed(layout.extent_bytes * weather.extents_max)
        memory = backing.memory.numpy().data
        start = weather.extents_min if weather.broker else weather.num_extents
        arena = Arena(layout, weather.extents_max, backing, start)
        cache = Cache(layout, arena, PrefixIndex(layout, weather.policy))
        self.ledger = Ledger(cache, weather.checkpoints_per_path)
        self.engine = WatchedEngine(
            self.ledger,
            Transfer(layout, Direct(world.open_store(), memory)),
            FoldRunner(layout, memory, world.rng, weather.step_s_max, weather.vocabulary, self._breaks),
            Limits(
                budget=Budget(tokens_max=8 + layout.page_tokens, rows_max=8, page_tokens=layout.page_tokens),
                capacity_tokens=capacity_tokens(layout, weather.extents_min),
                extents_min=weather.extents_min,
                checkpoint_strategy=weather.strategy,
                checkpoint_interval=weather.checkpoint_interval,
                overlap=weather.overlap,
                drafts_max=weather.drafts_max,
            ),
            world.root_of,
        )
        self.info = WorkerInfo(
            worker=WorkerId(f"{name}.{world.next_life()}"),
            name=name,
            role=role,
            address=f"sim:{name}",
            pid=0,
            node="sim",
            page_tokens=layout.page_tokens,
            device="sim",
            memory_bytes=layout.extent_bytes * weather.num_extents,
            memory_floor_bytes=layout.extent_bytes * weather.extents_min,
            memory_max_bytes=layout.extent_bytes * weather.extents_max if weather.broker else 0,
        )
        self.dead = asyncio.Event()
        self._told = False
        self._tasks = [
            asyncio.create_task(life)
            for life in (self.engine.run(), self._beat(), self._check(), self._breathe())
        ]
        for task in self._tasks:
            task.add_done_callback(_fail_loudly)

    async def stop(self) -> None:
        """End the life: the step loop and the heartbeats stop where they are. May be called again while it
        is at it, and cancelled: the step loop is told once, and settles its steps."""
        self.dead.set()
        if not self._told:
            self._told = True
            for task in self._tasks:
                task.cancel()
        await asyncio.wait(self._tasks)
        await self.engine.drain_publications()

    async def step(self) -> None:
        """A message to or from this worker passes, or the worker dies."""
        await asyncio.sleep(self.world.rng.random() * self.world.weather.delay_s_max)
        if not self.dead.is_set() and self.world.rng.random() < self.world.weather.crash:
            self.world.kill(self)
        if self.dead.is_set():
            raise WorkerGone(self.info.worker)

    def _breaks(self, step: Step) -> Exception | None:
        """By chance, and always when a poison request goes beyond its prompt."""
        if any(row.sequence_id.startswith(POISON) and row.draws is not None for row in step):
            return Broke(POISON)
        return (
            Broke("by chance")
            if len(step) > 1 and self.world.rng.random() < self.world.weather.breaks
            else None
        )

    async def _beat(self) -> None:
        sequence, full = 0, True
        while True:
            announcement = self.engine.take_announcement(full=full)
            heartbeat = Heartbeat(
                info=self.info, sequence=sequence, load=self.engine.load(), announcement=announcement
            )
            ack = self.world.router.heartbeat(heartbeat)
            full = ack.want_full
            if ack.budget_bytes is not None:
                self.engine.resize(ack.budget_bytes)
            sequence += 1
            await asyncio.sleep(self.world.rng.random())

    async def _check(self) -> None:
        while True:
            self.ledger.check()
            await asyncio.sleep(self.world.rng.random())

    async def _breathe(self) -> None:
        """The budget goes down to the floor, or anywhere, and up again, while requests run."""
        rng, weather = self.world.rng, self.world.weather
        while weather.resize_s:
            await asyncio.sleep(2 * rng.random() * weather.resize_s)
            extents = rng.choice([0, rng.randrange(weather.extents_max + 2)])
            self.engine.resize(extents * self.world.layout.extent_bytes)
            assert weather.extents_min <= self.ledger.budget_extents <= weather.extents_max


def _fail_loudly(task: asyncio.Task[None]) -> None:
    """A step loop that breaks is a bug in every weather: fail the run (see simulate)."""
    if not task.cancelled() and task.exception() is not None:
        task.get_loop().call_exception_handler({"message": "a worker broke", "exception": task.exception()})


class World:
    """The cluster, and what the flow talks to: a router and peers."""

    def __init__(
        self, rng: Random, weather: Weather, open_store: Callable[[], PageStore], layout: Layout
    ) -> None:
        """`open_store`: by each life of each worker."""
        self.rng, self.weather, self.open_store, self.layout = rng, weather, open_store, layout
        self.router = Router(asyncio.get_running_loop().time)
        self.kills = 0
        self._lives = 0
        self._background: set[asyncio.Task[None]] = set()
        self.workers: dict[str, SimWorker] = {}
        self.lives: list[SimWorker] = []
        counts: dict[Role, int] = {
            "prefill": weather.prefill,
            "decode": weather.decode,
            "mixed": weather.mixed,
        }
        for role, count in counts.items():
            for index in range(count):
                self._start(f"{role}-{index}", role)
        self._later(self._tick())

    def root_of(self, salt: str) -> PageKey:
        return Namespace(model="fold", layout=self.layout.describe(), salt=salt).root()

    def next_life(self) -> int:
        self._lives += 1
        return self._lives

    def kill(self, worker: SimWorker) -> None:
        """kill -9; somebody starts it again."""
        self.kills += 1
        worker.dead.set()
        self._later(self._restart(worker))

    async def place(self, ask: Ask) -> Route:
        return await self.router.place(ask)

    async def lost(self, worker: WorkerId) -> None:
        self.router.lost(worker)

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        peer = self._at(worker, address)
        await peer.step()
        produced = await self._while_alive(peer, peer.engine.produce(request))
        await peer.step()
        return produced

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        peer = self._at(worker, address)
        await peer.step()
        await self._while_alive(peer, peer.engine.prefetch(request))
        await peer.step()

    async def generate(self, worker: WorkerId, address: str, request: Request) -> AsyncGenerator[Delta]:
        peer = self._at(worker, address)
        await peer.step()
        async with aclosing(peer.engine.generate(request)) as deltas:
            while True:
                delta = await self._while_alive(peer, anext(deltas, None))
                if delta is None:
                    return
                await peer.step()
                yield delta

    async def stop(self) -> None:
        for task in self._background:
            task.cancel()
        for worker in self.workers.values():
            await worker.stop()

    def _start(self, name: str, role: Role) -> None:
        self.workers[name] = SimWorker(self, name, role)
        self.lives.append(self.workers[name])

    def _at(self, worker: WorkerId, address: str) -> SimWorker:
        found = self.workers.get(address.removeprefix("sim:"))
        if found is None or found.info.worker != worker:
            raise WorkerGone(worker)
        return found

    async def _while_alive(self, peer: SimWorker, call: Awaitable[T]) -> T:
        """The answer of a call on `peer`, or WorkerGone as soon as it dies."""
        answer, death = asyncio.ensure_future(call), asyncio.ensure_future(peer.dead.wait())
        try:
            await asyncio.wait({answer, death}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise WorkerGone(peer.info.worker)
            return answer.result()
        finally:
            death.cancel()
            answer.cancel()
            await asyncio.wait({answer, death})

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _restart(self, worker: SimWorker) -> None:
        await worker.stop()
        await asyncio.sleep(self.weather.restart_s)
        self._start(worker.name, worker.info.role)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self.router.tick()
