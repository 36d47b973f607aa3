"""Real engines in virtual time: whole requests, with steps and bytes that are only numbers."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from tidemill.cluster.simulate.clock import run_virtual
from tidemill.cluster.simulate.cost import StepCost, layout_for
from tidemill.cluster.simulate.policies import OURS
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.sized_store import SizeOnlyStore, StoreLink
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest
from tidemill.cluster.simulate.world import simulate
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.page_store import Got, Put

NOTHING = memoryview(b"")
SMALL = Setup(prefill=2, decode=2, engine="real", blocks=256, grain=16)


def trace(count: int, seed: int, gap_s: float = 0.3) -> list[TraceRequest]:
    """Return requests of a few families, with prompts of any length."""
    rng = Random(seed)
    requests: list[TraceRequest] = []
    for number in range(count):
        family = rng.randrange(4)
        shared = [1000 * family + block for block in range(rng.randrange(12))]
        blocks = (*shared, 100_000 + number)
        tokens = len(shared) * BLOCK_TOKENS + 1 + rng.randrange(BLOCK_TOKENS)
        requests.append(TraceRequest(number * gap_s, tokens, 1 + rng.randrange(300), blocks))
    return requests


def objects(*names: int, kind: Kind = Kind.PAGE) -> list[tuple[ObjectKey, memoryview]]:
    return [(ObjectKey(kind, PageKey(name.to_bytes(16, "little"))), NOTHING) for name in names]


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("policy", [OURS, "least-load", "min-ttft"])
def test_engines_answer_every_request_and_lose_no_memory(policy: str, *, hybrid: bool) -> None:
    outcome = simulate(trace(40, 3), replace(SMALL, policy=policy, hybrid=hybrid))  # ends with Ledger.check()
    figures = outcome.figures()
    assert (len(outcome.served), figures["refused"], figures["failed"]) == (40, 0, 0)
    assert figures["hit_ratio"] > 0.1
    assert min(request.ttft_s for request in outcome.served) > 0.0
    assert figures["itl_ms"]["mean"] > 1000 * StepCost().speed.step_s


def test_engines_repeat_equal_runs() -> None:
    assert simulate(trace(30, 4), SMALL).figures() == simulate(trace(30, 4), SMALL).figures()


def test_grain_changes_the_times_by_less_than_a_tenth() -> None:
    requests = trace(40, 5)
    means = [
        simulate(requests, replace(SMALL, policy="least-load", grain=grain)).figures()["ttft_ms"]["mean"]
        for grain in (2, 16)
    ]
    assert means[1] == pytest.approx(means[0], rel=0.1)


def test_hybrid_reuses_no_more_than_attention() -> None:
    requests = trace(60, 6)
    hits = [
        simulate(requests, replace(SMALL, hybrid=hybrid)).figures()["hit_ratio"] for hybrid in (False, True)
    ]
    assert 0 < hits[1] <= hits[0] + 0.02


def test_virtual_clock_jumps_and_keeps_the_order() -> None:
    async def main() -> tuple[list[int], float]:
        order: list[int] = []

        async def later(number: int, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            order.append(number)

        await asyncio.gather(later(1, 3600.0), later(2, 10.0), later(3, 3600.0))
        return order, asyncio.get_running_loop().time()

    assert run_virtual(main()) == ([2, 1, 3], pytest.approx(3600.0))


def test_store_link_transfers_one_after_the_other() -> None:
    layout = layout_for(hybrid=True, grain=8)
    store = SizeOnlyStore(layout, 1 << 40)

    async def main() -> list[float]:
        clock = asyncio.get_running_loop().time
        link, other = StoreLink(store, layout.page_bytes), StoreLink(store, layout.page_bytes)
        times: list[float] = []
        assert await link.put(objects(1, 2)) == [Put.STORED] * 2
        times.append(clock())
        assert await link.put(objects(1)) == [Put.EXISTED]  # no bytes are moved
        times.append(clock())
        await asyncio.gather(link.get(objects(1)), link.get(objects(2)), other.get(objects(1, 9)))
        times.append(clock())
        assert await other.get(objects(9)) == [Got.MISS]
        assert link.stats().get_bytes == 2 * layout.page_bytes
        return times

    assert run_virtual(main()) == pytest.approx([2.0, 2.0, 4.0])


def test_store_evicts_the_least_recently_used_objects() -> None:
    layout = layout_for(hybrid=True, grain=8)
    store = SizeOnlyStore(layout, 2 * layout.page_bytes)

    async def main() -> list[bool]:
        link = StoreLink(store, 1e12)
        await link.put(objects(1, 2))
        await link.get(objects(1))
        await link.put(objects(3))
        assert await link.put(objects(7, 1, kind=Kind.CHECKPOINT)) == [Put.FULL, Put.SKIPPED]
        return await link.contains([key for key, _ in objects(1, 2, 3)])

    assert run_virtual(main()) == [True, False, True]
