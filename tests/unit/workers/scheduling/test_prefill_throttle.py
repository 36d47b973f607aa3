"""Prompt tokens beside streams: as many as keep the promise, learned from the times of steps."""

from random import Random
from statistics import mean

import pytest

from tidemill.workers.scheduling.prefill_throttle import SLOWDOWN_MAX, PrefillThrottle

PAGE = 16
MOST = 512


def drive(
    pace: PrefillThrottle, steps: int, base_s: float, token_s: float, rng: Random | None = None
) -> tuple[float, float]:
    """A machine on which a step takes `base_s` and `token_s` for each prompt token: the mean step, and the
    share of the time that prompts had."""
    times: list[float] = []
    prompts_s = 0.0
    for _ in range(steps):
        tokens = pace.prompt_tokens(MOST)
        assert tokens % PAGE == 0
        assert 0 <= tokens <= MOST
        pace.launched(tokens)
        noise = 1.0 if rng is None else rng.choice([0.9, 1.0, 1.1, 1.0, 3.0])
        seconds = (base_s + token_s * tokens) * noise
        pace.landed(seconds, tokens)
        times.append(seconds)
        prompts_s += token_s * tokens * noise
    return mean(times), prompts_s / sum(times)


@pytest.mark.parametrize("token_ratio", [0.001, 0.01, 0.1, 1.0, 10.0])
def test_streams_keep_their_pace_and_prompts_their_share(token_ratio: float) -> None:
    pace = PrefillThrottle(PAGE)
    drive(pace, 50, 1.0, token_ratio)
    step_s, share = drive(pace, 2000, 1.0, token_ratio)
    assert step_s <= SLOWDOWN_MAX * 1.05
    everything = token_ratio * MOST / (1 + token_ratio * MOST)
    assert share >= min(1 / 3, everything * 0.95)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("token_ratio", [0.01, 0.3, 10.0])
def test_steps_that_the_machine_holds_up_do_not_mislead_it(token_ratio: float, seed: int) -> None:
    rng = Random(seed)
    pace = PrefillThrottle(PAGE)
    drive(pace, 50, 1.0, token_ratio, rng)
    step_s, share = drive(pace, 8000, 1.0, token_ratio, rng)
    assert step_s <= 2 * 1.4, "2 times the mean of the noise"
    assert share >= 1 / 3


def test_nothing_runs_before_the_time_of_a_step_is_known() -> None:
    pace = PrefillThrottle(PAGE)
    assert pace.prompt_tokens(MOST) == 0
    pace.landed(1.0, 0)
    assert pace.prompt_tokens(MOST) == PAGE, "one page, to learn what it takes"
    assert pace.prompt_tokens(5) == 5


@pytest.mark.parametrize("token_ratio", [0.05, 0.5])
@pytest.mark.parametrize("change", [0.1, 10.0])
def test_it_follows_when_steps_become_faster_or_slower(change: float, token_ratio: float) -> None:
    """Thirty streams end and one goes on, or the other way round."""
    pace = PrefillThrottle(PAGE)
    drive(pace, 200, 1.0, token_ratio)
    drive(pace, 200, change, token_ratio)
    step_s, share = drive(pace, 2000, change, token_ratio)
    assert step_s <= 2 * change
    assert share >= 1 / 3


def test_asking_again_earns_nothing() -> None:
    """A plan that is given up, for lack of memory, has cost no step."""
    pace = PrefillThrottle(PAGE)
    drive(pace, 50, 1.0, 1.0)
    times: list[float] = []
    for _ in range(300):
        tokens = max(pace.prompt_tokens(MOST) for _ in range(5))
        pace.launched(tokens)
        pace.landed(1.0 + tokens, tokens)
        times.append(1.0 + tokens)
    assert mean(times) <= 2.0
