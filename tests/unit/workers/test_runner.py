"""Steps become tensors and logits become tokens: each row its own, whatever lies beside it."""
# pyright: basic
# torch's conversions to lists are untyped.

import asyncio

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kvstore.layout import PageId, StateId
from tidemill.workers.inputs import Caches, Inputs
from tidemill.workers.messages import Sampling
from tidemill.workers.runner import TorchRunner, inputs_of
from tidemill.workers.sampling import draw
from tidemill.workers.step import Row, Step

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
VOCABULARY = 50
NO_CACHES = Caches((), (), ())

state_ids = st.none() | st.integers(0, 9).map(StateId)


@st.composite
def rows(draw_from: st.DrawFn, page_tokens: int) -> Row:
    start = draw_from(st.integers(0, 20))
    tokens = draw_from(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12))
    needed = -(-(start + len(tokens)) // page_tokens)
    reserved = draw_from(st.integers(0, 2))
    pages = draw_from(st.lists(st.integers(1, 99), min_size=needed + reserved, max_size=needed + reserved))
    return Row(
        sequence_id="",
        tokens=tuple(tokens),
        start=start,
        pages=tuple(map(PageId, pages)),
        read=draw_from(state_ids) if start else None,
        write=draw_from(state_ids),
        sampling=draw_from(
            st.none() | st.builds(Sampling, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 5))
        ),
    )


@st.composite
def steps(draw_from: st.DrawFn) -> tuple[Step, int]:
    page_tokens = draw_from(st.sampled_from([1, 4, 16]))
    return tuple(draw_from(st.lists(rows(page_tokens), min_size=1, max_size=5))), page_tokens


class Echo:
    """A model whose hidden states are (token, position), and whose logits are noise seeded by both."""

    def __init__(self) -> None:
        self.seen: list[Inputs] = []

    def forward(self, inputs: Inputs, caches: Caches) -> torch.Tensor:
        assert caches is NO_CACHES
        assert torch.is_inference_mode_enabled()
        self.seen.append(inputs)
        return torch.stack([inputs.tokens_T, inputs.positions_T], dim=1)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        return torch.stack([noise(int(token), int(position)) for token, position in hidden_NH])


def noise(token: int, position: int) -> torch.Tensor:
    return torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1000 * position + token))


@PROPERTY
@given(steps())
def test_the_integers_of_a_step(drawn: tuple[Step, int]) -> None:
    step, page_tokens = drawn
    inputs = inputs_of(step, page_tokens)
    assert inputs.tokens_T.dtype == inputs.positions_T.dtype == torch.int64
    for tensor in (inputs.cu_B1, inputs.pages_BN, inputs.lens_B, inputs.read_B, inputs.write_B):
        assert tensor.dtype == torch.int32
    cu = inputs.cu_B1.tolist()
    assert (len(cu), cu[0], cu[-1]) == (len(step) + 1, 0, len(inputs.tokens_T))
    for index, row in enumerate(step):
        first, last = cu[index], cu[index + 1]
        end = row.start + len(row.tokens)
        assert inputs.tokens_T[first:last].tolist() == list(row.tokens)
        assert inputs.positions_T[first:last].tolist() == list(range(row.start, end))
        assert int(inputs.lens_B[index]) == end
        reached = -(-end // page_tokens)
        table = inputs.pages_BN[index].tolist()
        assert table[:reached] == list(row.pages[:reached])
        assert not any(table[reached:])
        assert int(inputs.read_B[index]) == (-1 if row.read is None else row.read)
        assert int(inputs.write_B[index]) == (-1 if row.write is None else row.write)
    assert inputs.pages_BN.shape[1] == max(-(-int(end) // page_tokens) for end in inputs.lens_B)


@PROPERTY
@given(steps())
def test_each_row_draws_from_its_last_token_at_the_position_behind_it(drawn: tuple[Step, int]) -> None:
    step, page_tokens = drawn
    tokens = TorchRunner(Echo(), NO_CACHES, page_tokens, threads=1).run_now(step)
    for row, token in zip(step, tokens, strict=True):
        if row.sampling is None:
            assert token is None
        else:
            end = row.start + len(row.tokens)
            logits = noise(row.tokens[-1], end - 1).unsqueeze(0)
            assert [token] == draw(logits, [row.sampling], [end])


def test_a_step_runs_beside_the_event_loop() -> None:
    row = Row(
        sequence_id="a", tokens=(3, 4), start=0, pages=(PageId(1),), read=None, write=None, sampling=None
    )
    model = Echo()
    runner = TorchRunner(model, NO_CACHES, page_tokens=4, threads=1)
    assert asyncio.run(runner.run((row,))) == [None]
    assert len(model.seen) == 1
