"""The plan of a step equals that of a scheduler that goes token by token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.workers.scheduling.plan import Budget, Candidate, Planned, plan

PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    page_tokens, rows_max = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(1, 6))
    spare = draw(st.integers(0, 40))
    return Budget(tokens_max=rows_max + page_tokens + spare, rows_max=rows_max, page_tokens=page_tokens)


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    drawn: list[Candidate] = []
    for index in range(draw(st.integers(0, 9))):
        computed = draw(st.integers(0, 80))
        known = computed + draw(st.just(1) | st.integers(1, 100))
        drafts = draw(st.integers(0, 5)) if known == computed + 1 else 0
        drawn.append(Candidate(str(index), computed, known, drafts))
    return drawn


prompt_limits = st.integers(0, 60)


def is_stream(one: Candidate) -> bool:
    return one.known - one.computed == 1


def gold(candidates: list[Candidate], budget: Budget, prompt_tokens_max: int) -> list[Planned]:
    """Token by token: a row grows while there are tokens for it, and ends where a row may end."""
    page = budget.page_tokens
    streams = [candidate for candidate in candidates if is_stream(candidate)]
    prompts = [candidate for candidate in candidates if not is_stream(candidate)]
    tokens = {candidate.sequence_id: 0 for candidate in candidates}
    drafts = {candidate.sequence_id: 0 for candidate in candidates}
    left, prompts_left = budget.tokens_max, prompt_tokens_max
    chosen: list[Candidate] = []
    for candidate in [*streams, *prompts]:
        ends_at = None
        position = candidate.computed
        allowed = left if is_stream(candidate) else min(left, prompts_left)
        while position - candidate.computed < allowed:
            position += 1
            if position % page == 0:
                ends_at = position
            if position == candidate.known:
                ends_at = position
                break
        if ends_at is None or len(chosen) == budget.rows_max:
            continue
        chosen.append(candidate)
        tokens[candidate.sequence_id] = ends_at - candidate.computed
        left -= ends_at - candidate.computed
        prompts_left -= 0 if is_stream(candidate) else ends_at - candidate.computed
    for candidate in chosen:
        while drafts[candidate.sequence_id] < candidate.drafts and left:
            drafts[candidate.sequence_id] += 1
            left -= 1
    return [
        Planned(candidate.sequence_id, tokens[candidate.sequence_id], drafts[candidate.sequence_id])
        for candidate in chosen
    ]


@PROPERTY
@given(candidate_lists(), budgets(), prompt_limits)
def test_it_is_the_plan_of_the_gold_scheduler(
    candidates: list[Candidate], budget: Budget, prompt_tokens_max: int
) -> None:
    rows = plan(candidates, budget, prompt_tokens_max)
    assert rows == gold(candidates, budget, prompt_tokens_max)
    assert sum(row.num_tokens + row.drafts for row in rows) <= budget.tokens_max
    streams = {candidate.sequence_id for candidate in candidates if is_stream(candidate)}
    assert sum(row.sequence_id in streams for row in rows) == min(len(streams), budget.rows_max)
    assert sum(row.num_tokens for row in rows if row.sequence_id not in streams) <= prompt_tokens_max


def test_budget_that_starves_long_prompts_is_refused() -> None:
    with pytest.raises(AssertionError, match="starve"):
        Budget(tokens_max=10, rows_max=8, page_tokens=4)
