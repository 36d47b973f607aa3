"""Modelled workers, their memory and the policies that choose among them; real engines in virtual time."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.support.cluster.heartbeats import placement_request, worker_info
from tidemill.cluster.simulate.block_cache import BlockCache
from tidemill.cluster.simulate.clock import run_virtual
from tidemill.cluster.simulate.cost import SPEED, StepCost, layout_for
from tidemill.cluster.simulate.policies import (
    OURS,
    POLICIES,
    Choice,
    Formula,
    Policy,
    Sglang,
    aibrix,
    dynamo,
    least_load,
    llm_d,
    min_ttft,
    prefix_affinity,
)
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.sized_store import SizeOnlyStore, StoreLink
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest
from tidemill.cluster.simulate.world import simulate
from tidemill.kvstore.keys import Kind, ObjectKey, PageKey
from tidemill.kvstore.stores.page_store import Got, Put
from tidemill.workers.messages import WorkerInfo

COST = StepCost(by_chunk=True, speed=replace(SPEED, fetch_bytes_per_s=0.0))


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "little") for number in numbers]


@dataclass(kw_only=True)
class FixedWorker:
    """A worker as a policy sees it, with the figures of a test."""

    info: WorkerInfo
    wait_s: float = 0.0
    rows: int = 0
    kv_tokens: int = 0
    held: int = 0
    promised: int = 0
    queued_tokens: int = 0

    def expected(self, keys: Sequence[bytes]) -> int:
        return min(len(keys), max(self.held, self.promised))

    def usable(self, keys: Sequence[bytes]) -> int:
        return min(len(keys), self.held)

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) / BLOCK_TOKENS


def worker(name: str, **figures: Any) -> FixedWorker:  # noqa: ANN401
    info = worker_info(name, "prefill", page_tokens=BLOCK_TOKENS)
    return FixedWorker(info=info, **figures)


RNG = Random(7)
REQUEST = placement_request(10 * BLOCK_TOKENS, keys=tuple(names(*range(10))))


def chosen(policy: Policy, *workers: FixedWorker) -> str:
    return policy(Choice(REQUEST, list(workers), 0.0, RNG)).info.name


def test_block_cache_evicts_the_ends_of_the_oldest_paths_first() -> None:
    blocks = BlockCache(4, None)
    blocks.redeem(names(1, 2, 3), blocks.promise(names(1, 2, 3)))
    blocks.redeem(names(1, 4), blocks.promise(names(1, 4)))
    assert [blocks.usable(names(1, 2, 3)), blocks.usable(names(1, 4))] == [3, 2]
    assert blocks.take_changes().added == set(names(1, 2, 3, 4))
    blocks.redeem(names(5), blocks.promise(names(5)))
    assert blocks.usable(names(1, 2, 3)) == 2  # the end of the older path was evicted
    assert blocks.usable(names(1, 4)) == 2
    changes = blocks.take_changes()
    assert (changes.added, changes.removed) == (set(names(5)), set(names(3)))


def test_block_cache_of_a_hybrid_resumes_only_at_checkpoints() -> None:
    blocks = BlockCache(16, 4)
    blocks.redeem(names(1, 2, 3), blocks.promise(names(1, 2, 3)))
    assert (blocks.resident(names(1, 2, 9)), blocks.usable(names(1, 2, 9))) == (2, 0)
    blocks.redeem(names(1, 2, 9), blocks.promise(names(1, 2, 9)))
    assert blocks.usable(names(1, 2, 7)) == 2
    assert set(blocks.restorable()) == set(names(3, 2, 9))


BUSY_HOLDER, IDLE = worker("a", wait_s=4.0, rows=2, held=8), worker("b", wait_s=3.0, rows=1)
HOME, PROMISED = worker("a", wait_s=9.0, held=8), worker("a", wait_s=1.0, promised=8)
QUEUED, BUSY = (
    worker("a", held=6, queued_tokens=5 * BLOCK_TOKENS, kv_tokens=blocks * BLOCK_TOKENS) for blocks in (0, 2)
)
THREE = (worker("a", held=8, rows=3), worker("b", held=4, rows=1), worker("c"))
OTHER = worker("b")


@pytest.mark.parametrize(
    ("policy", "workers", "name"),
    [
        (least_load, (BUSY_HOLDER, IDLE), "b"),
        (min_ttft, (BUSY_HOLDER, IDLE), "a"),
        (prefix_affinity, (BUSY_HOLDER, IDLE), "a"),
        (partial(prefix_affinity, rows_max=0), (BUSY_HOLDER, IDLE), "b"),
        (partial(prefix_affinity, match_min=0.9), (BUSY_HOLDER, IDLE), "b"),
        (Formula(), (HOME, OTHER), "b"),
        (Formula(rho=0.9), (HOME, OTHER), "a"),
        (min_ttft, (PROMISED, OTHER), "b"),
        (Formula(rho=0.9), (PROMISED, OTHER), "a"),
        (dynamo, (QUEUED, OTHER), "a"),  # 9 blocks are fewer than 10
        (dynamo, (BUSY, OTHER), "b"),
        (partial(dynamo, overlap_weight=4.0), (BUSY, OTHER), "a"),
        (Sglang(), (worker("a", held=4, rows=64), OTHER), "a"),
        (Sglang(), (worker("a", held=4, rows=65), OTHER), "b"),
        (aibrix, THREE, "b"),  # a has more than the mean + deviation
        (partial(aibrix, deviation_factor=2.0), THREE, "a"),
        (partial(aibrix, deviation_factor=9.0), (worker("a", held=8, rows=9), OTHER), "b"),
        (aibrix, (worker("a", rows=1), OTHER), "b"),  # without any prefix
        (llm_d, (worker("a", held=7, rows=1), OTHER), "a"),  # 3 * 0.7 is more than 2
        (llm_d, (worker("a", held=6, rows=1), OTHER), "b"),
    ],
)
def test_policies_choose_by_their_rule(policy: Policy, workers: tuple[FixedWorker, ...], name: str) -> None:
    assert chosen(policy, *workers) == name


def test_sglang_sends_new_prompts_to_the_smaller_tree() -> None:
    short, idle, policy = worker("a", held=3), worker("b"), Sglang()
    policy.trees[short.info.worker] = 1
    assert chosen(policy, short, idle) == "b", "3 of 10 pages are not more than 0.3"
    assert policy.trees[idle.info.worker] == 10
    assert chosen(policy, short, idle) == "a", "its tree is smaller now"


def arrival(at_s: float, *blocks: int, tokens: int = BLOCK_TOKENS) -> TraceRequest:
    return TraceRequest(at_s, len(blocks) * tokens + 1, 10, (*blocks, 10_000))


def test_model_computes_prompts_in_turn_at_the_cost_of_the_studies() -> None:
    setup = Setup(prefill=1, decode=1, policy="least-load", engine="model", cost=COST)
    outcome = simulate([arrival(0.0, 1), arrival(0.0, 2)], setup)
    cost_s = (16.50142 + 0.01518344 * 513 + 4.209989e-7 * 513**2) / 1000
    assert [request.ttft_s for request in outcome.served] == pytest.approx([cost_s, 2 * cost_s])
    assert outcome.busy_s["prefill"] == pytest.approx([2 * cost_s])
    assert len(outcome.gaps_s) == 2 * 9


@pytest.mark.parametrize("policy", [OURS, *POLICIES])
def test_model_answers_every_request_and_repeats_equal_runs(policy: str) -> None:
    rng = Random(2)
    heads = [100 * rng.randrange(4) for _ in range(120)]
    requests = [
        arrival(index / 50, *range(head, head + 1 + rng.randrange(9))) for index, head in enumerate(heads)
    ]
    setup = Setup(prefill=3, decode=2, policy=policy, engine="model", cost=COST, blocks=16)
    first, second = simulate(requests, setup), simulate(requests, setup)
    assert first.figures() == second.figures()
    figures = first.figures()
    assert (len(first.served), figures["refused"], figures["failed"]) == (120, 0, 0)
    assert 0 <= figures["hit_ratio"] < 1


def test_policies_break_ties_at_random() -> None:
    idle = [worker(str(number)) for number in range(4)]
    for policy in (least_load, min_ttft, Formula(), prefix_affinity, dynamo, Sglang(), aibrix, llm_d):
        assert {chosen(policy, *idle) for _ in range(40)} == {"0", "1", "2", "3"}


def test_model_fetches_prompts_from_a_store() -> None:
    requests = [arrival(float(number), *range(1, 40)) for number in range(9)]
    with_store = Setup(
        prefill=3, decode=1, policy="round-robin", engine="model", cost=StepCost(by_chunk=True)
    )
    alone = replace(with_store, cost=COST)
    assert simulate(requests, with_store).figures()["fetched_ratio"] > 0.2
    assert simulate(requests, alone).figures()["fetched_ratio"] == 0.0


def test_model_refuses_requests_that_would_be_too_late() -> None:
    requests = [arrival(0.001 * number, *range(100 * number, 100 * number + 60)) for number in range(60)]
    setup = Setup(prefill=1, decode=1, engine="model", cost=COST, ttft_s_max=2.0)
    outcome = simulate(requests, setup)
    assert outcome.refused > 30
    assert len(outcome.served) + outcome.refused == 60
    assert max(request.ttft_s for request in outcome.served) < 4.0


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


def test_hybrid_reuses_no_more_than_attention() -> None:
    requests = trace(60, 6)
    hits = [
        simulate(requests, replace(SMALL, hybrid=hybrid)).figures()["hit_ratio"] for hybrid in (False, True)
    ]
    assert 0 < hits[1] <= hits[0] + 0.02


def test_engines_repeat_equal_runs() -> None:
    assert simulate(trace(30, 4), SMALL).figures() == simulate(trace(30, 4), SMALL).figures()


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
