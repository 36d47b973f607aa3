"""The plan of a step keeps its budget, the page grid and everybody's turn."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.workers.plan import Budget, Candidate, plan

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)


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
        cut = draw(st.none() | st.integers(computed + 1, known + 20))
        drawn.append(Candidate(sequence_id=str(index), computed=computed, known=known, cut=cut))
    return drawn


def end_of(one: Candidate) -> int:
    return one.known if one.cut is None else min(one.known, one.cut)


def is_short(one: Candidate, budget: Budget) -> bool:
    return one.known - one.computed <= budget.page_tokens


@PROPERTY
@given(candidate_lists(), budgets())
def test_the_budget_is_kept(candidates: list[Candidate], budget: Budget) -> None:
    rows = plan(candidates, budget)
    assert sum(num_tokens for _, num_tokens in rows) <= budget.tokens_max
    assert len(rows) <= budget.rows_max
    assert len({sequence_id for sequence_id, _ in rows}) == len(rows)


@PROPERTY
@given(candidate_lists(), budgets())
def test_a_row_ends_where_a_row_may_end(candidates: list[Candidate], budget: Budget) -> None:
    """At the last known token, at the cut, or on the page grid; and never behind the first two."""
    by_id = {one.sequence_id: one for one in candidates}
    for sequence_id, num_tokens in plan(candidates, budget):
        one = by_id[sequence_id]
        end = one.computed + num_tokens
        assert one.computed < end <= end_of(one)
        assert end == end_of(one) or end % budget.page_tokens == 0


@PROPERTY
@given(candidate_lists(), budgets())
def test_short_rows_first_and_each_kind_in_order(candidates: list[Candidate], budget: Budget) -> None:
    by_id = {one.sequence_id: one for one in candidates}
    rows = [by_id[sequence_id] for sequence_id, _ in plan(candidates, budget)]
    assert rows == sorted(rows, key=lambda one: (not is_short(one, budget), candidates.index(one)))


@PROPERTY
@given(candidate_lists(), budgets())
def test_no_row_is_shorter_than_it_has_to_be(candidates: list[Candidate], budget: Budget) -> None:
    """A row that stops early could not have reached its end, nor one more page, with what was left for it."""
    rows = dict(plan(candidates, budget))
    left = budget.tokens_max
    ordered = sorted(candidates, key=lambda one: not is_short(one, budget))
    for one in ordered[: budget.rows_max]:
        num_tokens = rows.pop(one.sequence_id, 0)
        end = one.computed + num_tokens
        if end < end_of(one):
            assert end_of(one) - one.computed > left
            next_boundary = (end // budget.page_tokens + 1) * budget.page_tokens
            assert next_boundary - one.computed > left
        left -= num_tokens
    assert not rows


@PROPERTY
@given(candidate_lists(), budgets())
def test_nobody_starves(candidates: list[Candidate], budget: Budget) -> None:
    """Applied again and again, everything that is known is computed, and every step computes something."""
    waiting = {one.sequence_id: one for one in candidates}
    turns = 0
    while waiting:
        rows = plan(list(waiting.values()), budget)
        assert rows
        for sequence_id, num_tokens in rows:
            one = waiting[sequence_id]
            computed = one.computed + num_tokens
            cut = None if one.cut is not None and computed >= one.cut else one.cut
            waiting[sequence_id] = replace(one, computed=computed, cut=cut)
            if computed == one.known:
                del waiting[sequence_id]
        turns += 1
        assert turns <= sum(one.known for one in candidates)


@PROPERTY
@given(budgets(), st.integers(0, 5), st.integers(0, 50), st.integers(1, 50))
def test_a_long_prompt_goes_on_beside_a_step_full_of_decode_rows(
    budget: Budget, streams: int, pages: int, more: int
) -> None:
    decoding = [
        Candidate(sequence_id=f"stream{index}", computed=10, known=11)
        for index in range(min(streams, budget.rows_max - 1))
    ]
    computed = pages * budget.page_tokens
    prompt = Candidate(sequence_id="prompt", computed=computed, known=computed + budget.page_tokens + more)
    rows = dict(plan([prompt, *decoding], budget))
    assert rows.keys() == {"prompt", *(one.sequence_id for one in decoding)}
    assert rows["prompt"] >= min(budget.page_tokens, end_of(prompt) - computed)


def test_a_step_of_every_kind_of_row() -> None:
    budget = Budget(tokens_max=40, rows_max=8, page_tokens=16)
    candidates = [
        Candidate(sequence_id="long", computed=5, known=100),
        Candidate(sequence_id="decode", computed=70, known=71),
        Candidate(sequence_id="cut", computed=0, known=60, cut=4),
        Candidate(sequence_id="tail", computed=64, known=70),
        Candidate(sequence_id="late", computed=0, known=100),
    ]
    rows = plan(candidates, budget)
    assert rows == [("decode", 1), ("tail", 6), ("long", 27), ("cut", 4)]


def test_a_budget_that_starves_long_prompts_is_refused() -> None:
    with pytest.raises(AssertionError, match="starve"):
        Budget(tokens_max=10, rows_max=8, page_tokens=4)
