"""The memory that a sequence needs, and the longest sequence that a memory holds: each is the inverse of the
other."""

import pytest

from tests.support.sim.fold import fold_layout
from tidemill.workers.engine.memory_plan import capacity_tokens, extents_for


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_smallest_memory_that_holds_a_sequence(page_tokens: int, *, hybrid: bool) -> None:
    layout = fold_layout(page_tokens, hybrid=hybrid)
    for num_tokens in range(1, 5 * layout.pages_per_extent * page_tokens):
        extents = extents_for(layout, num_tokens)
        assert capacity_tokens(layout, extents - 1) < num_tokens <= capacity_tokens(layout, extents)


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("window", [1, 9, 40])
def test_windows_take_visible_and_in_flight_pages(window: int, *, hybrid: bool) -> None:
    layout = fold_layout(4, hybrid=hybrid, window=window, extent_bytes_min=1)
    plain = fold_layout(4, hybrid=hybrid, extent_bytes_min=1)
    assert layout.extent_bytes == plain.extent_bytes
    for num_tokens in range(1, 200, 3):
        extents = extents_for(layout, num_tokens, 8)
        assert capacity_tokens(layout, extents - 1, 8) < num_tokens <= capacity_tokens(layout, extents, 8)
        windows = extents - extents_for(plain, num_tokens)
        assert windows * layout.windows_per_extent >= min(-(-num_tokens // 4), -(-(window - 1 + 8) // 4) + 1)
        assert windows <= extents_for(layout, 10_000, 8) - extents_for(plain, 10_000), "it does not grow"
