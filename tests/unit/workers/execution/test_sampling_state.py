"""The memory of an answer's draws: counts and position follow pushes and rewinds exactly."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.workers.drawing import request_of
from tidemill.kernels.draw.tables import PROMPT
from tidemill.workers.execution.sampling_state import SamplingState
from tidemill.workers.messages import Sampling

PROPERTY = settings(deadline=None, derandomize=True, max_examples=100)
PENALISED = Sampling(temperature=0, repetition_penalty=1.2, frequency_penalty=0.5)

tokens = st.integers(0, 6)


def counts_of(sampling_state: SamplingState) -> tuple[set[int], Counter[int]]:
    """Return the ids of the prompt, and how often each token stands in the answer."""
    counts = Counter[int]()
    for token, by in sampling_state.changes:
        counts[token] += by
    times = Counter({token: count % PROMPT for token, count in counts.items()})
    return {token for token, count in counts.items() if count >= PROMPT}, +times


@PROPERTY
@given(
    st.lists(tokens, min_size=1, max_size=9),
    st.lists(tokens | st.integers(0, 5).map(lambda back: ~back), max_size=40),
)
def test_counts_follow_pushed_and_forgotten_tokens(prompt: list[int], moves: list[int]) -> None:
    """A negative number -n forgets n - 1 tokens."""
    sampling_state, answer = SamplingState(request_of(PENALISED, prompt)), list[int]()
    for move in moves:
        if move >= 0:
            sampling_state.push(move)
            answer.append(move)
        else:
            kept = max(0, len(answer) + 1 + move)
            sampling_state.rewind(len(prompt) + kept)
            del answer[kept:]
        assert sampling_state.position == len(prompt) + len(answer)
        assert counts_of(sampling_state) == (set(prompt), Counter(answer))


def test_tokens_before_a_loss_count_as_drawn() -> None:
    moved = replace(request_of(PENALISED, (4, 4, 5, 6, 6)), drawn=2)
    sampling_state = SamplingState(moved)
    assert sampling_state.position == 5
    assert counts_of(sampling_state) == ({4, 5}, Counter({6: 2}))
    sampling_state.rewind(3)
    assert counts_of(sampling_state) == ({4, 5}, Counter())


def test_prompt_counts_for_repetition_only() -> None:
    sampling_state = SamplingState(request_of(Sampling(presence_penalty=1.0), (4, 5)))
    sampling_state.push(5)
    assert counts_of(sampling_state) == (set(), Counter({5: 1}))


def test_answer_that_is_too_short_cannot_end() -> None:
    sampling_state = SamplingState(replace(request_of(Sampling(min_tokens=2), (1, 2, 3), (7, 8)), drawn=1))
    assert sampling_state.barred_at(sampling_state.position) == (7, 8)
    sampling_state.push(4)
    assert sampling_state.barred_at(sampling_state.position) == ()
    sampling_state.rewind(3)
    assert sampling_state.barred_at(sampling_state.position) == (7, 8)


def test_bad_words_are_barred_where_the_answer_has_their_beginning() -> None:
    """The prompt does not count; tokens drawn before a loss and drafts do."""
    words = Sampling(bad_words=((9,), (4, 5), (4, 4, 6)))
    sampling_state = SamplingState(replace(request_of(words, (1, 4)), drawn=0))
    assert sampling_state.barred_at(2) == (9,)
    assert sampling_state.barred_at(3, (4,)) == (9, 5)
    assert sampling_state.barred_at(4, (4, 4)) == (9, 5, 6)
    sampling_state.push(4)
    assert sampling_state.barred_at(3) == (9, 5)
    assert sampling_state.barred_at(4, (7,)) == (9,)
    assert sampling_state.barred_at(3, (7,)) == (9,), "the draft stands for the token that was drawn"
    sampling_state.push(4)
    assert sampling_state.barred_at(4) == (9, 5, 6)
    sampling_state.rewind(2)
    assert sampling_state.barred_at(2) == (9,)
    resumed = SamplingState(replace(request_of(words, (1, 4, 4)), drawn=2))
    assert resumed.barred_at(3) == (9, 5, 6)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0, presence_penalty=0.1),
        Sampling(temperature=0, frequency_penalty=-0.1),
        Sampling(temperature=0, repetition_penalty=1.1),
        Sampling(temperature=0, logit_bias=((1, 1.0),)),
        Sampling(temperature=0, bad_words=((1,),)),
        Sampling(temperature=0, logprobs=0),
    ],
)
def test_only_bare_rows_are_drawn_ahead_of_their_tokens(sampling: Sampling) -> None:
    """A temperature, filters and `min_tokens` need no token before them."""
    filtered = Sampling(temperature=0.5, seed=3, top_k=5, top_p=0.5, min_tokens=9)
    assert not SamplingState(request_of(sampling, stop=(1,))).bare
    assert SamplingState(request_of(filtered, stop=(1,))).bare
