"""A prompt is cut by the budget of a step alone: its checkpoints are written inside its rows."""

import pytest

from tests.support.sim.fold import fold_layout
from tests.support.workers.bench import Tuning, a_request, bench, prompt, root_of, run
from tidemill.kvstore.keys import page_keys
from tidemill.kvstore.layout import Layout
from tidemill.workers.messages import Request

P = 16
BUDGET = 512
KINDS = {
    "attention": fold_layout(P, hybrid=False),
    "states": fold_layout(P, hybrid=True),
    "windows": fold_layout(P, hybrid=False, window=100),
    "states and windows": fold_layout(P, hybrid=True, window=100),
}

kinds = pytest.mark.parametrize("layout", KINDS.values(), ids=KINDS)


def checkpoints(first: int, boundary: int) -> set[int]:
    """Return the depths of the checkpoints of a prompt: a grid that is doubled to eight points, and the
    boundary."""
    while boundary > 8 * first:
        first *= 2
    return {*range(first, boundary, first), boundary}


@kinds
@pytest.mark.parametrize("num_tokens", [128, 2048, 8192])
@pytest.mark.parametrize("produces", [False, True])
def test_steps_of_a_prompt(layout: Layout, num_tokens: int, produces: bool) -> None:  # noqa: FBT001  a parameter
    tokens = prompt(num_tokens)
    boundary = (num_tokens - 1) // P * P
    interval = max(4, -(-layout.checkpoint_bytes // layout.page_bytes)) * P

    async def main() -> None:
        async with bench(layout=layout, num_extents=4000, tokens_max=BUDGET, tuning=Tuning()) as one:
            request = Request(request_id="one", tokens=tokens, max_new_tokens=1)
            await (one.engine.produce(request) if produces else one.answer(a_request(tokens, 1)))
            end = boundary if produces else num_tokens
            assert [sum(len(row.tokens) for row in step) for step in one.runner.steps] == [
                min(BUDGET, end - start) for start in range(0, end, BUDGET)
            ]
            if layout.hybrid:
                keys = page_keys(root_of(""), tokens, P)[: boundary // P]
                path = one.ledger.index.match(keys).path
                found = {entry.depth_pages * P for entry in path if entry.checkpoint is not None}
                assert found == checkpoints(interval, boundary)

    run(main())
