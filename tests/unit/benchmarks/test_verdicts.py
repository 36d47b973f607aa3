"""The verdicts on attacks: what is a miss, and what the calm of the same run excuses."""

import pytest
from benchmarks.serving.verdicts import (
    GAP_MS_MAX,
    GOOD,
    GROWTH_MIB_MAX,
    MISSED,
    NOT_JUDGED,
    NOT_RUN,
    STATUSES,
    Verdict,
    gap_verdict,
    worst,
)

BODY = GAP_MS_MAX["body"]


def verdict(**seen: object) -> Verdict:
    return Verdict(**{"name": "a", "kind": "body", "statuses": {"400": 1}, "run_calm_gap_ms": 20.0, **seen})  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(
    ("gap_ms", "calm_ms", "hold_ms", "expected"),
    [
        (BODY, 0.0, 0.0, GOOD),
        (BODY + 1, BODY, 0.0, MISSED),
        (BODY + 1, BODY + 1, 0.0, NOT_JUDGED),
        (BODY + 1, BODY + 1, BODY, NOT_JUDGED),
        (BODY + 1, 1000.0, BODY + 1, MISSED),  # CPU time is not other work
    ],
)
def test_calm_gaps_excuse_a_gap_but_not_a_hold(
    gap_ms: float, calm_ms: float, hold_ms: float, expected: str
) -> None:
    assert gap_verdict(gap_ms, calm_ms, BODY, hold_ms) == expected
    assert verdict(gap_ms=gap_ms, run_calm_gap_ms=calm_ms, hold_ms=hold_ms).verdict == expected
    late = verdict(gap_ms=gap_ms, run_calm_gap_ms=0.0, lag_ms=calm_ms, hold_ms=hold_ms)
    assert late.verdict == expected


@pytest.mark.parametrize(
    "wrong",
    [{"growth_mib": GROWTH_MIB_MAX + 1}, {"refused": 1}, {"broken": 1}, {"statuses": {"400": 1, "500": 1}}],
)
def test_everything_but_gaps_is_a_miss_on_any_machine(wrong: dict[str, object]) -> None:
    """No further round excuses it."""
    found = verdict(gap_ms=900.0, run_calm_gap_ms=1000.0, **wrong)
    assert found.verdict == MISSED
    assert not found.may_be_noise
    for both in (found.with_round(verdict()), verdict().with_round(found)):
        assert both.gap_ms == 0.0
        assert both.verdict == MISSED


def test_only_resets_are_judged_by_waits_beyond_the_lag_of_the_client() -> None:
    assert verdict(wait_ms=999.0).verdict == verdict(kind="flood", wait_ms=999.0).verdict == GOOD
    late = verdict(kind="reset", wait_ms=999.0)
    assert (late.misses, late.may_be_noise) == (["wait"], True)
    quick = verdict(kind="reset", wait_ms=999.0, lag_ms=800.0, gap_ms=10.0)
    assert late.with_round(quick).verdict == quick.with_round(late).verdict == GOOD


def test_of_several_rounds_the_smallest_gap_counts() -> None:
    first, second = verdict(gap_ms=900.0, calm_gap_ms=9.0, hold_ms=70.0), verdict(gap_ms=10.0, hold_ms=3.0)
    assert first.verdict == MISSED
    assert first.may_be_noise
    assert first.with_round(second).verdict == GOOD
    assert first.with_round(second).statuses == {"400": 2}
    assert second.with_round(first).hold_ms == 3.0


def test_status_is_that_of_the_worst_verdict() -> None:
    assert verdict(has_run=False, gap_ms=900.0).verdict == NOT_RUN
    assert worst([]) == worst([GOOD]) == GOOD
    assert worst([GOOD, NOT_JUDGED, GOOD]) == NOT_JUDGED
    assert worst([NOT_JUDGED, NOT_RUN]) == NOT_RUN
    assert worst([NOT_RUN, MISSED, NOT_JUDGED]) == MISSED
    assert STATUSES[GOOD] == 0
    assert len({*STATUSES.values()}) == len(STATUSES)
