"""What the next step runs. Pure: there are no phases, every sequence catches up with its tokens.

A row runs `[computed, end)`. It ends at the last known token, or at a cut (a depth where a checkpoint is
wanted), or on the page grid where the token budget runs out. The state at a boundary is then the final state
of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A sequence that can run: `computed < known`; `cut` is the next depth where a row of it must end, or
    None."""

    sequence_id: str
    computed: int
    known: int
    cut: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one step. Some prefill always fits beside the short rows: tokens_max >= rows_max +
    page_tokens."""

    tokens_max: int
    rows_max: int
    page_tokens: int

    def __post_init__(self) -> None:
        assert self.tokens_max >= self.rows_max + self.page_tokens, "long prompts would starve"


def plan(candidates: Sequence[Candidate], budget: Budget) -> list[tuple[str, int]]:
    """Rows as (sequence id, tokens to run): short rows first, then long ones, each in the order of
    `candidates`.

    A short row (a decode token, a tail) has at most a page to run; a stream is never held up by a long
    prompt.
    """
    rows: list[tuple[str, int]] = []
    left = budget.tokens_max
    short = [one for one in candidates if one.known - one.computed <= budget.page_tokens]
    long = [one for one in candidates if one.known - one.computed > budget.page_tokens]
    for one in [*short, *long][: budget.rows_max]:
        num_tokens = _row_tokens(one, left, budget.page_tokens)
        if num_tokens:
            rows.append((one.sequence_id, num_tokens))
            left -= num_tokens
    return rows


def _row_tokens(one: Candidate, left: int, page_tokens: int) -> int:
    end = one.known if one.cut is None else min(one.known, one.cut)
    if end - one.computed <= left:
        return end - one.computed
    return max(0, (one.computed + left) // page_tokens * page_tokens - one.computed)
