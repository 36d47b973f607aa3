"""Calls of a frontend on simulated workers: delayed, cut off, given up, as over a connection."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Protocol

from tidemill.cluster.rpc.codec import Trial
from tidemill.cluster.rpc.worker_client import SILENCE_S_MAX
from tidemill.cluster.worker.server import FLUSH_S_MAX
from tidemill.kvstore.errors import TidemillError
from tidemill.workers.messages import (
    CrashedAlone,
    Delta,
    LostAlone,
    Produced,
    RequestError,
    WorkerGone,
    WorkerId,
)
from tidemill.workers.scheduling.isolation import Tell

BROKEN_S = 3.0
"""A connection that carries nothing, not even a sign of life, is closed after this time."""

Item = Delta | Produced | Trial | Exception
Work = Callable[[Callable[[Delta], None], Tell], Awaitable[Produced | None]]
"""What a worker does for a call: it puts deltas and tells of trials, and may have an answer."""


class Worker(Protocol):
    """`awake`: not frozen. `linked`: frontends reach it."""

    @property
    def life(self) -> WorkerId: ...
    @property
    def dead(self) -> asyncio.Event: ...
    @property
    def awake(self) -> asyncio.Event: ...
    @property
    def linked(self) -> asyncio.Event: ...

    async def message(self) -> None:
        """One more passes; it may be the worker's last."""
        ...


class Call:
    """One call: a task of the worker's, whose items arrive in order, each a while after it was put."""

    def __init__(self, worker: Worker, rng: Random, delay_s_max: float, work: Work) -> None:
        self.worker = worker
        self.heard_s = asyncio.get_running_loop().time()
        self.alone = False  # as the frontend knows
        self.broken = asyncio.Event()
        self.inbox = asyncio.Queue[Item]()
        self._rng, self._delay_s_max = rng, delay_s_max
        self._wire = asyncio.Queue[Item]()
        self._arrived = asyncio.Event()
        self.tasks = asyncio.create_task(self._work(work)), asyncio.create_task(self._carry())

    async def next(self) -> Delta | Produced:
        """Raises the failure of the call, or that of its worker."""
        got = asyncio.create_task(self.inbox.get())
        lost = [asyncio.create_task(event.wait()) for event in (self.broken, self.worker.dead)]
        try:
            await asyncio.wait({got, *lost}, return_when=asyncio.FIRST_COMPLETED)
            if not got.done():
                alone = CrashedAlone if self.worker.dead.is_set() else LostAlone
                raise (alone if self.alone else WorkerGone)(self.worker.life)
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
        """The worker hears of it when it is awake and reached; nobody waits for that."""
        work, carry = self.tasks
        carry.cancel()
        await asyncio.wait({carry})
        if not work.done() and not self.worker.dead.is_set():
            await self.worker.awake.wait()
        work.cancel()
        await asyncio.wait({work})

    async def _work(self, work: Work) -> None:
        async def tell(alone: bool) -> None:  # noqa: FBT001  what is told
            self._wire.put_nowait(Trial(alone))
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S_MAX):
                    await self._arrived.wait()

        try:
            answer = await work(self._wire.put_nowait, tell)
            if answer is not None:
                self._wire.put_nowait(answer)
        except (TidemillError, RequestError) as error:
            self._wire.put_nowait(error)

    async def _carry(self) -> None:
        while True:
            item = await self._wire.get()
            await asyncio.sleep(self._rng.random() * self._delay_s_max)
            await self.worker.linked.wait()
            await self.worker.message()
            if self.worker.dead.is_set():
                return
            self.heard_s = asyncio.get_running_loop().time()
            if isinstance(item, Trial):
                self.alone = item.alone
                self._arrived.set()
            else:
                self.inbox.put_nowait(item)


class Frontend:
    """The connections of all frontends, and what cluster/edge/failure_detector.py knows of them."""

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
        self, worker: Worker, work: Work
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

    def num_calls(self, worker: Worker) -> int:
        return sum(call.worker is worker for call in self._calls)

    def silent(self) -> frozenset[WorkerId]:
        now_s = asyncio.get_running_loop().time()
        heard_s: dict[WorkerId, float] = {}
        for call in self._calls:
            heard_s[call.worker.life] = max(call.heard_s, heard_s.get(call.worker.life, 0.0))
        return frozenset(life for life, at_s in heard_s.items() if now_s - at_s > SILENCE_S_MAX)

    def give_up(self, workers: Collection[WorkerId]) -> None:
        for call in self._calls:
            if call.worker.life in workers:
                call.broken.set()

    async def cut(self, worker: Worker, seconds: float) -> None:
        """Nothing passes for so long; both ends close a connection that is silent for too long."""
        worker.linked.clear()
        try:
            await asyncio.sleep(min(seconds, BROKEN_S))
            for _ in range(int(seconds - BROKEN_S) + 1):
                if seconds > BROKEN_S:
                    self.give_up({worker.life})
                    await asyncio.sleep(1.0)
        finally:
            worker.linked.set()
