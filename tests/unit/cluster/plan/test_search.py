"""The search against a sweep of the simulator, and the size, speed and calibration of a worker."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tidemill.cluster.bench.workloads import RandomShape
from tidemill.cluster.plan.calibration import (
    Calibration,
    CalibrationError,
    PromptTime,
    StreamTime,
    busy_s,
    fit,
    read_calibration,
    write_calibration,
)
from tidemill.cluster.plan.cards import CARDS
from tidemill.cluster.plan.search import (
    Arrangement,
    Prediction,
    Targets,
    search,
)
from tidemill.cluster.plan.sizing import NoFit, WorkerSize, bound, predictor, worker_here, worker_on_card
from tidemill.cluster.plan.workload import LeastWork, Load, least_work_of, requests_of
from tidemill.cluster.simulate.agents import agents_trace
from tidemill.cluster.simulate.cost import StepCost
from tidemill.cluster.simulate.trace import TraceRequest, speed_up
from tidemill.kvstore.layout import Attention, Linear, layout_of
from tidemill.kvstore.memory.recompute_cost import RecomputeCost
from tidemill.workers.messages import Speed
from tidemill.workers.models.architectures.registry import ModelSizes
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


def test_a_worker_on_cards_holds_weights_and_the_longest_request() -> None:
    card = replace(CARDS["h100"], name="small", memory_bytes=44 << 30)
    with pytest.raises(NoFit, match=r"1 x small: a rank needs 63 GiB .* has 39\.6 GiB"):
        worker_on_card(card, MODEL, cuda(1), LEAST_WORK)
    worker = worker_on_card(card, MODEL, cuda(2), LEAST_WORK)
    assert worker.is_estimate
    assert 0 < worker.memory_bytes < 2 * (0.9 * card.memory_bytes - 30 * 2**30)
    with pytest.raises(NoFit, match="the longest request has 200,000 tokens, and the model takes 100,000"):
        worker_on_card(card, MODEL, cuda(2), replace(LEAST_WORK, longest=200_000))
    with pytest.raises(NoFit, match="3 ranks cannot share the heads"):
        worker_on_card(card, MODEL, cuda(3), LEAST_WORK)


def test_a_worker_here_needs_memory_for_the_longest_request(tmp_path: Path) -> None:
    settings = replace(WORKER.settings, memory_bytes=32 << 20, model_folder=tmp_path)
    worker = worker_here(FOUND, MODEL, settings, LEAST_WORK)
    assert (worker.cost.speed.step_s, worker.request_s) == (FOUND.speed.step_s, FOUND.request_s)
    assert worker.memory_bytes == 32 << 20
    with pytest.raises(NoFit, match=r"needs --memory \d+MiB, and a worker has 0.0312 GiB"):
        worker_here(FOUND, MODEL, settings, replace(LEAST_WORK, longest=100_000))


STEP_TOKENS = 512
SMALL = Speed(step_s=2e-3, token_s=3e-4, pair_s=3e-8, row_s=4e-4)
FLAT = Speed(step_s=2e-3, token_s=3e-4, row_s=1e-5)
FOUND = Calibration(
    model="keeper", threads=1, speed=SMALL, request_s=0.004, busy_s=0.001, context_tokens=512, load=1.5
)


@pytest.mark.parametrize("speed", [SMALL, FLAT], ids=["with pairs", "without"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_fit_finds_the_times_of_steps_and_of_requests(speed: Speed, noise: float) -> None:
    rng = Random(3)

    def noisy(seconds: float) -> float:
        return seconds * (1 + rng.uniform(-noise, noise))

    prompts = [
        PromptTime(length, noisy(0.004 + speed.prefill_s(0, length, STEP_TOKENS)))
        for length in (128, 512, 1024, 4096)
    ]
    streams = [StreamTime(rows, noisy(speed.step_s + rows * speed.row_s)) for rows in (1, 4, 16)]
    found, request_s = fit(prompts, streams, STEP_TOKENS)
    for length in (300, 800, 2000):
        wanted_s = 0.004 + speed.prefill_s(0, length, STEP_TOKENS)
        assert request_s + found.prefill_s(0, length, STEP_TOKENS) == pytest.approx(
            wanted_s, rel=0.01 + 3 * noise
        )
    for rows in (2, 8):
        wanted_s = speed.step_s + rows * speed.row_s
        assert found.step_s + rows * found.row_s == pytest.approx(wanted_s, rel=0.01 + 3 * noise)


def test_time_beside_others_is_what_steps_do_not_explain() -> None:
    """A prompt of two steps beside three streams waits for a step and a half, and its own have them, too."""
    row_steps_s = 3.5 * (3 * SMALL.row_s)
    steps_s = 1.5 * SMALL.step_s + SMALL.prefill_s(0, 600, STEP_TOKENS) + row_steps_s
    for extra_s, found_s in ((0.005, 0.005), (-0.005, 0.0)):
        beside_s = 0.004 + steps_s + extra_s
        assert busy_s(beside_s, 600, 3, (SMALL, 0.004), STEP_TOKENS) == pytest.approx(found_s)


def test_fit_has_no_negative_times() -> None:
    """A loaded machine may measure a long prompt as faster than a short one, and many rows likewise."""
    found, request_s = fit(
        [PromptTime(64, 0.030), PromptTime(256, 0.020), PromptTime(512, 0.025)],
        [StreamTime(1, 0.004), StreamTime(4, 0.003), StreamTime(16, 0.003)],
        STEP_TOKENS,
    )
    assert min(found.step_s, found.row_s, found.token_s, found.pair_s, request_s) >= 0
    assert found.step_s + found.row_s > 0


def test_a_calibration_is_read_as_it_was_written_and_is_of_one_model_and_number_of_threads(
    tmp_path: Path,
) -> None:
    path = tmp_path / "times.json"
    write_calibration(path, replace(FOUND, threads=2))
    assert read_calibration(path, "keeper", 2) == replace(FOUND, threads=2)
    for model, threads in (("keeper", 1), ("other", 2)):
        with pytest.raises(CalibrationError, match="of keeper with 2 threads, not of"):
            read_calibration(path, model, threads)
    with pytest.raises(CalibrationError, match="cannot be written"):
        write_calibration(tmp_path / "nowhere" / "times.json", FOUND)
    for text in ("", "[]", "{}", '{"model": "keeper", "speed": {"step_s": 1}}'):
        path.write_text(text)
        with pytest.raises(CalibrationError, match="is not a calibration"):
            read_calibration(path, "keeper", 1)
