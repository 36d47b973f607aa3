"""Prompt tokens beside streams: as many as keep the target of a step, learned from the times of steps."""

from itertools import pairwise
from random import Random

import pytest

from tidemill.workers.scheduling.prefill_throttle import (
    LIGHT_STEPS,
    SAMPLES,
    START_PAGES,
    PrefillThrottle,
    prompt_slowdown,
)

PAGE = 16
MOST = 4096
TARGET_S = 0.1


class Machine:
    """Steps of `light_s`, and `token_s` for each prompt token, under a flood of prompts."""

    def __init__(self, light_s: float, token_s: float, rng: Random | None = None) -> None:
        self.light_s = light_s
        self.token_s = token_s
        self.rng = rng

    def run(self, throttle: PrefillThrottle, steps: int) -> tuple[list[float], list[int]]:
        """Return the times of the steps, and the prompt tokens in each."""
        times: list[float] = []
        carried: list[int] = []
        for _ in range(steps):
            tokens = throttle.prompt_tokens(MOST)
            assert tokens % PAGE == 0
            assert 0 <= tokens <= MOST
            throttle.launched(tokens)
            noise = 1.0 if self.rng is None else self.rng.choice([0.9, 1.0, 1.1, 1.0, 3.0])
            times.append((self.light_s + self.token_s * tokens) * noise)
            throttle.landed(times[-1], tokens)
            carried.append(tokens)
        return times, carried


def limit_s(light_s: float, token_s: float) -> float:
    """Return the longest step: the target, twice a step without prompts, or a step with one page."""
    return max(TARGET_S, LIGHT_STEPS * light_s, light_s + PAGE * token_s)


@pytest.mark.parametrize("light_s", [0.001, 0.01, 0.05, 0.1, 0.5])
@pytest.mark.parametrize("token_s", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2])
def test_steps_keep_the_target_and_use_it(light_s: float, token_s: float) -> None:
    throttle = PrefillThrottle(PAGE, TARGET_S)
    machine = Machine(light_s, token_s)
    machine.run(throttle, 50)
    times, carried = machine.run(throttle, 1000)
    assert sorted(times)[950] <= 1.2 * limit_s(light_s, token_s)
    without = [index for index, tokens in enumerate(carried) if not tokens]
    assert {after - before for before, after in pairwise(without)} == {SAMPLES + 1}
    full = light_s + token_s * MOST
    assert max(times) >= 0.8 * min(full, limit_s(light_s, token_s)) - PAGE * token_s


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("token_s", [1e-5, 3e-4, 1e-2])
def test_delayed_steps_do_not_mislead_the_throttle(token_s: float, seed: int) -> None:
    rng = Random(seed)
    throttle = PrefillThrottle(PAGE, TARGET_S)
    machine = Machine(0.02, token_s, rng)
    machine.run(throttle, 50)
    times, carried = machine.run(throttle, 4000)
    mean_noise = 1.4
    assert sum(times) / len(times) <= 1.2 * mean_noise * limit_s(0.02, token_s)
    most_s = min(token_s * MOST, limit_s(0.02, token_s) - 0.02)
    assert sum(carried) * token_s / len(carried) >= most_s / 2 - PAGE * token_s


def test_no_prompt_runs_before_the_time_of_a_step_is_known() -> None:
    throttle = PrefillThrottle(PAGE, TARGET_S)
    assert throttle.prompt_tokens(MOST) == 0
    throttle.landed(0.01, 0)
    assert throttle.prompt_tokens(MOST) == START_PAGES * PAGE, "a few pages, to learn their time"
    assert throttle.prompt_tokens(5) == 5


@pytest.mark.parametrize("token_s", [5e-5, 5e-4])
@pytest.mark.parametrize("change", [0.1, 10.0])
def test_throttle_follows_when_steps_become_faster_or_slower(change: float, token_s: float) -> None:
    """Thirty streams end and one continues, or the other way round."""
    throttle = PrefillThrottle(PAGE, TARGET_S)
    Machine(0.02, token_s).run(throttle, 200)
    after = Machine(0.02 * change, token_s)
    after.run(throttle, 100)
    times, carried = after.run(throttle, 1000)
    assert sorted(times)[950] <= 1.2 * limit_s(0.02 * change, token_s)
    assert sum(carried) > 0


def test_target_of_zero_limits_nothing() -> None:
    throttle = PrefillThrottle(PAGE, 0.0)
    assert throttle.prompt_tokens(MOST) == MOST


PAGES_OF_64 = {"page_tokens": 64, "tokens_max": 500}
PAGES_OF_1 = {"page_tokens": 1, "tokens_max": 1000}


@pytest.mark.parametrize(
    ("light_s", "target_s", "step_s", "token_s", "sizes", "slowdown"),
    [
        (0.01, 0.1, 0.0, 1e-3, PAGES_OF_1, 10 / 9),
        (0.05, 0.1, 0.0, 1e-3, PAGES_OF_1, 2.0),
        (0.5, 0.1, 0.0, 1e-3, PAGES_OF_1, 2.0),
        (0.01, 0.0, 0.0, 1e-3, PAGES_OF_1, 1.01),
        (0.06, 0.5, 0.05, 1e-4, PAGES_OF_64, 0.11 / 0.10),
        (0.02, 0.1, 0.0, 0.01, PAGES_OF_64, 0.66 / 0.64),  # a page takes longer than the target
        (0.06, 0.5, 0.0, 0.0, PAGES_OF_64, 1.0),  # unknown speed
    ],
)
def test_slowdown_of_prompts(
    light_s: float, target_s: float, step_s: float, token_s: float, sizes: dict[str, int], slowdown: float
) -> None:
    found = prompt_slowdown(light_s, target_s, step_s=step_s, token_s=token_s, **sizes)
    assert found == pytest.approx(slowdown)
