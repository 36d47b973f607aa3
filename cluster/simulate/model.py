"""Workers as a formula: prompts are computed one after the other, answers beside each other.

The model of replay studies, for many workers and long traces: no steps, no admission, no ledger, no store.
"""

import asyncio
from collections.abc import Callable, Sequence

from tidemill.cluster.simulate.block_cache import BlockCache, Stored
from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest
from tidemill.workers.messages import Announcement, MemoryUse, WorkerInfo, WorkerLoad
from tidemill.workers.scheduling.prefill_throttle import BESIDE_STREAMS


class ModelWorker:
    """Either kind; `touched` is called when there is something new to report."""

    def __init__(
        self,
        info: WorkerInfo,
        cost: StepCost,
        blocks: BlockCache,
        stored: Stored,
        touched: Callable[[], None],
    ) -> None:
        self.info = info
        self.busy_s = 0.0
        self.rows = 0
        self.kv_tokens = 0
        self._cost = cost
        self._blocks = blocks
        self._stored = stored
        self._touched = touched
        self._turn = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._free_at_s = 0.0  # what runs now is computed then
        self._queued_s = 0.0  # what follows takes so long
        self._queued_tokens = 0

    @property
    def wait_s(self) -> float:
        return max(0.0, self._free_at_s - self._clock()) + self._queued_s

    def expected(self, keys: Sequence[bytes]) -> int:
        return self._blocks.expected(keys)

    def usable(self, keys: Sequence[bytes]) -> int:
        return self._blocks.expected_usable(keys)

    def prefill_s(self, start: int, end: int) -> float:
        return self._cost.prefill_s(start, end)

    async def compute(self, keys: Sequence[bytes], num_tokens: int) -> tuple[int, int]:
        """Compute a prompt in its turn; how many of its tokens were here, and how many in the store."""
        expected = self._blocks.expected_usable(keys)
        expected_s = self._serving(expected, keys, num_tokens)[0]
        lacking = num_tokens - expected * BLOCK_TOKENS
        states = self._blocks.promise(keys)
        self._queued_s += expected_s
        self._queued_tokens += lacking
        self.rows += 1
        self._touched()
        async with self._turn:
            depth = self._blocks.usable(keys)
            self._blocks.used(keys, depth)
            busy_s, fetched = self._serving(depth, keys, num_tokens)
            self._queued_s = max(0.0, self._queued_s - expected_s)
            self._free_at_s = self._clock() + busy_s
            self.busy_s += busy_s
            await asyncio.sleep(busy_s)
            self._blocks.redeem(keys, states)
            self._stored.put(keys, states)
        self._queued_tokens -= lacking
        self.rows -= 1
        self._touched()
        return depth * BLOCK_TOKENS, fetched * BLOCK_TOKENS

    def _serving(self, here: int, keys: Sequence[bytes], num_tokens: int) -> tuple[float, int]:
        """Of a prompt of which the first `here` blocks are here: seconds, and how many are fetched.
        That keeps the worker busy, too."""
        beside = BESIDE_STREAMS if self.kv_tokens else 1.0
        computed_s = self._cost.prefill_s(here * BLOCK_TOKENS, num_tokens) * beside
        rate = self._cost.speed.fetch_bytes_per_s
        there = self._stored.restorable(keys) if rate else 0
        if there <= here:
            return computed_s, 0
        num_bytes = (there - here) * self.info.page_bytes + self.info.state_bytes
        fetched_s = num_bytes / rate + self._cost.prefill_s(there * BLOCK_TOKENS, num_tokens) * beside
        return (fetched_s, there - here) if fetched_s < computed_s else (computed_s, 0)

    async def answer(self, item: TraceRequest) -> float:
        """Stream an answer; the seconds between two of its tokens."""
        held = item.prompt_tokens + item.answer_tokens
        self.rows += 1
        self.kv_tokens += held
        self._touched()
        itl_s = self._cost.decode_s(self.rows)
        self.busy_s += itl_s * item.answer_tokens / self.rows
        await asyncio.sleep(itl_s * item.answer_tokens)
        self.rows -= 1
        self.kv_tokens -= held
        self._touched()
        return itl_s

    def load(self) -> WorkerLoad:
        size = self.info.page_bytes
        held = -(-self.kv_tokens // BLOCK_TOKENS) * size
        cached = len(self._blocks) * size
        return WorkerLoad(
            queued_tokens=self._queued_tokens,
            queued_s=self.wait_s,
            running_rows=self.rows,
            memory=MemoryUse(
                pages_live=held, pages_cached=cached, empty=max(0, self.info.memory_bytes - held - cached)
            ),
            budget_bytes=self.info.memory_bytes,
            speed=self._cost.measured_speed(self.info.role),
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        changes = self._blocks.take_changes()
        if full:
            return Announcement(added=tuple(self._blocks.restorable()), full=True)
        return Announcement(added=tuple(changes.added), removed=tuple(changes.removed))
