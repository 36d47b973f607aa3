"""Guesses of the tokens that come next, for trial in one step with the token before them.

Whatever is guessed, the answer is the same: a wrong guess costs its computation and nothing else.
"""

from collections.abc import Sequence
from typing import Protocol

START_TOKENS = 4
"""What a first trial has: as many as a sentence that is quoted usually goes on for, at least."""


class Drafter(Protocol):
    """Guesses for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """At most so many tokens that may follow `tokens`, those of the sequence so far: the tokens of the
        call before and what has come since. May be asked again before anything has."""
        ...

    def accept_proposals(self, guesses: Sequence[int], num_tokens: int) -> None:
        """A row has landed, and with what it drew the sequence has so many tokens. `guesses` are the
        runner's, of what follows them."""
        ...


class HeadDrafter:
    """The runner guesses, with a head of the model's own (workers/execution/mtp_drafter.py): gives out
    what came last."""

    def __init__(self) -> None:
        self._guesses: Sequence[int] = ()
        self._behind = 0  # the number of tokens that they follow

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return self._guesses[:most] if len(tokens) == self._behind else ()

    def accept_proposals(self, guesses: Sequence[int], num_tokens: int) -> None:
        self._guesses, self._behind = guesses, num_tokens


class NgramDrafter:
    """Prompt lookup: what followed the last tokens where they stood before, the latest place first.

    The last `longest` tokens are looked up, then fewer, down to `shortest`. A new token costs one entry in
    each of the tables, about 0.3 kB and a microsecond in all, however long the text. The idea is from
    A. Saxena, "Prompt Lookup Decoding" (2023).
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        assert 0 < shortest <= longest
        self._follows: dict[int, dict[tuple[int, ...], int]] = {
            size: {} for size in range(longest, shortest - 1, -1)
        }
        self._num_indexed = 0  # places whose grams are in the tables
        self._guesses: list[int] = []  # the last ones given
        self._guessed_at = 0  # ... for the tokens from here
        self._length = START_TOKENS

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._judge(tokens)
        self._extend(tokens)
        self._guesses = self._copied(tokens, min(most, self._length))
        self._guessed_at = len(tokens)
        return self._guesses

    def accept_proposals(self, guesses: Sequence[int], num_tokens: int) -> None:
        """It guesses by itself."""

    def _judge(self, tokens: Sequence[int]) -> None:
        """Compare the last guesses with what came, tried or not."""
        came = tokens[self._guessed_at : self._guessed_at + len(self._guesses)]
        right = 0
        while right < len(came) and came[right] == self._guesses[right]:
            right += 1
        if came and (right < len(came) or right == len(self._guesses)):
            self._length = next_length(self._length, len(self._guesses), right)

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index each place that has a token before it; the one behind the last token follows nothing yet
        known."""
        assert self._num_indexed <= len(tokens)
        for position in range(max(1, self._num_indexed), len(tokens)):
            for size, follows in self._follows.items():
                if size <= position:
                    follows[tuple(tokens[position - size : position])] = position
        self._num_indexed = len(tokens)

    def _copied(self, tokens: Sequence[int], length: int) -> list[int]:
        for size, follows in self._follows.items():
            position = follows.get(tuple(tokens[-size:]))
            if position is not None and len(tokens) >= size:
                period = len(tokens) - position
                copied = list(tokens[position : position + length])
                while len(copied) < length:  # what is copied goes on into the copy
                    copied.append(copied[-period])
                return copied
        return []


def next_length(length: int, tried: int, right: int) -> int:
    """How many guesses the next trial may have, when this one might have had `length`, had `tried`, and the
    first `right` of them were: twice as many after a full success, else one more than were right."""
    return max(length, 2 * tried) if right == tried else right + 1
