"""The tables of a step's draws: rows of float64, so that all of them travel to a device in one copy."""

from enum import IntEnum
from math import ceil

ONE = 1 << 40
"""The weight of the most likely token. Others have the integer part of `ONE` times their ratio to it."""

PROMPT = 1 << 30
"""A flag in a count of the table: the token occurs in the prompt."""

NO_ROOM = -1
"""ROOM of a draw without filters."""

LOG2_E = 1.4426950408889634


class DrawField(IntEnum):
    """The fields of one draw.

    SOURCE      the row of the logits; or `-1 - m`, row m of the adjusted scores
    SCALE       log2(e) / temperature, rounded to float32; 0: the most likely token
    UNIFORM     in [0, 1)
    ROOM        a number below that of the filtered draws, which no other draw has; -1: no filter
    TOP_K       tokens; 0: no filter
    TOP_P       a share of the whole weight; 1 or more: no filter
    LEAST       the least weight that min_p leaves; 0: no filter
    """

    SOURCE = 0
    SCALE = 1
    UNIFORM = 2
    ROOM = 3
    TOP_K = 4
    TOP_P = 5
    LEAST = 6


class AdjustmentField(IntEnum):
    """The fields of one row of adjusted scores.

    SOURCE      the row of the logits
    SLOT        the row of the counts; -1: none
    REPETITION, PRESENCE, FREQUENCY     the penalties; 1 and 0 do nothing
    MASK        the row of the masks; -1: every token may follow
    BEGIN, END  its items, each token at most once
    """

    SOURCE = 0
    SLOT = 1
    REPETITION = 2
    PRESENCE = 3
    FREQUENCY = 4
    MASK = 5
    BEGIN = 6
    END = 7


class ItemField(IntEnum):
    """The fields of what one row does to one token: `MORE` to its count, `SHIFT` (float32) to its score."""

    TOKEN = 0
    MORE = 1
    SHIFT = 2


class ChangeField(IntEnum):
    """The fields of one change of the counts: `BY` is added to the count of a token."""

    SLOT = 0
    TOKEN = 1
    BY = 2


def scale_of(temperature: float) -> float:
    """Return SCALE: 0 for greedy."""
    return LOG2_E / temperature if temperature > 0 else 0.0


def least_of(min_p: float) -> int:
    return ceil(min_p * ONE)
