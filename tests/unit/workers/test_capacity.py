"""How much memory a sequence needs, and how long a sequence memory holds: one is the other turned round."""

import pytest

from tests.sim.fold import fold_layout
from tidemill.workers.build import capacity_tokens, extents_for


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_the_smallest_memory_that_holds_a_sequence(page_tokens: int, hybrid: bool) -> None:  # noqa: FBT001  a parameter
    layout = fold_layout(page_tokens, hybrid=hybrid)
    for num_tokens in range(1, 5 * layout.pages_per_extent * page_tokens):
        extents = extents_for(layout, num_tokens)
        assert capacity_tokens(layout, extents - 1) < num_tokens <= capacity_tokens(layout, extents)
