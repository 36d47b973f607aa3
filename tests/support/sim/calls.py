"""Calls from an edge to simulated workers over connections that delay, break and time out."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import TYPE_CHECKING

from tidemill.cluster.rpc.codec import Trial
from tidemill.cluster.rpc.worker_client import SILENCE_S_MAX
from tidemill.cluster.worker.server import FLUSH_S_MAX
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import (
    CrashedAlone,
    Delta,
    LostAlone,
    Produced,
    WorkerGone,
    WorkerId,
)
from tidemill.workers.scheduling.isolation import Notify

if TYPE_CHECKING:
    from tests.support.sim.world import SimWorker

BROKEN_S = 3.0
"""The silence after which a connection is closed."""

Item = Delta | Produced | Trial | Exception
Work = Callable[[Callable[[Delta], None], Notify], Awaitable[Produced | None]]
"""The work of a worker for a call: it sends deltas and notices of trials, and may return an answer."""


class Call:
    """One call: a task of the worker whose items arrive in order, each with a delay."""

    def __init__(self, worker: "SimWorker", rng: Random, delay_s_max: float, work: Work) -> None:
        self.worker = worker
        self.received_at_s = asyncio.get_running_loop().time()
        self.alone = False  # as far as the edge knows
        self.broken = asyncio.Event()
        self.inbox = asyncio.Queue[Item]()
        self._rng, self._delay_s_max = rng, delay_s_max
        self._wire = asyncio.Queue[Item]()
        self._arrived = asyncio.Event()
        self.tasks = asyncio.create_task(self._work(work)), asyncio.create_task(self._carry())

    async def next(self) -> Delta | Produced:
        """Return the next item. Raises the failure of the call, or that of its worker."""
        got = asyncio.create_task(self.inbox.get())
        lost = [asyncio.create_task(event.wait()) for event in (self.broken, self.worker.ended)]
        try:
            await asyncio.wait({got, *lost}, return_when=asyncio.FIRST_COMPLETED)
            if not got.done():
                alone = CrashedAlone if self.worker.ended.is_set() else LostAlone
                raise (alone if self.alone else WorkerGone)(self.worker.worker_id)
            item = got.result()
        finally:
            for task in (got, *lost):
                task.cancel()
            await asyncio.wait({got, *lost})
        if isinstance(item, Exception):
            raise item
        assert not isinstance(item, Trial)
        return item

    async def close(self) -> None:
        """Cancel the work of the worker when it is awake."""
        work, carry = self.tasks
        carry.cancel()
        await asyncio.wait({carry})
        if not work.done() and not self.worker.ended.is_set():
            await self.worker.awake.wait()
        work.cancel()
        await asyncio.wait({work})

    async def _work(self, work: Work) -> None:
        async def notify(alone: bool) -> None:  # noqa: FBT001  a callback of the engine
            self._wire.put_nowait(Trial(alone))
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S_MAX):
                    await self._arrived.wait()

        try:
            answer = await work(self._wire.put_nowait, notify)
            if answer is not None:
                self._wire.put_nowait(answer)
        except TidemillError as error:
            self._wire.put_nowait(error)

    async def _carry(self) -> None:
        while True:
            item = await self._wire.get()
            await asyncio.sleep(self._rng.random() * self._delay_s_max)
            await self.worker.linked.wait()
            await self.worker.message()
            if self.worker.ended.is_set():
                return
            self.received_at_s = asyncio.get_running_loop().time()
            if isinstance(item, Trial):
                self.alone = item.alone
                self._arrived.set()
            else:
                self.inbox.put_nowait(item)


class EdgeCalls:
    """The connections of all edges, as cluster/edge/failure_detector.py sees them."""

    def __init__(
        self, rng: Random, delay_s_max: float, later: Callable[[Coroutine[None, None, None]], None]
    ) -> None:
        self._rng, self._delay_s_max, self._later = rng, delay_s_max, later
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    @asynccontextmanager
    async def call(
        self, worker: "SimWorker", work: Work
    ) -> AsyncGenerator[Callable[[], Awaitable[Delta | Produced]]]:
        call = Call(worker, self._rng, self._delay_s_max, work)
        self._calls.add(call)
        for task in call.tasks:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            yield call.next
        finally:
            self._calls.discard(call)
            self._later(call.close())

    def num_calls(self, worker: "SimWorker") -> int:
        return sum(call.worker is worker for call in self._calls)

    def silent(self) -> frozenset[WorkerId]:
        now_s = asyncio.get_running_loop().time()
        latest_s: dict[WorkerId, float] = {}
        for call in self._calls:
            worker = call.worker.worker_id
            latest_s[worker] = max(call.received_at_s, latest_s.get(worker, 0.0))
        return frozenset(worker for worker, at_s in latest_s.items() if now_s - at_s > SILENCE_S_MAX)

    def give_up(self, workers: Collection[WorkerId]) -> None:
        for call in self._calls:
            if call.worker.worker_id in workers:
                call.broken.set()

    async def cut(self, worker: "SimWorker", seconds: float) -> None:
        """Cut the connections of a worker. Both ends close those that are silent for too long."""
        worker.linked.clear()
        try:
            await asyncio.sleep(min(seconds, BROKEN_S))
            for _ in range(int(seconds - BROKEN_S) + 1):
                if seconds > BROKEN_S:
                    self.give_up({worker.worker_id})
                    await asyncio.sleep(1.0)
        finally:
            worker.linked.set()
