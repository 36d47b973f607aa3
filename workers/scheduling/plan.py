"""Plan the rows of the next step. Pure. There are no phases: every sequence catches up with its tokens.

A row runs `[computed, end)`. It ends at the last known token, or on the page grid where the token budget
ends. Checkpoints cut no row: their states are written inside it. Guesses (drafts) follow the token of a
stream when tokens of the budget are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Candidate(NamedTuple):
    """A sequence that can run: `computed < known`, counted as if all steps in flight had landed. `drafts`
    is the number of guesses that follow."""

    sequence_id: str
    computed: int
    known: int
    drafts: int = 0


class Planned(NamedTuple):
    """A row: `num_tokens` known ones, then `drafts` guessed ones."""

    sequence_id: str
    num_tokens: int
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of one step. Some prefill fits beside all streams: tokens_max >= rows_max + page_tokens."""

    tokens_max: int
    rows_max: int
    page_tokens: int

    def __post_init__(self) -> None:
        assert self.tokens_max >= self.rows_max + self.page_tokens, "long prompts would starve"


def plan(candidates: Sequence[Candidate], budget: Budget, prompt_tokens_max: int) -> list[Planned]:
    """Return rows of streams, then of prompts, each in the order of `candidates`; drafts take the rest.

    A stream has one token to run and always runs: no prompt delays it. All prompts together have at most
    `prompt_tokens_max` of the budget.
    """
    rows: list[Planned] = []
    left = budget.tokens_max
    prompts: list[Candidate] = []
    drafted: list[tuple[int, Candidate]] = []
    for candidate in candidates:
        if candidate.known - candidate.computed > 1:
            prompts.append(candidate)
        elif left and len(rows) < budget.rows_max:
            if candidate.drafts:
                drafted.append((len(rows), candidate))
            rows.append(Planned(candidate.sequence_id, 1))
            left -= 1
    prompts_left = min(left, prompt_tokens_max)
    for candidate in prompts:
        num_tokens = _row_tokens(candidate, prompts_left, budget.page_tokens)
        if num_tokens and len(rows) < budget.rows_max:
            rows.append(Planned(candidate.sequence_id, num_tokens))
            prompts_left -= num_tokens
            left -= num_tokens
    for index, candidate in drafted:
        drafts = min(candidate.drafts, left)
        rows[index] = Planned(candidate.sequence_id, 1, drafts)
        left -= drafts
    return rows


def _row_tokens(candidate: Candidate, left: int, page_tokens: int) -> int:
    if candidate.known - candidate.computed <= left:
        return candidate.known - candidate.computed
    return max(0, (candidate.computed + left) // page_tokens * page_tokens - candidate.computed)
