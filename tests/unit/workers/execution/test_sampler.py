"""Draws follow the exact distribution, and depend on logits, earlier tokens, seed and position only."""

from collections import Counter
from dataclasses import replace
from math import exp, inf, log
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.draws import assert_distributed, distribution
from tests.support.workers.drawing import (
    Noise,
    answer_of,
    draw,
    draw_once,
    request_of,
    row_of,
    troubled_answer_of,
)
from tidemill.workers.execution.sampler import uniform_of
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.execution.step import Row
from tidemill.workers.messages import Sampling

CANDIDATES = 1024  # more than filters usually leave
ROUNDING = 1e-6  # of float32

PROPERTY = settings(deadline=None, derandomize=True, max_examples=80)

seeds = st.integers(-(2**63), 2**63 - 1)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    seed=seeds,
)
full_samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([0.6, 1.0]),
    seed=seeds,
    presence_penalty=st.sampled_from([0.0, -1.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3]),
    logit_bias=st.sampled_from([(), ((4, 2.5), (0, -100.0))]),
    min_tokens=st.sampled_from([0, 9]),
    logprobs=st.sampled_from([None, 0, 3]),
)


def random_logits(rows: int, vocabulary: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


@PROPERTY
@given(samplings, st.integers(1, 200), st.integers(0, 2**31), st.integers(1, 10_000))
def test_draw_is_the_inverse_of_the_cumulative_distribution(
    sampling: Sampling, vocabulary: int, logits_seed: int, position: int
) -> None:
    logits_V = random_logits(1, vocabulary, logits_seed)
    (token,) = draw_once(logits_V, [sampling], [position])
    cumulative, uniform = 0.0, uniform_of(sampling.seed, position)
    for candidate, share in distribution(logits_V[0].tolist(), sampling).items():
        below, cumulative = cumulative, cumulative + share
        if candidate == token:
            assert (
                below - ROUNDING <= (0.0 if sampling.temperature == 0 else uniform) <= cumulative + ROUNDING
            )
            return
    pytest.fail(f"{token} was filtered out")


@PROPERTY
@given(
    st.lists(st.tuples(full_samplings, st.lists(st.integers(0, 4), max_size=2)), min_size=1, max_size=9),
    st.integers(5, 300),
    st.integers(0, 2**31),
    st.integers(1, 4),
)
def test_rows_do_not_see_each_other(
    drawn_with: list[tuple[Sampling, list[int]]], vocabulary: int, logits_seed: int, threads: int
) -> None:
    """Each reads the logits behind its own tokens and guesses. Tokens and logprobs are equal to the last
    bit."""
    parts = random_logits(sum(1 + len(drafts) for _, drafts in drawn_with), vocabulary, logits_seed).split(
        [1 + len(drafts) for _, drafts in drawn_with]
    )

    def rows() -> list[Row]:
        return [
            row_of(SamplingState(request_of(sampling, range(row % 4, 5), (1,))), drafts)
            for row, (sampling, drafts) in enumerate(drawn_with)
        ]

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = draw(torch.cat(parts), rows())
        backwards = draw(torch.cat(parts[::-1]), rows()[::-1])
        alone = [draw(part, [row])[0] for part, row in zip(parts, rows(), strict=True)]
    finally:
        torch.set_num_threads(before)
    assert together == alone == backwards[::-1]


def test_ties_go_to_the_lower_id() -> None:
    logits_NV = torch.zeros(1, 70)
    assert draw_once(logits_NV, [Sampling(temperature=0)], [1]) == [0]
    assert draw_once(logits_NV, [Sampling(temperature=0, logit_bias=((69, 0.0),))], [1]) == [0]
    assert draw_once(logits_NV, [Sampling(top_k=1)], [1]) == [0]
    assert {draw_once(logits_NV, [Sampling(top_k=3)], [position])[0] for position in range(1, 60)} == {
        0,
        1,
        2,
    }
    wide_NV = torch.zeros(1, 2 * CANDIDATES)
    assert {draw_once(wide_NV, [Sampling(top_k=3)], [position])[0] for position in range(1, 60)} == {0, 1, 2}


@PROPERTY
@given(full_samplings, st.integers(0, 2**20), st.randoms(use_true_random=False))
def test_guesses_void_steps_and_moves_change_nothing(sampling: Sampling, seed: int, rng: Random) -> None:
    """The same with penalties, which look at all tokens before the draw; logprobs included."""
    model = Noise(vocabulary=11, seed=seed, scale=3.0)
    request = request_of(sampling, prompt=(5, 6, 5), stop=(1,))
    truth = answer_of(model, request, 24)
    troubled = troubled_answer_of(model, request, truth.tokens, rng)
    assert troubled.tokens == truth.tokens
    assert troubled.logprobs == truth.logprobs
    assert len(truth.logprobs) == (0 if sampling.logprobs is None else len(truth.tokens))
    assert 1 not in truth.tokens[: min(sampling.min_tokens, len(truth.tokens))]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.4, top_k=6, top_p=0.95)])
def test_guess_is_accepted_as_often_as_it_is_likely(sampling: Sampling) -> None:
    """The rule of rejection sampling for a guess that is certain of itself: it is accepted with p(guess),
    else the token comes from p without it; behind it, the next one comes from the distribution there."""
    logits_NV = random_logits(2, 12, seed=3)
    first, second = (distribution(logits_V.tolist(), sampling) for logits_V in logits_NV)
    guess, count = list(first)[1], 4000
    sampling_state = [SamplingState(request_of(replace(sampling, seed=seed))) for seed in range(count)]
    drawn = draw(logits_NV.repeat(count, 1), [row_of(state, (guess,)) for state in sampling_state])
    accepted = [result for result in drawn if len(result.tokens) == 2]
    assert all(result.tokens[0] == guess for result in accepted)
    assert all(result.tokens[0] != guess for result in drawn if len(result.tokens) == 1)
    share = first.pop(guess)
    assert abs(len(accepted) - count * share) <= 4 * (count * share * (1 - share)) ** 0.5
    rejected = Counter(result.tokens[0] for result in drawn if len(result.tokens) == 1)
    assert_distributed(rejected, {token: weight / (1 - share) for token, weight in first.items()})
    assert_distributed(Counter(result.tokens[1] for result in accepted), second)


def expected_scores(
    logits_V: list[float], sampling: Sampling, prompt: list[int], answer: list[int]
) -> list[float]:
    """The penalties as OpenAI and vLLM define them, in plain arithmetic."""
    scores = list(logits_V)
    for token in {*prompt, *answer}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, times in Counter(answer).items():
        scores[token] -= times * sampling.frequency_penalty + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    return scores


@PROPERTY
@given(
    full_samplings,
    st.integers(0, 2**20),
    st.lists(st.integers(0, 7), min_size=1, max_size=6),
    st.lists(st.integers(0, 7), max_size=12),
    st.sampled_from([-6.0, 0.0]),
)
def test_penalties_and_bias_are_the_usual_ones(
    sampling: Sampling, seed: int, prompt: list[int], answer: list[int], offset: float
) -> None:
    logits_V = random_logits(1, 8, seed) + offset
    scores = expected_scores(logits_V[0].double().tolist(), sampling, prompt, answer)
    request = replace(
        request_of(replace(sampling, temperature=0), prompt, (1,)),
        tokens=(*prompt, *answer),
        drawn=len(answer),
    )
    if len(answer) < sampling.min_tokens:
        scores[1] = -inf
    ((token,),) = [row_drawn.tokens for row_drawn in draw(logits_V, [row_of(SamplingState(request))])]
    assert scores[token] >= max(scores) - ROUNDING


@PROPERTY
@given(st.integers(1, 20), st.integers(0, 25), st.integers(0, 2**20))
def test_logprobs_are_those_of_the_model(vocabulary: int, most: int, seed: int) -> None:
    """Natural logarithms before temperature, bias and filters; the likeliest first, equal ones by id."""
    logits_V = (2 * random_logits(1, vocabulary, seed)).round() / 2
    sampling = Sampling(temperature=0.5, logprobs=most, logit_bias=((0, 3.0),), seed=seed)
    (drawn,) = draw(logits_V, [row_of(SamplingState(request_of(sampling)))])
    logits = logits_V[0].tolist()
    total = log(sum(map(exp, logits)))
    order = sorted(range(vocabulary), key=lambda token: (-logits[token], token))[:most]
    (found,) = drawn.logprobs
    assert [token for token, _ in found.top] == order
    assert found.logprob == pytest.approx(logits[drawn.tokens[0]] - total)
    assert [value for _, value in found.top] == pytest.approx([logits[token] - total for token in order])


def test_ids_beyond_the_vocabulary_are_passed_over() -> None:
    sampling = Sampling(temperature=0, logit_bias=((99, 5.0),), min_tokens=3)
    (drawn,) = draw(torch.tensor([[0.0, 1.0]]), [row_of(SamplingState(request_of(sampling, (0,), (1, 99))))])
    assert drawn.tokens == (0,)


def test_bad_words_are_never_drawn_with_drafts_or_without() -> None:
    """A token that completes a word is not drawn but the next best, and a draft of the word is wrong."""
    sampling = Sampling(temperature=0, bad_words=((3, 4), (6,)))
    best = torch.zeros(3, 8)
    best[0, 3], best[1, 4], best[1, 5], best[2, 6], best[2, 7] = 2.0, 2.0, 1.0, 2.0, 1.0
    state = SamplingState(request_of(sampling))
    for logits_V, token in zip(best, (3, 5, 7), strict=True):
        (drawn,) = draw(logits_V[None], [row_of(state)])
        assert drawn.tokens == (token,)
    right = [row_of(SamplingState(request_of(sampling)), (3, 5))]
    assert draw(best, right)[0].tokens == (3, 5, 7)
    wrong = [row_of(SamplingState(request_of(sampling)), (3, 4))]
    assert draw(best, wrong)[0].tokens == (3, 5)


@PROPERTY
@given(seeds, st.integers(0, 2**40))
def test_uniform_numbers_are_in_range_and_belong_to_seed_and_position(seed: int, position: int) -> None:
    uniform = uniform_of(seed, position)
    assert 0 <= uniform < 1
    assert uniform == uniform_of(seed, position)
    assert uniform != uniform_of(seed, position + 1)
    assert uniform != uniform_of(seed ^ 1, position)


def test_workers_of_different_versions_draw_alike() -> None:
    """A stream moves between them: this number may only change together with the way streams move."""
    assert uniform_of(5, 100) == 0.5148014099128798
