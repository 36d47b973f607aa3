"""A whole cluster in virtual time: real flow, router, engines and ledgers, with faulty stores and workers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from tests.support.sim.calls import EdgeCalls, Work
from tests.support.sim.fold import VOCABULARY, Broke, FoldRunner
from tests.support.sim.watched import WatchedEngine
from tidemill.cluster.edge.failure_detector import watch
from tidemill.cluster.messages import PlacementRequest, Route
from tidemill.cluster.orders import Drain, SetRole
from tidemill.cluster.router.router import Router
from tidemill.cluster.worker.assignment import Assignment
from tidemill.cluster.worker.worker_process import LEAVE_S_MAX
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.backing import Fixed
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.kvstore.stores.page_store import PageStore
from tidemill.workers.engine.memory_plan import capacity_tokens
from tidemill.workers.execution.step import Drawn, Step
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import (
    CrashedAlone,
    Delta,
    Heartbeat,
    LostAlone,
    Produced,
    Request,
    RequestError,
    Role,
    WorkerGone,
    WorkerId,
    WorkerInfo,
)
from tidemill.workers.options import CheckpointStrategy
from tidemill.workers.scheduling.isolation import Notify
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

POISON = "poison"
"""The prefix of the ids of requests that break every step in which they draw."""

DEADLY = "deadly"
"""The prefix of the ids of requests that crash the worker in each of their steps."""

LOOK_S = 0.05
"""The time between two checks of the memory of a device."""

Answer = Callable[[], Awaitable[Delta | Produced]]


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """The faults and the sizes of a cluster. Probabilities are per message, times are virtual seconds.

    Memory is in extents: `extents_min` is the floor, `num_extents` the initial budget, and `extents_max` the
    reserved address space. `resize_s` is the mean time between two changes of a worker's budget, 0 for none.
    """

    num_extents: int
    extents_min: int
    extents_max: int
    crash: float = 0.0
    delay_s_max: float = 0.0
    step_s_max: float = 0.0
    restart_s: float = 1.0
    resize_s: float = 0.0
    strategy: CheckpointStrategy = "lazy"
    checkpoint_interval: int = 1
    checkpoints_per_path: int = 16
    policy: Policy = "value"
    prefill: int = 0
    decode: int = 0
    mixed: int = 0
    broker: bool = False  # all workers share one device, and start at their floors
    lost: float = 0.0  # of an answer to a heartbeat
    overlap: bool = True
    drafts_max: int = 0
    mtp: bool = False  # the runners make guesses
    vocabulary: int = VOCABULARY
    fault_s: float = 0.0  # mean time between two faults other than crashes; 0: none
    breaks: float = 0.0  # of a step with several rows, which would run one at a time

    @property
    def extents_at_start(self) -> int:
        return self.extents_min if self.broker else self.num_extents


class _FreezingRunner(FoldRunner):
    """A runner whose steps stop while its worker is frozen."""

    def __init__(self, worker: "SimWorker", memory: memoryview) -> None:
        world = worker.world
        super().__init__(
            world.layout,
            memory,
            world.rng,
            world.settings.step_s_max,
            world.settings.vocabulary,
            worker.breaks,
            world.settings.drafts_max * world.settings.mtp,
        )
        self.steps: list[Step] = []  # in flight
        self._awake = worker.awake

    async def _run(self, step: Step) -> list[Drawn]:
        await self._awake.wait()
        self.steps.append(step)
        try:
            drawn = await super()._run(step)
            await self._awake.wait()
            return drawn
        finally:
            self.steps.remove(step)


class SimWorker:
    """One incarnation of a worker: an engine, its step loop and its heartbeats, until it is killed."""

    def __init__(self, world: "World", name: str, role: Role) -> None:
        self.world, self.name = world, name
        self.role: Role = role
        layout = world.layout
        settings = world.settings
        backing = Fixed(layout.extent_bytes * settings.extents_max)
        memory = backing.memory.numpy().data
        arena = Arena(layout, settings.extents_max, backing, settings.extents_at_start)
        cache = Cache(layout, arena, PrefixIndex(layout, settings.policy))
        self.ledger = Ledger(cache, settings.checkpoints_per_path)
        self.awake, self.linked, self.reports = (asyncio.Event() for _ in range(3))
        for event in (self.awake, self.linked, self.reports):
            event.set()
        self.runner = _FreezingRunner(self, memory)
        self.last_steps: list[Step] = []  # in flight when it was killed
        self.engine = WatchedEngine(
            self.ledger,
            Transfer(layout, DirectIO(world.open_store(), memory)),
            self.runner,
            EngineLimits(
                budget=Budget(tokens_max=8 + layout.page_tokens, rows_max=8, page_tokens=layout.page_tokens),
                capacity_tokens=capacity_tokens(layout, settings.extents_min),
                extents_min=settings.extents_min,
                checkpoint_strategy=settings.strategy,
                checkpoint_interval=settings.checkpoint_interval,
                overlap=settings.overlap,
                drafts_max=settings.drafts_max,
                mtp=settings.mtp,
            ),
            world.root_of,
        )
        info = WorkerInfo(
            worker=WorkerId(f"{name}.{len(world.incarnations)}"),
            name=name,
            role=role,
            address=f"sim:{name}",
            pid=0,
            node="sim",
            page_tokens=layout.page_tokens,
            device="sim",
            memory_bytes=layout.extent_bytes * settings.num_extents,
            memory_floor_bytes=layout.extent_bytes * settings.extents_min,
            memory_max_bytes=layout.extent_bytes * settings.extents_max if settings.broker else 0,
        )
        self.assignment = Assignment(self.engine, info)
        self.ended = asyncio.Event()
        self._stopped = False
        self._tasks = [
            asyncio.create_task(loop)
            for loop in (self.engine.run(), self._send_heartbeats(), self._check(), self._resize())
        ]
        for task in self._tasks:
            task.add_done_callback(_fail_loudly)

    async def stop(self) -> None:
        """Stop the step loop and the heartbeats. It may be cancelled, and called again while it runs.

        The step loop is cancelled once, and settles its steps.
        """
        self.ended.set()
        if not self._stopped:
            self._stopped = True
            for task in self._tasks:
                task.cancel()
        await asyncio.wait(self._tasks)
        await self.engine.drain_publications()

    @property
    def worker_id(self) -> WorkerId:
        return self.assignment.info.worker

    async def message(self) -> None:
        """Pass a message to or from this worker when it is awake. The worker may crash then."""
        await self.awake.wait()
        if not self.ended.is_set() and self.world.rng.random() < self.world.settings.crash:
            self.world.kill(self)

    async def freeze(self, seconds: float) -> None:
        """Stop the step loop and all messages for a while. Connections stay open."""
        self.awake.clear()
        await asyncio.sleep(seconds)
        self.awake.set()

    async def leave(self) -> None:
        """Drain as after SIGTERM."""
        self.assignment.leave()
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S_MAX):
                while self.world.edge_calls.num_calls(self):  # noqa: ASYNC110  they end for many reasons
                    await asyncio.sleep(0.05)

    def breaks(self, step: Step) -> Exception | None:
        """Return the failure of a step: at random, and always when a poison request draws."""
        if any(row.sequence_id.startswith(POISON) and row.sampling_state is not None for row in step):
            return Broke(POISON)
        if not self.ended.is_set() and any(row.sequence_id.startswith(DEADLY) for row in step):
            self.world.deadly_kills += 1
            self.world.kill(self)
            return Broke(DEADLY)
        return (
            Broke("by chance")
            if len(step) > 1 and self.world.rng.random() < self.world.settings.breaks
            else None
        )

    async def _send_heartbeats(self) -> None:
        sequence, full, router = 0, True, self.world.router
        while True:
            await self.awake.wait()
            await self.reports.wait()
            await self.world.router_up.wait()
            full |= router is not self.world.router
            router = self.world.router
            heartbeat = Heartbeat(
                info=self.assignment.info,
                sequence=sequence,
                load=self.engine.load(),
                announcement=self.engine.take_announcement(full=full),
                draining=self.assignment.draining,
            )
            ack = router.heartbeat(heartbeat)
            budget_bytes = ack.budget_bytes
            if self.world.broker is not None:
                assert budget_bytes is None
                budget_bytes = self.world.broker.router.budget_for(heartbeat)
            settings = self.world.settings
            is_lost = settings.lost > 0 and self.world.rng.random() < settings.lost
            full = is_lost or ack.want_full
            if not is_lost:
                self.assignment.apply(ack)
                if budget_bytes is not None:
                    self.engine.resize(budget_bytes)
            sequence += 1
            await asyncio.sleep(self.world.rng.random())

    async def _check(self) -> None:
        while True:
            self.ledger.check()
            await asyncio.sleep(self.world.rng.random())

    async def _resize(self) -> None:
        """Change the budget at random, often to the floor, while requests run."""
        rng, settings = self.world.rng, self.world.settings
        while settings.resize_s:
            await asyncio.sleep(2 * rng.random() * settings.resize_s)
            extents = rng.choice([0, rng.randrange(settings.extents_max + 2)])
            self.engine.resize(extents * self.world.layout.extent_bytes)
            assert settings.extents_min <= self.ledger.budget_extents <= settings.extents_max


def _fail_loudly(task: asyncio.Task[None]) -> None:
    """Fail the run (see simulate): a step loop that raises is a bug under any fault."""
    if not task.cancelled() and task.exception() is not None:
        task.get_loop().call_exception_handler(
            {"message": "a worker task failed", "exception": task.exception()}
        )


class World:
    """The cluster, with the calls of the flow to a router and to workers."""

    def __init__(
        self,
        rng: Random,
        settings: WorldSettings,
        open_store: Callable[[], PageStore],
        layout: Layout,
        model: str = "fold",
        broker: "World | None" = None,
    ) -> None:
        """`open_store` is called by each incarnation of each worker.

        The router of `broker`, a world on the same device, sets the budgets of this one, too.
        """
        self.rng, self.settings, self.open_store, self.layout = rng, settings, open_store, layout
        self.model, self.broker = model, broker
        self.sharing = [self] if broker is None else broker.sharing
        if broker is not None:
            self.sharing.append(self)
        self.router = Router(asyncio.get_running_loop().time, has_budgets=broker is None)
        self.router_up, self.router_ended = asyncio.Event(), asyncio.Event()
        self.router_up.set()
        self.edge_calls = EdgeCalls(rng, settings.delay_s_max, self._later)
        self.kills = 0
        self.deadly_kills = 0
        self._background: set[asyncio.Task[None]] = set()
        self.workers: dict[str, SimWorker] = {}
        self.incarnations: list[SimWorker] = []
        counts: dict[Role, int] = {
            "prefill": settings.prefill,
            "decode": settings.decode,
            "mixed": settings.mixed,
        }
        for role, count in counts.items():
            for index in range(count):
                self._start(f"{model}-{role}-{index}", role)
        self._later(self._tick())
        self._later(self._faults())
        self._later(watch(self.edge_calls, self))
        if settings.broker and broker is None:
            self._later(self._check_memory())

    def root_of(self, salt: str) -> PageKey:
        return Namespace(model=self.model, layout=self.layout.describe(), salt=salt).root()

    @property
    def total_bytes(self) -> int:
        return len(self.workers) * self.settings.num_extents * self.layout.extent_bytes

    def mapped_bytes(self) -> int:
        running = [worker for worker in self.workers.values() if not worker.ended.is_set()]
        memory = [worker.engine.load().memory for worker in running]
        return sum(sum(by_use.values()) - by_use["unmapped"] for by_use in memory)

    def kill(self, worker: SimWorker) -> None:
        """Kill a worker as with SIGKILL. It is restarted later."""
        if worker.ended.is_set():
            return
        self.kills += 1
        worker.last_steps = list(worker.runner.steps)
        worker.ended.set()
        self._later(self._restart(worker))

    async def place(self, request: PlacementRequest) -> Route:
        """Place a request, again when the router restarts meanwhile."""
        while True:
            await self.router_up.wait()
            placed = asyncio.create_task(self.router.place(request))
            ended = asyncio.create_task(self.router_ended.wait())
            try:
                await asyncio.wait({placed, ended}, return_when=asyncio.FIRST_COMPLETED)
                if placed.done():
                    return placed.result()
            finally:
                placed.cancel()
                ended.cancel()
                await asyncio.wait({placed, ended})

    async def report_lost(self, worker: WorkerId, blamed: bytes = b"") -> None:
        await self.router_up.wait()
        self.router.report_lost(worker, blamed)

    async def produce(self, worker: WorkerId, address: str, request: Request) -> Produced:
        peer = self._at(worker, address)

        async def work(_: Callable[[Delta], None], notify: Notify) -> Produced:
            return await peer.engine.produce(request, notify)

        try:
            async with self._calling(peer, work) as answer:
                produced = await answer()
        except (CrashedAlone, LostAlone):
            self._check_blame(peer, request)
            raise
        assert isinstance(produced, Produced)
        return produced

    async def prefetch(self, worker: WorkerId, address: str, request: Request) -> None:
        peer = self._at(worker, address)

        async def work(_: Callable[[Delta], None], __: Notify) -> Produced:
            return await peer.engine.prefetch(request)

        async with self._calling(peer, work) as answer:
            await answer()

    async def stream(self, worker: WorkerId, address: str, request: Request, emit: Emit[Delta]) -> None:
        peer = self._at(worker, address)

        async def work(put: Callable[[Delta], None], notify: Notify) -> None:
            await peer.engine.stream(request, put, notify)

        try:
            async with self._calling(peer, work) as answer:
                while True:
                    delta = await answer()
                    assert isinstance(delta, Delta)
                    pause = emit(delta)
                    if pause is not None:
                        await pause()
                    if delta.finish is not None:
                        return
        except (CrashedAlone, LostAlone):
            self._check_blame(peer, request)
            raise

    async def silent_workers(self, workers: Collection[WorkerId]) -> frozenset[WorkerId]:
        return self.router.silent_workers(workers) if self.router_up.is_set() else frozenset()

    async def stop(self) -> None:
        for worker in self.incarnations:
            worker.awake.set()
        for task in self._background:
            task.cancel()
        for worker in self.workers.values():
            await worker.stop()
        await self.edge_calls.stop()

    def _start(self, name: str, role: Role) -> None:
        self.workers[name] = SimWorker(self, name, role)
        self.incarnations.append(self.workers[name])

    def _at(self, worker: WorkerId, address: str) -> SimWorker:
        found = self.workers.get(address.removeprefix("sim:"))
        if found is None or found.worker_id != worker:
            raise WorkerGone(worker)
        return found

    @asynccontextmanager
    async def _calling(self, peer: SimWorker, work: Work) -> AsyncGenerator[Answer]:
        await asyncio.sleep(self.rng.random() * self.settings.delay_s_max)
        if peer.ended.is_set():
            raise WorkerGone(peer.worker_id)
        async with self.edge_calls.call(peer, work) as answer:
            yield answer

    def _check_blame(self, peer: SimWorker, request: Request) -> None:
        """Check that a request blamed for a crash was alone in the steps of the worker."""
        assert request.on_trial
        for step in peer.last_steps if peer.ended.is_set() else peer.runner.steps:
            assert [row.sequence_id.rpartition("#")[0] for row in step] == [request.request_id]

    async def _check_memory(self) -> None:
        while True:
            mapped = sum(world.mapped_bytes() for world in self.sharing)
            assert mapped <= sum(world.total_bytes for world in self.sharing)
            await asyncio.sleep(LOOK_S)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_fail_loudly)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _restart(self, worker: SimWorker) -> None:
        await worker.stop()
        await asyncio.sleep(self.settings.restart_s)
        self._start(worker.name, worker.role)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.25)
            self.router.tick()

    async def _faults(self) -> None:
        """Make one fault after the other at random times."""
        rng = self.rng
        while self.settings.fault_s:
            await asyncio.sleep(2 * rng.random() * self.settings.fault_s)
            await rng.choice(
                [
                    self._freeze,
                    self._cut,
                    self._stop_reports,
                    self._restart_router,
                    self._drain,
                    self._change_role,
                ]
            )()

    def _any(self) -> SimWorker:
        return self.rng.choice(list(self.workers.values()))

    async def _freeze(self) -> None:
        self._later(self._any().freeze(self.rng.choice([0.5, 5.0, 20.0])))

    async def _cut(self) -> None:
        self._later(self.edge_calls.cut(self._any(), self.rng.choice([0.5, 5.0, 10.0])))

    async def _stop_reports(self) -> None:
        worker = self._any()

        async def pause() -> None:
            worker.reports.clear()
            await asyncio.sleep(self.rng.choice([0.5, 5.0, 10.0]))
            worker.reports.set()

        self._later(pause())

    async def _restart_router(self) -> None:
        self.router_up.clear()
        self.router_ended.set()
        await asyncio.sleep(self.rng.random() * 3)
        self.router = Router(asyncio.get_running_loop().time)
        self.router_ended = asyncio.Event()
        self.router_up.set()

    async def _drain(self) -> None:
        """Drain by an operator, who undoes it, or by SIGTERM with a restart."""
        worker = self._any()
        if self.rng.random() < 0.5:

            async def leave() -> None:
                await worker.leave()
                if not worker.ended.is_set():
                    worker.ended.set()
                    await self._restart(worker)

            self._later(leave())
            return
        with suppress(RequestError):
            self.router.carry_out(Drain(worker.name, force=self.rng.random() < 0.2))
            await asyncio.sleep(self.rng.random() * 10)
        with suppress(RequestError):
            self.router.carry_out(Drain(worker.name, drain=False))

    async def _change_role(self) -> None:
        with suppress(RequestError):
            self.router.carry_out(SetRole(self._any().name, self.rng.choice(["prefill", "decode", "mixed"])))
