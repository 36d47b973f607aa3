"""Guesses are what a plain search of the text finds, and their number follows their success."""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.workers.execution.ngram_drafter import START_TOKENS, HeadDrafter, NgramDrafter

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)


def found(tokens: Sequence[int], longest: int, shortest: int, length: int) -> list[int]:
    """The definition: the longest run of last tokens that stands elsewhere, its latest place; what follows
    it, copied token by token."""
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                text = list(tokens)
                for step in range(length):
                    text.append(text[place + step])
                return text[len(tokens) :]
    return []


@PROPERTY
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), max_size=10),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 12),
)
def test_guesses_equal_those_of_a_search(
    tokens: list[int], steps: list[int], shortest: int, more: int, most: int
) -> None:
    """However the text has grown."""
    drafter = NgramDrafter(longest=shortest + more, shortest=shortest)
    end = 1
    for step in [*steps, len(tokens)]:
        known = tokens[:end]
        guesses = list(drafter.propose(known, most))
        expected = found(known, shortest + more, shortest, most)
        assert guesses == expected[: len(guesses)]
        assert bool(guesses) == bool(expected)
        assert list(drafter.propose(known, most)) == guesses, "asking twice changes nothing"
        end = min(end + step, len(tokens))


def run(truth: Sequence[int], start: int, most: int, drafter: NgramDrafter) -> list[tuple[int, int]]:
    """(tried, right) of each step of an answer that continues `truth[:start]`."""
    trials: list[tuple[int, int]] = []
    known = start
    while known < len(truth):
        guesses = drafter.propose(truth[:known], most)
        right = 0
        while right < len(guesses) and truth[known + right : known + right + 1] == [guesses[right]]:
            right += 1
        trials.append((len(guesses), right))
        known += right + 1
    return trials


def test_text_that_repeats_itself_comes_in_ever_longer_steps() -> None:
    truth = list(range(10)) * 12
    trials = run(truth, 22, 16, NgramDrafter())
    assert [tried for tried, _ in trials[:4]] == [START_TOKENS, 8, 16, 16]
    assert all(tried == right for tried, right in trials[:-1])


def test_guesses_that_fail_get_fewer() -> None:
    drafter = NgramDrafter()
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert list(drafter.propose(text, 8)) == [3, 4, 5, 6]
    text += [3, 9, 1, 2]  # the first was right
    assert list(drafter.propose(text, 8)) == [3, 9]
    text += [8, 1, 2]  # none
    assert list(drafter.propose(text, 8)) == [8]
    text += [8, 1]  # the only one: twice as many
    assert list(drafter.propose(text, 8)) == [2, 8]


def test_trial_that_was_cut_short_takes_nothing_away() -> None:
    """Guesses stop at a page boundary, and go on behind it as before."""
    drafter, truth = NgramDrafter(), list(range(10)) * 12
    assert len(drafter.propose(truth[:22], 16)) == 4
    assert len(drafter.propose(truth[:27], 1)) == 1
    assert len(drafter.propose(truth[:29], 16)) == 8


def test_guesses_of_the_runner_are_given_out_for_the_tokens_they_follow() -> None:
    drafter = HeadDrafter()
    assert drafter.propose([1, 2], 4) == ()
    drafter.accept_proposals((7, 8, 9), 3)
    assert drafter.propose([1, 2, 3], 2) == (7, 8)
    assert drafter.propose([1, 2, 3], 4) == (7, 8, 9)
    assert drafter.propose([1, 2, 3, 7], 4) == ()
    drafter.accept_proposals((), 4)
    assert drafter.propose([1, 2, 3, 7], 4) == ()
