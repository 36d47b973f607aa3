"""The memory benchmark's model and clock: a formula of the step, and virtual time."""

import asyncio

import pytest
from benchmarks.memory.figures import Outcome, Sample
from benchmarks.memory.served_model import COST, Device, qwen_layout, step_seconds

from tidemill.cluster.simulate.clock import run_virtual
from tidemill.kvstore.layout import PageId, StateId
from tidemill.kvstore.memory.lease import StateWrite
from tidemill.workers.execution.step import Row
from tidemill.workers.messages import NO_MEMORY

pytestmark = pytest.mark.slow

LAYOUT = qwen_layout(64)
DEVICE = Device(step_s=1.0, flops_per_s=1e12, bytes_per_s=1e9)


def a_row(start: int, num_tokens: int) -> Row:
    pages = -(-(start + num_tokens) // 64)
    return Row(
        sequence_id="r",
        tokens=(1,) * num_tokens,
        start=start,
        pages=tuple(map(PageId, range(pages))),
        read=None,
        writes=(StateWrite(start + num_tokens, StateId(0)),),
    )


def test_proportions_are_those_of_the_model() -> None:
    assert LAYOUT.page_bytes == 64 * 24_576
    assert LAYOUT.state_bytes == 3_216 * 24_576
    assert LAYOUT.states_per_extent == 1


def test_step_costs_its_start_its_flops_and_its_bytes() -> None:
    empty = step_seconds((), LAYOUT, COST, DEVICE)
    first = step_seconds((a_row(0, 64),), LAYOUT, COST, DEVICE)
    assert empty == 1.0
    moved_bytes = LAYOUT.page_bytes + 2 * LAYOUT.state_bytes
    assert first == pytest.approx(1.0 + COST.flops(0, 64) / 1e12 + moved_bytes / 1e9)
    both = step_seconds((a_row(0, 64), a_row(640, 1)), LAYOUT, COST, DEVICE)
    alone = step_seconds((a_row(640, 1),), LAYOUT, COST, DEVICE)
    assert both == pytest.approx(first + alone - 1.0)


def test_deadlock_ends_the_run() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="deadlock"):
        run_virtual(main())


def test_means_are_weighted_by_time() -> None:
    half = NO_MEMORY | {"pages_live": 1, "states_cached": 1, "free": 1, "empty": 1}
    full = NO_MEMORY | {"pages_live": 4}
    outcome = Outcome(
        makespan_s=5.0,
        output_tokens=10,
        prompts=[100, 300],
        reused=[0, 100],
        counters={},
        preemptions_max=0,
        samples=[Sample(1.0, 1, 2, half), Sample(2.0, 3, 3, full)],
    )
    figures = outcome.figures()
    assert figures["in_flight_mean"] == pytest.approx((1 + 3 * 3) / 4)
    assert figures["usage_mean"] == pytest.approx((0.5 + 3 * 1) / 4)
    assert figures["time_full"] == pytest.approx(3 / 4)
    assert figures["slots_per_row"] == pytest.approx((2 + 9) / (1 + 9))
    assert figures["output_tokens_per_s"] == pytest.approx(2.0)
    assert figures["token_hit_rate"] == pytest.approx(0.25)
    assert 0 < figures["flops_saved_rate"] < 0.25
