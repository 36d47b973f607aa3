"""A worker learns how fast it is from its steps, whatever disturbs them."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.workers.engine.load_report import queued_s
from tidemill.workers.messages import Speed
from tidemill.workers.scheduling.limits import EngineLimits
from tidemill.workers.scheduling.plan import Budget
from tidemill.workers.transfer.speed_model import (
    FETCH_LASTS_S,
    FETCHES_MIN,
    REFIT_STEPS,
    STEPS_MIN,
    StepTimeModel,
    Throughput,
)

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
TRUE = Speed(step_s=0.01, token_s=2e-5, pair_s=1e-9, row_s=2e-4)


def true_s(speed: Speed, prompt_tokens: int, pairs: int, rows: int) -> float:
    return speed.step_s + prompt_tokens * speed.token_s + pairs * speed.pair_s + rows * speed.row_s


def observe(
    meter: StepTimeModel, rng: Random, speed: Speed, steps: int, *, noise: float = 0.0, outliers: float = 0.0
) -> None:
    for _ in range(steps):
        prompt_tokens = rng.choice([0, rng.randrange(1, 500), rng.randrange(500, 8192)])
        pairs = prompt_tokens * rng.randrange(60_000)
        rows = rng.randrange(40)
        seconds = true_s(speed, prompt_tokens, pairs, rows) * rng.uniform(1 - noise, 1 + noise)
        seconds += rng.choice([0.3, 3.0]) if rng.random() < outliers else 0.0
        meter.stepped(seconds, prompt_tokens=prompt_tokens, pairs=pairs, rows=rows)


def errors(found: Speed, speed: Speed) -> list[float]:
    """Return the relative errors for some kinds of steps."""
    kinds = [
        (8192, 8192 * 4096, 0),
        (8192, 8192 * 40_000, 0),
        (512, 512 * 256, 10),
        (0, 0, 20),
        (64, 64 * 9000, 0),
    ]
    return [abs(true_s(found, *kind) / true_s(speed, *kind) - 1) for kind in kinds]


@PROPERTY
@given(
    st.builds(
        Speed,
        step_s=st.floats(1e-3, 0.1),
        token_s=st.floats(1e-6, 1e-3),
        pair_s=st.floats(1e-10, 1e-8),
        row_s=st.floats(1e-5, 1e-2),
    ),
    st.integers(0, 9),
)
def test_model_finds_the_terms_of_steps(speed: Speed, seed: int) -> None:
    meter = StepTimeModel()
    observe(meter, Random(seed), speed, 300)
    assert max(errors(meter.speed, speed)) < 0.1


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_pauses_disturb_it_little(seed: int) -> None:
    meter = StepTimeModel()
    meter.stepped(20.0, prompt_tokens=64, pairs=64 * 32, rows=0)  # it was compiled first
    observe(meter, Random(seed), TRUE, 600, noise=0.1, outliers=0.03)
    assert max(errors(meter.speed, TRUE)) < 0.15


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_it_follows_a_worker_that_becomes_faster_or_slower(factor: float) -> None:
    meter, rng = StepTimeModel(), Random(1)
    observe(meter, rng, TRUE, 500)
    assert max(errors(meter.speed, TRUE)) < 0.1
    after = Speed(
        step_s=TRUE.step_s * factor,
        token_s=TRUE.token_s * factor,
        pair_s=TRUE.pair_s * factor,
        row_s=TRUE.row_s * factor,
    )
    for _ in range(150):
        observe(meter, rng, after, REFIT_STEPS)
        assert meter.speed.token_s > 0
    assert max(errors(meter.speed, after)) < 0.15


def test_model_gives_no_speed_before_enough_samples() -> None:
    meter = StepTimeModel()
    assert meter.speed == Speed()
    for _ in range(5 * STEPS_MIN):
        meter.stepped(0.01, prompt_tokens=0, pairs=0, rows=3)
    assert meter.speed == Speed(), "nothing is known of prompts"
    for index in range(STEPS_MIN):
        assert meter.speed == Speed()
        meter.stepped(0.1, prompt_tokens=100 + index, pairs=5000, rows=0)
    assert meter.speed.token_s > 0


def test_equal_steps_give_the_time_per_token() -> None:
    """Rather than what a step takes, whatever is in it: a longer prompt would take no longer then."""
    meter = StepTimeModel()
    for _ in range(50):
        meter.stepped(0.1, prompt_tokens=500, pairs=500 * 250, rows=0)
    assert meter.speed.token_s == pytest.approx(0.1 / 500)
    assert meter.speed.prefill_s(0, 5000, 500) == pytest.approx(1.0)


def test_short_prompts_do_not_invent_terms_of_long_ones() -> None:
    meter, rng = StepTimeModel(), Random(2)
    for _ in range(200):
        tokens = rng.randrange(10, 300)
        pairs = tokens * tokens // 2
        meter.stepped(
            true_s(TRUE, tokens, pairs, 0) * rng.uniform(0.8, 1.2), prompt_tokens=tokens, pairs=pairs, rows=0
        )
    assert meter.speed.prefill_s(0, 100_000, 8192) < 3 * TRUE.prefill_s(0, 100_000, 8192)


def test_steps_that_are_noticed_together_share_their_time() -> None:
    """The loop is busy while two steps end, again and again: the second one seems to take no time."""
    meter, rng = StepTimeModel(), Random(4)
    for _ in range(400):
        both = [rng.randrange(50, 500) for _ in range(2)]
        seen_s = [sum(1e-3 + tokens * 1e-5 for tokens in both), 1e-5]
        for tokens, seconds in zip(both, seen_s, strict=True):
            meter.stepped(seconds, prompt_tokens=tokens, pairs=0, rows=0, followed=True)
    assert meter.speed.prefill_s(0, 2000, 2000) == pytest.approx(0.021, rel=0.3)


@pytest.mark.parametrize("seed", range(5))
def test_first_steps_that_are_noticed_late_do_not_mislead(seed: int) -> None:
    """The loop is busy during nine steps: the first of them seems long, the others take no time."""
    meter, rng = StepTimeModel(), Random(seed)
    observe(meter, rng, TRUE, STEPS_MIN)
    for steps in (20, 9, 20):
        for index in range(steps):
            seconds = true_s(TRUE, 0, 0, 4)
            if steps == 9:
                seconds = 0.0 if index else 9 * seconds
            meter.stepped(seconds, prompt_tokens=0, pairs=0, rows=4, followed=True)
    observe(meter, rng, TRUE, STEPS_MIN)
    assert max(errors(meter.speed, TRUE)) < 0.3


def test_decoding_for_long_does_not_make_it_forget_how_prompts_go() -> None:
    meter, rng = StepTimeModel(), Random(3)
    observe(meter, rng, TRUE, 300)
    for _ in range(20_000):
        rows = rng.randrange(1, 40)
        meter.stepped(true_s(TRUE, 0, 0, rows), prompt_tokens=0, pairs=0, rows=rows)
    assert max(errors(meter.speed, TRUE)) < 0.1


@PROPERTY
@given(
    st.lists(
        st.tuples(st.floats(0.0, 100.0), st.integers(0, 10_000), st.integers(0, 10**9), st.integers(0, 300)),
        max_size=60,
    )
)
def test_whatever_it_sees_no_speed_is_negative(steps: list[tuple[float, int, int, int]]) -> None:
    meter = StepTimeModel()
    for seconds, prompt_tokens, pairs, rows in steps:
        meter.stepped(seconds, prompt_tokens=prompt_tokens, pairs=pairs if prompt_tokens else 0, rows=rows)
    speed = meter.speed
    assert min(speed.step_s, speed.token_s, speed.pair_s, speed.row_s) >= 0
    assert speed == Speed() or speed.token_s > 0


def test_throughput_is_that_of_the_last_fetches_if_there_were_some_lately() -> None:
    store, now_s = Throughput(), 1e4
    for _ in range(FETCHES_MIN):
        assert store.with_throughput(TRUE, now_s) == TRUE
        store.fetched(1 << 30, 0.5, now_s)
    found = store.with_throughput(TRUE, now_s + FETCH_LASTS_S)
    assert (found.fetch_bytes_per_s, found.token_s) == (pytest.approx(2 << 30), TRUE.token_s)
    for _ in range(200):
        store.fetched(1 << 20, 0.01, now_s)
    assert store.with_throughput(Speed(), now_s).fetch_bytes_per_s == pytest.approx(100 << 20, rel=0.05)
    store.fetched(0, 0.0, now_s)  # in no time at all
    later_s = now_s + FETCH_LASTS_S + 1
    assert store.with_throughput(TRUE, later_s) == TRUE
    store.fetched(1 << 30, 1.0, later_s)
    assert store.with_throughput(TRUE, later_s) == TRUE, "the slow ones are forgotten"


def test_queued_prompts_share_steps() -> None:
    queued = [(0, 1000), (500, 700), (41, 42)]  # the last one decodes
    pairs = 1000 * 500 + 200 * 600
    alone_s = 2 * TRUE.step_s + 1200 * TRUE.token_s + pairs * TRUE.pair_s
    limits = EngineLimits(
        budget=Budget(tokens_max=1000, rows_max=1, page_tokens=64), capacity_tokens=1, itl_target_s=1e-9
    )
    light_s = TRUE.step_s + TRUE.row_s
    assert queued_s(TRUE, queued, limits, 0, 0) == pytest.approx(alone_s)
    assert queued_s(TRUE, queued, limits, 1, 1) == pytest.approx(alone_s + light_s)
    assert alone_s < queued_s(TRUE, queued, limits, 1, 10**6) <= 2 * alone_s
    assert queued_s(Speed(), queued, limits, 1, 3) == 0.0
    assert queued_s(TRUE, [], limits, 1, 3) == 0.0
