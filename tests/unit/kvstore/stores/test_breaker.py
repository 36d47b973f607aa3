"""The state of the circuit breaker, and the measured rate of transfers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kvstore.stores.circuit_breaker import PROBE_S_MAX, PROBE_S_MIN, RATE_AT_START, Breaker, Rate

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


@PROPERTY
@given(st.lists(st.sampled_from(["fail", "probed", "moved"]), max_size=40))
def test_breaker_counts_each_trip_once_and_doubles_its_waits(history: list[str]) -> None:
    breaker = Breaker()
    waits: list[float] = []
    for event in history:
        before = (breaker.trips, breaker.is_open)
        match event:
            case "fail":
                opened = breaker.fail()
                assert opened == (not before[1])
                assert (breaker.trips, breaker.is_open) == (before[0] + opened, True)
            case "probed":
                breaker.close()
                assert (breaker.trips, breaker.is_open) == (before[0], False)
            case _:
                breaker.reset_wait()
                waits = waits if before[1] else []
        if breaker.is_open:
            wait_s = breaker.next_wait_s()
            assert wait_s == min(2 * waits[-1], PROBE_S_MAX) if waits else PROBE_S_MIN
            waits.append(wait_s)


@PROPERTY
@given(st.floats(1e5, 1e10), st.integers(1 << 20, 1 << 27))
def test_rate_converges_to_that_of_the_transfers(bytes_per_s: float, num_bytes: int) -> None:
    rate = Rate()
    for _ in range(400):
        rate.add(num_bytes, num_bytes / bytes_per_s)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert rate.patience_s(num_bytes) == pytest.approx(3 * num_bytes / bytes_per_s, rel=0.01)


def test_rate_hardly_changes_with_small_or_instant_transfers() -> None:
    rate = Rate()
    rate.add(0, 5.0)
    rate.add(1 << 20, 0.0)
    assert rate.bytes_per_s == RATE_AT_START
    for _ in range(100):
        rate.add(1000, 0.001)
    assert rate.bytes_per_s > RATE_AT_START * 0.95
