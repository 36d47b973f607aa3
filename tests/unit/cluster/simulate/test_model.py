"""Modelled workers and their memory, and the policies that choose among them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest

from tidemill.cluster.messages import PlacementRequest
from tidemill.cluster.simulate.block_cache import BlockCache, Stored
from tidemill.cluster.simulate.cost import SPEED, StepCost
from tidemill.cluster.simulate.policies import (
    OURS,
    POLICIES,
    Formula,
    LeastLoad,
    MinTtft,
    PrefixAffinity,
    UnknownPolicy,
    WorkerView,
    make_policy,
)
from tidemill.cluster.simulate.report import imbalance, percentile
from tidemill.cluster.simulate.setup import Setup
from tidemill.cluster.simulate.trace import BLOCK_TOKENS, TraceRequest
from tidemill.cluster.simulate.world import simulate
from tidemill.workers.messages import WorkerId, WorkerInfo

COST = StepCost(by_chunk=True, speed=replace(SPEED, fetch_bytes_per_s=0.0))


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "little") for number in numbers]


@dataclass(kw_only=True)
class Fixed:
    """A seat with the figures that a test gives it."""

    info: WorkerInfo
    wait_s: float = 0.0
    rows: int = 0
    kv_tokens: int = 0
    here: int = 0
    coming: int = 0

    def expected(self, keys: Sequence[bytes]) -> int:
        return min(len(keys), max(self.here, self.coming))

    def usable(self, keys: Sequence[bytes]) -> int:
        return min(len(keys), self.here)

    def prefill_s(self, start: int, end: int) -> float:
        return (end - start) / BLOCK_TOKENS


def seats(*each: Fixed) -> list[WorkerView]:
    return list(each)


def seat(name: str, **figures: float) -> Fixed:
    info = WorkerInfo(
        worker=WorkerId(name), name=name, role="prefill", address="", pid=0, node="", page_tokens=BLOCK_TOKENS
    )
    return Fixed(info=info, **figures)  # pyright: ignore[reportArgumentType]  whole numbers are given as such


RNG = Random(7)
ASK = PlacementRequest(
    request_id="0", keys=tuple(names(*range(10))), num_tokens=10 * BLOCK_TOKENS, max_new_tokens=1
)


def test_blocks_are_evicted_from_the_ends_of_paths_the_oldest_first() -> None:
    blocks = BlockCache(4, None)
    blocks.redeem(names(1, 2, 3), blocks.promise(names(1, 2, 3)))
    blocks.redeem(names(1, 4), blocks.promise(names(1, 4)))
    assert [blocks.usable(names(1, 2, 3)), blocks.usable(names(1, 4))] == [3, 2]
    assert blocks.take_changes().added == set(names(1, 2, 3, 4))
    blocks.redeem(names(5), blocks.promise(names(5)))
    assert blocks.usable(names(1, 2, 3)) == 2  # the end of the older path went
    assert blocks.usable(names(1, 4)) == 2
    changes = blocks.take_changes()
    assert (changes.added, changes.removed) == (set(names(5)), set(names(3)))


def test_what_is_promised_is_expected_and_not_usable() -> None:
    blocks = BlockCache(8, None)
    states = blocks.promise(names(1, 2))
    assert (blocks.expected(names(1, 2, 3)), blocks.usable(names(1, 2, 3))) == (2, 0)
    assert blocks.expected_usable(names(1, 2, 3)) == 2
    blocks.redeem(names(1, 2), states)
    assert (blocks.expected(names(1, 2, 3)), blocks.usable(names(1, 2, 3))) == (2, 2)


def test_a_hybrid_resumes_at_checkpoints_alone_and_the_second_visit_makes_the_junction() -> None:
    blocks = BlockCache(16, 4)
    blocks.redeem(names(1, 2, 3), blocks.promise(names(1, 2, 3)))
    assert (blocks.resident(names(1, 2, 9)), blocks.usable(names(1, 2, 9))) == (2, 0)
    blocks.redeem(names(1, 2, 9), blocks.promise(names(1, 2, 9)))
    assert blocks.usable(names(1, 2, 7)) == 2
    assert set(blocks.restorable()) == set(names(3, 2, 9))


def test_a_state_that_finds_no_slot_takes_the_oldest_one() -> None:
    blocks = BlockCache(16, 1)
    for number in (1, 2):
        blocks.redeem(names(number), blocks.promise(names(number)))
    assert (blocks.usable(names(1)), blocks.usable(names(2))) == (0, 1)
    assert blocks.take_changes().added == set(names(2))


def test_a_store_restores_what_any_worker_has_computed() -> None:
    for hybrid, depth in ((False, 2), (True, 1)):
        stored = Stored(hybrid=hybrid)
        stored.put(names(1, 2), names(1))
        assert stored.restorable(names(1, 2, 3)) == depth


def test_policies_choose_as_they_say() -> None:
    busy_holder = seat("a", wait_s=4.0, rows=2, here=8)
    idle = seat("b", wait_s=3.0, rows=1)
    both = seats(busy_holder, idle)
    assert LeastLoad(RNG)(ASK, both, 0.0) is idle
    assert MinTtft(RNG)(ASK, both, 0.0) is busy_holder
    assert PrefixAffinity(RNG)(ASK, both, 0.0) is busy_holder
    assert PrefixAffinity(RNG, rows_max=0)(ASK, both, 0.0) is idle
    assert PrefixAffinity(RNG, match_min=0.9)(ASK, both, 0.0) is idle


def test_the_formula_leaves_home_at_low_load_and_stays_at_high_load() -> None:
    home = seat("a", wait_s=9.0, here=8)
    elsewhere = seat("b")
    assert Formula(RNG)(ASK, seats(home, elsewhere), 0.0) is elsewhere
    assert Formula(RNG, rho=0.9)(ASK, seats(home, elsewhere), 0.0) is home
    assert Formula(RNG, rho=0.9)(ASK, seats(home, elsewhere), 1000.0) is elsewhere  # that was long ago


def test_pages_on_their_way_draw_their_family_at_high_load() -> None:
    home, elsewhere = seat("a", wait_s=1.0, coming=8), seat("b")
    assert MinTtft(RNG)(ASK, seats(home, elsewhere), 0.0) is elsewhere
    assert Formula(RNG, rho=0.9)(ASK, seats(home, elsewhere), 0.0) is home


def test_every_name_is_a_policy_and_no_other() -> None:
    for name in POLICIES:
        assert make_policy(name, Random(1))(ASK, seats(seat("a")), 0.0).info.name == "a"
    with pytest.raises(UnknownPolicy, match="the policies are ours"):
        make_policy("worst", Random(1))


def item(at_s: float, *blocks: int, tokens: int = BLOCK_TOKENS) -> TraceRequest:
    return TraceRequest(at_s, len(blocks) * tokens + 1, 10, (*blocks, 10_000))


def test_prompts_are_computed_one_after_the_other_at_the_studies_cost() -> None:
    setup = Setup(prefill=1, decode=1, policy="least-load", engine="model", cost=COST)
    outcome = simulate([item(0.0, 1), item(0.0, 2)], setup)
    cost_s = (16.50142 + 0.01518344 * 513 + 4.209989e-7 * 513**2) / 1000
    assert [one.ttft_s for one in outcome.served] == pytest.approx([cost_s, 2 * cost_s])
    assert outcome.busy_s["prefill"] == pytest.approx([2 * cost_s])
    assert len(outcome.gaps_s) == 2 * 9


def test_a_long_prompt_runs_in_chunks() -> None:
    assert COST.prefill_s(0, 20_000) == pytest.approx(2 * COST.prefill_s(0, 8192) + COST.prefill_s(0, 3616))
    assert COST.prefill_s(8192, 16_384) == COST.prefill_s(0, 8192)
    assert StepCost().prefill_s(8192, 16_384) > StepCost().prefill_s(0, 8192)


@pytest.mark.parametrize("policy", [OURS, *POLICIES])
def test_every_request_is_answered_and_equal_runs_are_equal(policy: str) -> None:
    rng = Random(2)
    heads = [100 * rng.randrange(4) for _ in range(120)]
    items = [item(index / 50, *range(head, head + 1 + rng.randrange(9))) for index, head in enumerate(heads)]
    setup = Setup(prefill=3, decode=2, policy=policy, engine="model", cost=COST, blocks=16)
    first, second = simulate(items, setup), simulate(items, setup)
    assert first.figures() == second.figures()
    figures = first.figures()
    assert (len(first.served), figures["refused"], figures["failed"]) == (120, 0, 0)
    assert 0 <= figures["hit_ratio"] < 1


def test_ties_are_spread() -> None:
    idle = seats(*[seat(str(number)) for number in range(4)])
    for policy in (LeastLoad(Random(1)), MinTtft(Random(1)), Formula(Random(1)), PrefixAffinity(Random(1))):
        assert {policy(ASK, idle, 0.0).info.name for _ in range(40)} == {"0", "1", "2", "3"}


def test_affinity_finds_what_scattering_does_not() -> None:
    items = [item(number / 2, 100 + number % 5, 200 + number % 5) for number in range(100)]
    hits = {
        policy: simulate(
            items, Setup(prefill=4, decode=1, policy=policy, engine="model", cost=COST, blocks=4)
        ).figures()["hit_ratio"]
        for policy in ("random", "prefix-affinity")
    }
    assert hits["prefix-affinity"] > 1.2 * hits["random"]


def test_a_store_makes_prompts_reusable_everywhere() -> None:
    items = [item(float(number), *range(1, 40)) for number in range(9)]
    with_store = Setup(
        prefill=3, decode=1, policy="round-robin", engine="model", cost=StepCost(by_chunk=True)
    )
    alone = replace(with_store, cost=COST)
    assert simulate(items, with_store).figures()["fetched_ratio"] > 0.2
    assert simulate(items, alone).figures()["fetched_ratio"] == 0.0


def test_what_would_come_too_late_is_refused() -> None:
    items = [item(0.001 * number, *range(100 * number, 100 * number + 60)) for number in range(60)]
    setup = Setup(prefill=1, decode=1, engine="model", cost=COST, ttft_s_max=2.0)
    outcome = simulate(items, setup)
    assert outcome.refused > 30
    assert len(outcome.served) + outcome.refused == 60
    assert max(one.ttft_s for one in outcome.served) < 4.0


def test_figures() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], share) for share in (50, 75, 90, 99)] == [2.0, 3.0, 4.0, 4.0]
    assert percentile([], 50) == 0.0
    assert imbalance([1.0, 3.0]) == 1.5
    assert imbalance([0.0]) == 1.0
