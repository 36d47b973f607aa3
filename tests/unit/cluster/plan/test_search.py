"""The search against a brute-force sweep of the simulator, and its levels."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tidemill.cluster.bench.workloads import RandomShape
from tidemill.cluster.plan.search import (
    Arrangement,
    Prediction,
    Targets,
    search,
)
from tidemill.cluster.plan.sizing import WorkerSize, bound, predictor
from tidemill.cluster.plan.workload import Load, least_work_of, requests_of
from tidemill.cluster.simulate.agents import agents_trace
from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.trace import TraceRequest, speed_up
from tidemill.kvstore.layout import Attention, Linear, layout_of
from tidemill.workers.messages import Speed
from tidemill.workers.settings import EngineSettings

COST_MAX = 4
VOCAB_SIZE = 1000
LAYOUT = layout_of(
    (
        Attention(kv_heads=2, head_dim=32),
        Linear(key_heads=2, value_heads=2, key_dim=32, value_dim=32, conv_width=4),
    ),
    64,
    kv_dtype="float32",
)
SPEED = Speed(step_s=4e-3, token_s=3e-4, pair_s=3e-8, row_s=1e-3, fetch_bytes_per_s=1e9)
WORKER = WorkerSize(
    settings=EngineSettings(model_folder=Path(), cache_folder=Path(), store_url="", compute_dtype="float32"),
    layout=LAYOUT,
    arena_bytes=256 << 20,
    cost=StepCost(speed=SPEED, step_tokens=512),
    request_s=2e-3,
    is_estimate=False,
)


def random_load(rate: float, seed: int) -> list[TraceRequest]:
    shape = RandomShape(num_prompts=24, input_len=600, output_len=12, range_ratio=0.5)
    return requests_of(Load(trace=None, request_rate=rate, shape=shape, seed=seed), VOCAB_SIZE)


def agents_load(seed: int) -> list[TraceRequest]:
    """Sessions whose prompts repeat those before them, cut to lengths that this worker takes."""
    requests = agents_trace(3, 1, Random(seed))
    short = [request for request in requests if request.prompt_tokens < 30_000][:4]
    start_s = short[0].at_s
    return speed_up(
        [TraceRequest(request.at_s - start_s, request.prompt_tokens, 8, request.blocks) for request in short],
        20.0,
    )


def sweep(predict: Callable[[Arrangement], Prediction]) -> dict[Arrangement, Prediction]:
    """Return the predictions of all arrangements."""
    everything = [Arrangement("here", 1, mixed=count) for count in range(1, COST_MAX + 1)]
    everything += [
        Arrangement("here", 1, prefill=prefill, decode=cost - prefill)
        for cost in range(2, COST_MAX + 1)
        for prefill in range(1, cost)
    ]
    return {arrangement: predict(arrangement) for arrangement in everything}


@pytest.mark.parametrize(
    ("requests", "targets"),
    [
        (random_load(4.0, 1), Targets(ttft_s=0.6, itl_s=None, percentile=90)),
        (random_load(8.0, 2), Targets(ttft_s=0.5, itl_s=0.02, percentile=90)),
        (random_load(8.0, 3), Targets(ttft_s=None, itl_s=0.007, percentile=90)),
        (random_load(12.0, 4), Targets(ttft_s=0.4, itl_s=0.1, percentile=50)),
        (random_load(30.0, 5), Targets(ttft_s=0.05, itl_s=None, percentile=99)),
        (agents_load(6), Targets(ttft_s=13.0, itl_s=0.2, percentile=50)),
        (agents_load(7), Targets(ttft_s=20.0, itl_s=None, percentile=90)),
    ],
    ids=["slow", "both", "gaps", "median", "impossible", "agents", "agents first"],
)
def test_the_choice_costs_at_most_5_percent_more_than_that_of_a_sweep(
    requests: list[TraceRequest], targets: Targets
) -> None:
    """Bounds drop only what misses the targets, too."""
    predict, may_meet = (
        cache(predictor({1: WORKER}, requests, targets)),
        bound(WORKER, least_work_of(requests), targets),
    )
    found = search("here", (1,), COST_MAX, may_meet=may_meet, predict=predict, targets=targets)
    swept = sweep(predict)
    good = {arrangement for arrangement, prediction in swept.items() if prediction.meets(targets)}
    assert not [arrangement for arrangement in good if not may_meet(arrangement)]
    if not good:
        assert found.chosen is None
        return
    assert found.chosen is not None
    assert found.chosen.arrangement in good
    assert found.chosen.arrangement.cost <= 1.05 * min(arrangement.cost for arrangement in good)
    assert len(found.tried) <= len(swept)


def prediction(first_s: float, next_s: float = 0.0) -> Prediction:
    return Prediction(ttft_s=first_s, itl_s=next_s, unanswered=0, figures={})


@pytest.mark.parametrize("needed", [1, 7, 20, 21, 50, 133])
@pytest.mark.parametrize("ranks", [(1,), (2, 8), (1, 2, 4, 8)])
def test_large_plans_cost_at_most_5_percent_more_than_needed(needed: int, ranks: tuple[int, ...]) -> None:
    """A cluster meets the target from `needed` mixed workers of 1 card each, or of larger ones, on."""
    targets = Targets(ttft_s=1.0, itl_s=None, percentile=90)
    found = search(
        "h100",
        ranks,
        256,
        may_meet=lambda arrangement: arrangement.mixed > 0,
        predict=lambda arrangement: prediction(needed / (arrangement.mixed * arrangement.ranks)),
        targets=targets,
    )
    best = min(-(-needed // size) * size for size in ranks)
    assert found.chosen is not None
    assert found.chosen.arrangement.cost <= 1.05 * best


def test_of_equal_costs_the_one_farthest_from_missing_is_chosen() -> None:
    targets = Targets(ttft_s=1.0, itl_s=0.1, percentile=90)
    times = {(2, 0, 0): prediction(0.9, 0.01), (0, 1, 1): prediction(0.5, 0.05)}
    found = search(
        "here",
        (1,),
        2,
        may_meet=lambda arrangement: arrangement.workers == 2,
        predict=lambda arrangement: times[arrangement.mixed, arrangement.prefill, arrangement.decode],
        targets=targets,
    )
    assert found.chosen is not None
    assert found.chosen.arrangement.prefill == 1


def test_more_prefill_workers_are_not_tried_where_decode_workers_are_missing() -> None:
    targets = Targets(ttft_s=None, itl_s=0.1, percentile=90)
    found = search(
        "here",
        (1,),
        6,
        may_meet=lambda arrangement: not arrangement.mixed,
        predict=lambda arrangement: prediction(0.0, 0.3 / arrangement.decode),
        targets=targets,
    )
    assert found.chosen is not None
    assert found.chosen.arrangement == Arrangement("here", 1, prefill=1, decode=3)
    assert [tried.arrangement for tried in found.tried] == [
        Arrangement("here", 1, prefill=1, decode=count) for count in (1, 2, 3)
    ]
