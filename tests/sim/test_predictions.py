"""The predicted time to first token is what happens, in virtual time: the router beside real engines."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from tests.support.cluster.heartbeats import placement_request, worker_info
from tidemill.cluster.router.router import Router
from tidemill.cluster.simulate.clock import run_virtual
from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.engines import EngineWorker
from tidemill.cluster.simulate.heartbeats import SimHeartbeats
from tidemill.cluster.simulate.sized_store import SizeOnlyStore
from tidemill.kvstore.layout import Attention, layout_of
from tidemill.workers.messages import Request, Sampling, Speed
from tidemill.workers.transfer.speed_model import STEPS_MIN

TOKENS_MAX = 512
PROMPT_TOKENS = 8000
LAYOUT = layout_of((Attention(kv_heads=2, head_dim=64),) * 4, 64, kv_dtype="bfloat16")

SMALL = Speed(step_s=4e-3, token_s=3e-4, pair_s=3e-7, row_s=4e-4, fetch_bytes_per_s=1e9)
"""A dense model of 88M parameters on a core, of which attention is most at 8,000 tokens."""

LARGE = Speed(step_s=0.2, token_s=2e-3, pair_s=5e-8, row_s=5e-3, fetch_bytes_per_s=1e9)
"""A model of 8B parameters on a CPU: a step of streams alone takes longer than the target, and prompts beside
streams take nearly twice as long."""


@dataclass(frozen=True)
class Fleet:
    """A mixed worker and its router."""

    worker: EngineWorker
    router: Router

    async def serve(self, number: int, num_tokens: int, answer_tokens: int) -> tuple[float, float]:
        """Return the predicted and the measured time to first token. Read the whole answer."""
        now_s = asyncio.get_running_loop().time
        since_s, first_s = now_s(), 0.0
        route = await self.router.place(
            placement_request(num_tokens, request_id=str(number), max_new_tokens=answer_tokens)
        )
        request = Request(
            request_id=str(number),
            tokens=tuple(range(number * 10**5, number * 10**5 + num_tokens)),
            max_new_tokens=answer_tokens,
            sampling=Sampling(seed=number),
        )

        def read(_: object) -> None:
            nonlocal first_s
            first_s = first_s or now_s() - since_s

        await self.worker.stream(request, read)
        return route.predicted_s, first_s


@asynccontextmanager
async def fleet_of(speed: Speed) -> AsyncGenerator[Fleet]:
    sizes = {"page_tokens": LAYOUT.page_tokens, "page_bytes": LAYOUT.page_bytes, "memory_bytes": 1 << 30}
    info = worker_info("mixed-0", "mixed", step_tokens_max=TOKENS_MAX, itl_target_s=0.1, **sizes)
    cost = StepCost(speed=speed, step_tokens=TOKENS_MAX)
    worker = EngineWorker(info, LAYOUT, cost, SizeOnlyStore(LAYOUT, 1 << 30))
    router = Router(asyncio.get_running_loop().time, broker=False)
    heartbeats = SimHeartbeats(worker, router.heartbeat)
    await asyncio.sleep(0)
    yield Fleet(worker, router)
    heartbeats.stop()
    await worker.stop()


@pytest.mark.parametrize("streams", [0, 4], ids=["idle", "beside streams"])
@pytest.mark.parametrize("answer_tokens", [1, 64, 256])
@pytest.mark.parametrize("speed", [SMALL, LARGE], ids=["small", "large"])
def test_predicted_first_tokens_are_within_30_percent(speed: Speed, answer_tokens: int, streams: int) -> None:
    """Four prompts of 8,000 tokens come together; the worker has measured its speed on prompts before."""

    async def main() -> list[tuple[float, float]]:
        async with fleet_of(speed) as fleet:
            for number in range(1, 1 + STEPS_MIN):
                await fleet.serve(number, 4 * TOKENS_MAX, 8)
            async with asyncio.TaskGroup() as tasks:
                for number in range(20, 20 + streams):
                    tasks.create_task(fleet.serve(number, 200, 4000))
                await asyncio.sleep(60)
                flood = [
                    tasks.create_task(fleet.serve(number, PROMPT_TOKENS, answer_tokens))
                    for number in range(30, 34)
                ]
            return [task.result() for task in flood]

    found = run_virtual(main())
    assert [predicted_s for predicted_s, _ in found] == pytest.approx(
        [measured_s for _, measured_s in found], rel=0.3
    )
