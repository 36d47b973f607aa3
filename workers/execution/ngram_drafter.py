"""Guess the next tokens, which run as drafts in one step with the token before them.

The answer does not depend on guesses: a wrong guess only costs its computation.
"""

from collections.abc import Sequence
from typing import Protocol

START_TOKENS = 4
"""The number of guesses in the first trial: a quoted sentence usually continues for at least that long."""


class Drafter(Protocol):
    """Makes guesses for one sequence."""

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return at most `most` tokens that may follow `tokens`, those of the sequence so far. They extend
        the tokens of the previous call. Two calls may have the same tokens."""
        ...

    def accept_proposals(self, guesses: Sequence[int], num_tokens: int) -> None:
        """Record that a row has landed, with which the sequence has `num_tokens`. `guesses` are those of the
        runner, for the tokens after them."""
        ...


class HeadDrafter:
    """Returns the latest guesses of the runner, from the model's own prediction head (see
    workers/execution/mtp_drafter.py)."""

    def __init__(self) -> None:
        self._guesses: Sequence[int] = ()
        self._behind = 0  # the number of tokens that they follow

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return self._guesses[:most] if len(tokens) == self._behind else ()

    def accept_proposals(self, guesses: Sequence[int], num_tokens: int) -> None:
        self._guesses, self._behind = guesses, num_tokens


class NgramDrafter:
    """Prompt lookup: return what followed an earlier occurrence of the last tokens, the latest one first.

    The last `longest` tokens are looked up, then fewer, down to `shortest`. A new token costs one entry in
    each table, together about 0.3 kB and a microsecond, for a text of any length. The idea is from
    A. Saxena, "Prompt Lookup Decoding" (2023).
    """

    def __init__(self, *, longest: int = 4, shortest: int = 2) -> None:
        assert 0 < shortest <= longest
        self._follows: dict[int, dict[tuple[int, ...], int]] = {
            size: {} for size in range(longest, shortest - 1, -1)
        }
        self._num_indexed = 0  # positions whose n-grams are in the tables
        self._guesses: list[int] = []  # the latest guesses
        self._guessed_at = 0  # the position of the first of them
        self._length = START_TOKENS

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self._judge(tokens)
        self._extend(tokens)
        self._guesses = self._copied(tokens, min(most, self._length))
        self._guessed_at = len(tokens)
        return self._guesses

    def accept_proposals(self, guesses: Sequence[int], num_tokens: int) -> None:
        """Do nothing: this drafter needs no guesses of the runner."""

    def _judge(self, tokens: Sequence[int]) -> None:
        """Compare the latest guesses with the tokens that followed, whether or not they ran."""
        came = tokens[self._guessed_at : self._guessed_at + len(self._guesses)]
        right = 0
        while right < len(came) and came[right] == self._guesses[right]:
            right += 1
        if came and (right < len(came) or right == len(self._guesses)):
            self._length = next_length(self._length, len(self._guesses), right)

    def _extend(self, tokens: Sequence[int]) -> None:
        """Index each position that has a token before it. Nothing is known to follow the last token yet."""
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
                while len(copied) < length:  # the copy may continue into itself
                    copied.append(copied[-period])
                return copied
        return []


def next_length(length: int, tried: int, right: int) -> int:
    """Return the number of guesses in the next trial. This trial might have had `length`, had `tried`, and
    its first `right` were right. The next has twice as many after a full success, else one more than were
    right."""
    return max(length, 2 * tried) if right == tried else right + 1
