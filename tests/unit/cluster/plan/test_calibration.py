"""The fit of step times, and the file that keeps them."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

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
from tidemill.workers.messages import Speed

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


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_calibration(path, FOUND)
    assert read_calibration(path, "keeper", 1) == FOUND


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": "keeper", "speed": {"step_s": 1}}'])
def test_other_files_are_no_calibration(tmp_path: Path, text: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match="is not a calibration"):
        read_calibration(path, "keeper", 1)


def test_a_calibration_is_of_one_model_and_number_of_threads(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    write_calibration(path, replace(FOUND, threads=2))
    for model, threads in (("keeper", 1), ("other", 2)):
        with pytest.raises(CalibrationError, match="of keeper with 2 threads, not of"):
            read_calibration(path, model, threads)
    with pytest.raises(CalibrationError, match="cannot be written"):
        write_calibration(tmp_path / "nowhere" / "times.json", FOUND)
