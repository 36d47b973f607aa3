"""The logprobs of a prompt come whole and once, whatever is kept, cut, preempted or lost."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.launched import META, Counted
from tests.support.sim.fold import expected_scores
from tests.support.workers.bench import IN_VIRTUAL_TIME, UNWINDOWED, a_request, bench, prompt
from tests.support.workers.logprobs import token_logprob
from tidemill.kvstore.layout import Layout
from tidemill.workers.execution.logprobs import CHUNK_TOKENS, scores_of, start_logprobs, start_scores
from tidemill.workers.execution.step import Row, Scores
from tidemill.workers.messages import Request, Sampling, TokenLogprob

pytestmark = IN_VIRTUAL_TIME


def scored(num_tokens: int, seed: int = 0, max_new_tokens: int = 6, alternatives: int = 1) -> Request:
    sampling = Sampling(seed=1, prompt_logprobs=alternatives)
    return replace(a_request(prompt(num_tokens, seed), max_new_tokens), sampling=sampling)


@UNWINDOWED
async def test_nothing_is_restored_for_it_and_all_is_kept(layout: Layout) -> None:
    async with bench(layout=layout) as one:
        request = scored(30, max_new_tokens=1)
        assert (await one.answer(request)).computed_tokens == 30
        assert (await one.answer(request)).computed_tokens == 30, "the model must see all of it again"
        assert (await one.answer(a_request(prompt(30), 1))).reused_tokens == 28


@UNWINDOWED
@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 11, 28, 29, 30])
async def test_retry_delivers_only_the_missing_logprobs(layout: Layout, done: int) -> None:
    async with bench(layout=layout, tokens_max=12) as one:
        await one.answer(a_request(prompt(31), 1))
        request = replace(scored(31), scored=done)
        provenance = await one.answer(request)
        if done == 30:
            assert provenance.computed_tokens <= 7, "nothing is left of it"
        else:
            assert provenance.reused_tokens <= done
        assert one.runner.steps[-1]


async def test_answer_of_a_lost_worker_is_no_part_of_the_prompt() -> None:
    async with bench() as one:
        request = scored(10)
        drawn = [token for delta in await one.read(request) for token in delta.tokens]
        again = replace(request, tokens=(*request.tokens, *drawn[:3]), drawn=3, max_new_tokens=3)
        scores = [score for delta in await one.read(again) for score in delta.prompt_logprobs]
        assert scores == expected_scores(request, hybrid=True)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 80), st.integers(0, 3), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 4),
)
def test_each_row_is_scored_by_its_own_logits(rows: list[tuple[int, int, bool]], alternatives: int) -> None:
    """Hidden states are logits here; a chunk holds a few of them."""
    logits_TV = torch.randn(sum(n for n, _, _ in rows), 7, generator=torch.Generator().manual_seed(1))
    step: list[Row] = []
    wanted: list[tuple[TokenLogprob, ...]] = []
    begin = 0
    for num_tokens, skipped, asks in rows:
        offset = min(skipped, num_tokens - 1)
        targets = tuple(place % 7 for place in range(num_tokens - offset))
        scores = Scores(offset, targets, alternatives) if asks else None
        step.append(Row("", (0,) * num_tokens, 0, (), None, (), scores=scores))
        logprobs_NV = logits_TV[begin + offset : begin + num_tokens].double().log_softmax(dim=-1)
        found = zip(logprobs_NV, targets, strict=True)
        wanted.append(tuple(token_logprob(result, token, alternatives) for result, token in found if asks))
        begin += num_tokens
    sizes: list[int] = []

    def logits(hidden_NV: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_NV))
        return hidden_NV

    assert scores_of(logits, logits_TV, tuple(step)) == (wanted if any(asks for *_, asks in rows) else [])
    assert all(size <= CHUNK_TOKENS for size in sizes)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 7), min_size=1, max_size=5))
def test_concurrent_requests_get_what_each_gets_alone(
    seed: int, alternatives: int, tokens: list[int]
) -> None:
    """Few different numbers, so that many are equal."""
    source = torch.Generator().manual_seed(seed)
    logits_NV = torch.randint(0, 2 + 3 * seed, (len(tokens), 8), generator=source).double()
    logprobs_NV = logits_NV.log_softmax(dim=-1)
    alone = [
        token_logprob(row_V, token, alternatives) for row_V, token in zip(logprobs_NV, tokens, strict=True)
    ]
    assert start_logprobs(logprobs_NV, torch.tensor(tokens), alternatives).read() == alone


def test_host_waits_for_no_part_of_a_prompt() -> None:
    step = (Row("", (0,) * 200, 0, (), None, (), scores=Scores(0, (1,) * 200, 3)),)
    with Counted() as counted:
        (launched,) = start_scores(lambda hidden_NV: hidden_NV, torch.empty(200, 50, device=META), step)
    assert [chunk.numbers_NC.shape for chunk in launched] == [(32, 7)] * 6 + [(8, 7)]
    assert (counted.to_device, counted.to_host) == (1, 0)
