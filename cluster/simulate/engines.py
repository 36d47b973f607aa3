"""Workers with the real engine: scheduler, admission, ledger, index and transfers.

Steps and bytes are only numbers. A token of the engine stands for `grain` tokens of the trace, so
that `grain` decode steps are one.
"""

import asyncio
from collections.abc import Callable, Sequence

import torch

from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.sized_store import SizeOnlyStore, StoreLink
from tidemill.kvstore.keys import Namespace, PageKey
from tidemill.kvstore.layout import Layout
from tidemill.kvstore.memory.arena import Arena
from tidemill.kvstore.memory.cache import Cache
from tidemill.kvstore.memory.ledger import Ledger
from tidemill.kvstore.memory.prefix_index import PrefixIndex
from tidemill.kvstore.memory.recompute_cost import Policy
from tidemill.workers.engine.engine import Engine
from tidemill.workers.engine.memory_plan import capacity_tokens
from tidemill.workers.execution.step import Drawn, Row, Step
from tidemill.workers.inbox import Emit
from tidemill.workers.messages import Announcement, Delta, Produced, Request, WorkerInfo, WorkerLoad
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.settings import STEP_CUDA
from tidemill.workers.transfer.arena_io import DirectIO
from tidemill.workers.transfer.transfer import Transfer

ROWS_MAX = STEP_CUDA[1]
IDLE_INTERVAL_S = 1.0
"""The interval between turns of an idle engine. A thousand idle workers must cost little. A row may wait this
long for memory that is freed without a step."""

DRAWN = 1 << 31
"""The first id of drawn tokens: above the name of any block of a trace."""


class NoBytes:
    """Memory without bytes, which is only counted."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)

    def map(self, offset_bytes: int, num_bytes: int) -> None:
        pass

    map_ahead = unmap = map  # noqa: A003  the method

    def close(self) -> None:
        pass


def root_of(salt: str) -> PageKey:
    """Return the root key of the only namespace with this salt."""
    return Namespace(model="simulated", layout="", salt=salt).root()


class CostRunner:
    """Runs steps one after the other in virtual time. Each row draws tokens of its own."""

    def __init__(self, cost: StepCost, grain: int) -> None:
        self.busy_s = 0.0
        self._cost = cost
        self._grain = grain
        self._loop = asyncio.get_running_loop()
        self._free_at_s = 0.0

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        seconds = self._seconds(step)
        self.busy_s += seconds
        self._free_at_s = max(self._loop.time(), self._free_at_s) + seconds
        result: asyncio.Future[list[Drawn]] = self._loop.create_future()
        self._loop.call_at(self._free_at_s, _resolve, result, [_draw(row) for row in step])
        return result

    def _seconds(self, step: Step) -> float:
        streams = sum(len(row.tokens) == 1 for row in step)
        times = self._grain if streams else 1
        prompts = (row for row in step if len(row.tokens) > 1)
        return times * self._cost.decode_s(streams) + sum(
            self._cost.tokens_s(row.start * self._grain, row.end * self._grain) for row in prompts
        )


class EngineWorker:
    """A prefill or decode worker. It calls `on_change` when there is something new to report."""

    def __init__(
        self,
        info: WorkerInfo,
        layout: Layout,
        cost: StepCost,
        store: SizeOnlyStore,
        eviction: Policy = "value",
        *,
        rows_max: int = ROWS_MAX,
    ) -> None:
        self.info = info
        self._cost = cost
        self._grain = cost.step_tokens // info.step_tokens_max
        self.on_change: Callable[[], None] = lambda: None
        num_extents = info.memory_bytes // layout.extent_bytes
        self.ledger = Ledger(
            Cache(layout, Arena(layout, num_extents, NoBytes()), PrefixIndex(layout, eviction))
        )
        self._runner = CostRunner(cost, self._grain)
        self.engine = Engine(
            self.ledger,
            Transfer(layout, DirectIO(StoreLink(store, cost.speed.fetch_bytes_per_s), memoryview(b""))),
            self._runner,
            EngineLimits(
                budget=Budget(
                    tokens_max=max(info.step_tokens_max, rows_max + layout.page_tokens),
                    rows_max=rows_max,
                    page_tokens=layout.page_tokens,
                ),
                capacity_tokens=capacity_tokens(layout, num_extents),
                itl_target_s=info.itl_target_s,
                idle_interval_s=IDLE_INTERVAL_S,
                audits=False,
            ),
            root_of,
        )
        self._held: set[bytes] = set()
        self._unreported = (set[bytes](), set[bytes]())  # since the last announcement: added, removed
        self._steps = asyncio.create_task(self.engine.run())

    @property
    def busy_s(self) -> float:
        return self._runner.busy_s

    @property
    def wait_s(self) -> float:
        return self._cost.prefill_s(0, self.engine.load().queued_tokens * self._grain)

    @property
    def queued_tokens(self) -> int:
        return self.engine.load().queued_tokens

    @property
    def rows(self) -> int:
        return self.engine.num_requests

    @property
    def kv_tokens(self) -> int:
        return self.engine.load().live_bytes

    def expected(self, keys: Sequence[bytes]) -> int:
        self._collect()
        return next((depth for depth in range(len(keys), 0, -1) if keys[depth - 1] in self._held), 0)

    def usable(self, keys: Sequence[bytes]) -> int:
        return self.expected(keys)

    def prefill_s(self, start: int, end: int) -> float:
        return self._cost.prefill_s(start * self._grain, end * self._grain)

    async def produce(self, request: Request) -> Produced:
        self._report_soon()
        try:
            return await self.engine.produce(request)
        finally:
            self.on_change()

    async def prefetch(self, request: Request) -> None:
        await self.engine.prefetch(request)

    async def stream(self, request: Request, emit: Emit[Delta]) -> None:
        self._report_soon()
        try:
            await self.engine.stream(request, emit)
        finally:
            self.on_change()

    def load(self) -> WorkerLoad:
        return self.engine.load()

    def take_announcement(self, *, full: bool) -> Announcement:
        if full:
            return self.engine.take_announcement(full=True)
        self._collect()
        added, removed = self._unreported
        self._unreported = (set[bytes](), set[bytes]())
        return Announcement(added=tuple(added), removed=tuple(removed))

    async def stop(self) -> None:
        """Stop the engine, and check that all memory is free again."""
        await self.engine.drain_publications()
        self._steps.cancel()
        await asyncio.wait([self._steps])
        self.ledger.check()

    def _report_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self.on_change)  # when the request is queued

    def _collect(self) -> None:
        """Take the announcement of the engine, for the policies and for the next heartbeat."""
        changes = self.engine.take_announcement(full=False)
        added, removed = self._unreported
        added.update(changes.added)
        removed.difference_update(changes.added)
        removed.update(changes.removed)
        added.difference_update(changes.removed)
        self._held.update(changes.added)
        self._held.difference_update(changes.removed)


def _resolve(result: asyncio.Future[list[Drawn]], drawn: list[Drawn]) -> None:
    if not result.done():
        result.set_result(drawn)


def _draw(row: Row) -> Drawn:
    return Drawn() if row.sampling_state is None else Drawn((DRAWN + row.sampling_state.sampling.seed,))
