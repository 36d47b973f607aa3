"""Workers as a formula: prompts are computed one after the other, answers concurrently.

This is the model of replay studies, for many workers and long traces: without steps, admission or a
ledger.
"""

import asyncio
from collections.abc import Callable, Sequence

from tidemill.cluster.simulate.block_cache import BlockCache, Stored
from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest
from tidemill.workers.messages import NO_MEMORY, Announcement, WorkerInfo, WorkerLoad
from tidemill.workers.scheduling.prefill_throttle import prompt_slowdown


class ModelWorker:
    """A prefill or decode worker. It calls `on_change` when there is something new to report."""

    def __init__(self, info: WorkerInfo, cost: StepCost, blocks: BlockCache, stored: Stored) -> None:
        self.info = info
        self.busy_s = 0.0
        self.rows = 0
        self.kv_tokens = 0
        self._cost = cost
        self._blocks = blocks
        self._stored = stored
        self.on_change: Callable[[], None] = lambda: None
        self._computes = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._free_at_s = 0.0  # when the running prompt is computed
        self._queued_s = 0.0  # the time for the prompts behind it
        self._queued_tokens = 0

    @property
    def wait_s(self) -> float:
        return max(0.0, self._free_at_s - self._clock()) + self._queued_s

    @property
    def queued_tokens(self) -> int:
        return self._queued_tokens

    def expected(self, keys: Sequence[bytes]) -> int:
        return self._blocks.expected(keys)

    def usable(self, keys: Sequence[bytes]) -> int:
        return self._blocks.expected_usable(keys)

    def prefill_s(self, start: int, end: int) -> float:
        return self._cost.prefill_s(start, end)

    async def compute(self, keys: Sequence[bytes], num_tokens: int) -> tuple[int, int]:
        """Compute a prompt in order of arrival. Return its tokens from the cache and the store."""
        expected = self._blocks.expected_usable(keys)
        expected_s = self._serving(expected, keys, num_tokens)[0]
        missing = num_tokens - expected * BLOCK_TOKENS
        states = self._blocks.promise(keys)
        self._queued_s += expected_s
        self._queued_tokens += missing
        self.rows += 1
        self.on_change()
        async with self._computes:
            depth = self._blocks.usable(keys)
            self._blocks.touch(keys, depth)
            busy_s, fetched = self._serving(depth, keys, num_tokens)
            self._queued_s = max(0.0, self._queued_s - expected_s)
            self._free_at_s = self._clock() + busy_s
            self.busy_s += busy_s
            await asyncio.sleep(busy_s)
            self._blocks.redeem(keys, states)
            self._stored.put(keys, states)
        self._queued_tokens -= missing
        self.rows -= 1
        self.on_change()
        return depth * BLOCK_TOKENS, fetched * BLOCK_TOKENS

    def _serving(self, depth: int, keys: Sequence[bytes], num_tokens: int) -> tuple[float, int]:
        """Return the time to serve a prompt with `depth` cached blocks, and the number of fetched blocks. A
        fetch keeps the worker busy, too."""
        light_s = self._cost.decode_s(self.rows) if self.kv_tokens else 0.0
        speed = self._cost.measured_speed(self.info.role)
        beside = float(
            prompt_slowdown(
                light_s,
                self.info.itl_target_s,
                step_s=speed.step_s,
                token_s=speed.token_s,
                page_tokens=BLOCK_TOKENS,
                tokens_max=self._cost.step_tokens,
            )
            if light_s
            else 1.0
        )
        computed_s = self._cost.prefill_s(depth * BLOCK_TOKENS, num_tokens) * beside
        rate = self._cost.speed.fetch_bytes_per_s
        stored = self._stored.restorable(keys) if rate else 0
        if stored <= depth:
            return computed_s, 0
        num_bytes = (stored - depth) * self.info.page_bytes + self.info.state_bytes
        fetched_s = num_bytes / rate + self._cost.prefill_s(stored * BLOCK_TOKENS, num_tokens) * beside
        return (fetched_s, stored - depth) if fetched_s < computed_s else (computed_s, 0)

    async def answer(self, request: TraceRequest) -> float:
        """Stream an answer. Return the seconds between two of its tokens."""
        held = request.prompt_tokens + request.answer_tokens
        self.rows += 1
        self.kv_tokens += held
        self.on_change()
        itl_s = self._cost.decode_s(self.rows)
        self.busy_s += itl_s * request.answer_tokens / self.rows
        await asyncio.sleep(itl_s * request.answer_tokens)
        self.rows -= 1
        self.kv_tokens -= held
        self.on_change()
        return itl_s

    def load(self) -> WorkerLoad:
        size = self.info.page_bytes
        held = -(-self.kv_tokens // BLOCK_TOKENS) * size
        cached = len(self._blocks) * size
        return WorkerLoad(
            queued_tokens=self._queued_tokens,
            queued_s=self.wait_s,
            running_rows=self.rows,
            streams=self.rows if self.kv_tokens else 0,
            memory=NO_MEMORY
            | {
                "pages_live": held,
                "pages_cached": cached,
                "empty": max(0, self.info.memory_bytes - held - cached),
            },
            budget_bytes=self.info.memory_bytes,
            speed=self._cost.measured_speed(self.info.role),
        )

    def take_announcement(self, *, full: bool) -> Announcement:
        changes = self._blocks.take_changes()
        if full:
            return Announcement(added=tuple(self._blocks.restorable()), full=True)
        return Announcement(added=tuple(changes.added), removed=tuple(changes.removed))
