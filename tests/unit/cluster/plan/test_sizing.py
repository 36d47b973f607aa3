"""The size and the speed of a worker, and the simulation of its requests."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cluster.plan.test_calibration import FOUND
from tests.unit.cluster.plan.test_search import LAYOUT, SPEED, WORKER
from tidemill.cluster.plan.cards import CARDS, roofline
from tidemill.cluster.plan.search import Arrangement, Targets
from tidemill.cluster.plan.sizing import NoFit, bound, predictor, worker_here, worker_on_card
from tidemill.cluster.plan.workload import LeastWork, least_work_of
from tidemill.cluster.simulate.trace import TraceRequest
from tidemill.kvstore.memory.recompute_cost import RecomputeCost
from tidemill.workers.models.architectures.registry import ModelSizes
from tidemill.workers.settings import EngineSettings

ANY = Targets(ttft_s=None, itl_s=None, percentile=90)
ALONE = [TraceRequest(10.0 * number, 900, 20, (2 * number, 2 * number + 1)) for number in range(5)]
"""Requests of which none meets another."""

MODEL = ModelSizes(
    layers=LAYOUT.layers,
    max_length=100_000,
    vocab_size=1000,
    weight_bytes=60 << 30,
    cost=RecomputeCost(token_flops=60e9, context_flops=1e6),
)
LEAST_WORK = LeastWork(span_s=1.0, new_tokens=(900,), longest=2000, mean_prompt=900, mean_context=1000)


def cuda(ranks: int) -> EngineSettings:
    return replace(WORKER.settings, device="cuda", tensor_parallel_size=ranks)


def test_a_request_alone_takes_the_times_that_were_fitted() -> None:
    worker = replace(WORKER, request_s=0.1)
    predicted = predictor({1: worker}, ALONE, ANY)(Arrangement("here", 1, mixed=1))
    assert predicted.ttft_s == pytest.approx(worker.request_s + SPEED.prefill_s(0, 900, 512), rel=0.01)
    assert predicted.itl_s == pytest.approx(SPEED.step_s + SPEED.row_s, rel=0.01)
    assert predicted.unanswered == 0


def test_a_request_takes_longer_while_another_is_answered() -> None:
    first, second, *_ = ALONE
    worker = replace(WORKER, busy_s=0.2)
    for at_s, extra_s in ((second.at_s, 0.0), (0.9 * SPEED.prefill_s(0, 900, 512), worker.busy_s)):
        both = [first, replace(second, at_s=at_s)]
        slow, fast = (
            predictor({1: each}, both, ANY)(Arrangement("here", 1, mixed=1)) for each in (worker, WORKER)
        )
        assert slow.ttft_s - fast.ttft_s == pytest.approx(extra_s, abs=0.05)


def test_prefill_workers_hand_prompts_over() -> None:
    predicted = predictor({1: WORKER}, ALONE, ANY)(Arrangement("here", 1, prefill=1, decode=1))
    assert predicted.unanswered == 0
    assert predicted.ttft_s > WORKER.request_s + SPEED.prefill_s(0, 900, 512) - 2 * SPEED.step_s


def test_bounds_are_those_of_one_request_and_of_all_prompts() -> None:
    work = least_work_of(
        [TraceRequest(0.1 * number, 900, 20, (2 * number, 2 * number + 1)) for number in range(20)]
    )
    alone_s = WORKER.request_s + SPEED.prefill_s(0, 900, 512)

    def least(targets: Targets) -> int | None:
        may_meet = bound(WORKER, work, targets)
        return next((count for count in range(1, 9) if may_meet(Arrangement("here", 1, mixed=count))), None)

    assert least(ANY) == 1
    assert least(Targets(ttft_s=0.9 * alone_s, itl_s=None, percentile=90)) is None
    assert least(Targets(ttft_s=None, itl_s=0.9 * SPEED.step_s, percentile=90)) is None
    # 18 of 20 prompts of 0.27 s, within the 1.9 s of their arrivals and the target
    assert least(Targets(ttft_s=1.1 * alone_s, itl_s=None, percentile=90)) == 3


def test_prefixes_that_repeat_are_no_work() -> None:
    work = least_work_of([TraceRequest(float(number), 1100, 5, (1, 2, 3 + number)) for number in range(3)])
    assert work.new_tokens == (1100, 1100 - 1024, 1100 - 1024)
    assert work.longest == 1105


def test_a_worker_on_cards_holds_weights_and_the_longest_request() -> None:
    card = CARDS["l40s"]
    with pytest.raises(NoFit, match=r"1 x l40s: a rank needs 63 GiB .* has 39\.6 GiB"):
        worker_on_card(card, MODEL, cuda(1), LEAST_WORK)
    worker = worker_on_card(card, MODEL, cuda(2), LEAST_WORK)
    assert worker.is_estimate
    assert 0 < worker.memory_bytes < 2 * (0.9 * card.memory_bytes - 30 * 2**30)
    with pytest.raises(NoFit, match="the longest request has 200,000 tokens, and the model takes 100,000"):
        worker_on_card(card, MODEL, cuda(2), replace(LEAST_WORK, longest=200_000))
    with pytest.raises(NoFit, match="3 ranks cannot share the heads"):
        worker_on_card(card, MODEL, cuda(3), LEAST_WORK)


def test_a_faster_card_and_more_ranks_are_faster_in_the_estimate() -> None:
    slow, fast = (roofline(CARDS[name], MODEL, LAYOUT, 2, 1000) for name in ("l40s", "h100"))
    more = roofline(CARDS["h100"], MODEL, LAYOUT, 4, 1000)
    for slower, faster in ((slow, fast), (fast, more)):
        assert slower.step_s > faster.step_s
        assert slower.token_s > faster.token_s
    assert fast.row_s > roofline(CARDS["h100"], MODEL, LAYOUT, 2, 100).row_s


def test_a_worker_here_needs_memory_for_the_longest_request(tmp_path: Path) -> None:
    settings = replace(WORKER.settings, memory_bytes=32 << 20, model_folder=tmp_path)
    worker = worker_here(FOUND, MODEL, settings, LEAST_WORK)
    assert (worker.cost.speed.step_s, worker.request_s) == (FOUND.speed.step_s, FOUND.request_s)
    assert worker.memory_bytes == 32 << 20
    with pytest.raises(NoFit, match=r"needs --memory \d+MiB, and a worker has 0.0312 GiB"):
        worker_here(FOUND, MODEL, settings, replace(LEAST_WORK, longest=100_000))
