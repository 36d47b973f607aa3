"""A formula for the served model: sizes and FLOPs of Qwen3-Next-80B-A3B, and the time of a step.

A step costs a fixed time: launches, and the weights that a batch reads. It also costs its FLOPs at
the speed of a large accelerator, and the KV and states that it moves at the speed of its memory. No
byte is computed or stored.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.cluster.simulate.cost import ATTENTION, ATTENTION_LAYERS, LINEAR, LINEAR_LAYERS
from tidemill.cluster.simulate.engines import NoBytes
from tidemill.kvstore.layout import Layout, StateDtype, layout_of
from tidemill.kvstore.memory.recompute_cost import RecomputeCost
from tidemill.kvstore.stores.memory_store import MemoryStore
from tidemill.workers.execution.step import Drawn, Row, Step

COST = RecomputeCost(
    token_flops=2 * 3e9, context_flops=4 * 16 * 256 * ATTENTION_LAYERS
)  # 16 query heads of 256

__all__ = ["ATTENTION", "ATTENTION_LAYERS", "NoBytes"]  # re-exported for other benchmarks

VOCABULARY = 150_000
FIRST_TOKEN = 16


def qwen_layout(page_tokens: int, checkpoint_dtype: StateDtype | None = None) -> Layout:
    """Return the layout: a token has 24,576 B of bfloat16, a state 75.4 MiB of float32."""
    layers = (*[ATTENTION] * ATTENTION_LAYERS, *[LINEAR] * LINEAR_LAYERS)
    return layout_of(layers, page_tokens, kv_dtype="bfloat16", checkpoint_dtype=checkpoint_dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The speed of a device; the defaults are about two H100."""

    step_s: float = 8e-3
    flops_per_s: float = 8e14
    bytes_per_s: float = 5e12


def step_seconds(step: Step, layout: Layout, cost: RecomputeCost, device: Device) -> float:
    """Return the time of a step: rows read KV, read and write states, and compute tokens."""
    flops = sum(cost.flops(row.start, row.start + len(row.tokens)) for row in step)
    page_bytes = sum(len(row.pages) for row in step) * layout.page_bytes
    state_bytes = 2 * len(step) * layout.state_bytes
    return device.step_s + flops / device.flops_per_s + (page_bytes + state_bytes) / device.bytes_per_s


def answer_token(seed: int, position: int) -> int:
    """Return the token at `position` of the sequence that is sampled with `seed`."""
    return FIRST_TOKEN + (seed * 1_000_003 + position * 7_919) % (VOCABULARY - FIRST_TOKEN)


class ModelRunner:
    """Waits for the virtual time of each step; calls `observe` when a step starts."""

    def __init__(self, layout: Layout, device: Device, observe: Callable[[Step], None]) -> None:
        self._layout = layout
        self._device = device
        self._observe = observe
        self._newest: asyncio.Future[list[Drawn]] | None = None

    def run(self, step: Step) -> asyncio.Future[list[Drawn]]:
        self._newest = asyncio.ensure_future(self._run(self._newest, step))
        return self._newest

    async def _run(self, before: asyncio.Future[list[Drawn]] | None, step: Step) -> list[Drawn]:
        if before is not None:
            await asyncio.wait([before])
        self._observe(step)
        await asyncio.sleep(step_seconds(step, self._layout, COST, self._device))
        return [_drawn(row) for row in step]


class NoStore(MemoryStore):
    """A store that stores nothing, so that only the memory of the worker counts."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=0)


def _drawn(row: Row) -> Drawn:
    return (
        Drawn()
        if row.sampling_state is None
        else Drawn((answer_token(row.sampling_state.sampling.seed, row.end),))
    )
