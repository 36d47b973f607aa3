"""Draws, adjusted scores and counts on CPU: the same tokens and bits as their definitions."""

import pytest
import torch

from tests.support.kernels.cases import same_bits
from tests.support.kernels.draws import (
    DISTRIBUTIONS,
    Filters,
    check_distribution,
    draws_of,
    every_adjustment,
    every_draw,
)
from tidemill.kernels.dispatch import Operators
from tidemill.kernels.draw.reference import weights_of
from tidemill.kernels.draw.tables import ONE, PROMPT

SIZES = (1, 2, 15, 16, 17, 255, 256, 257, 1000)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_same_tokens_as_the_definition(cpu: Operators, reference: Operators, vocabulary: int) -> None:
    arguments = every_draw(vocabulary)
    assert torch.equal(cpu.draw(*arguments), reference.draw(*arguments))


def test_flat_scores_of_a_large_vocabulary(cpu: Operators, reference: Operators) -> None:
    """Filters cut among thousands of tokens, far below the first ones that are looked at."""
    scores_RV = torch.randn(2, 30_000, generator=torch.Generator().manual_seed(0))
    scores_RV[1] *= 6
    asked = [
        (row, uniform, filters)
        for row in range(2)
        for uniform in (0.2, 0.999)
        for filters in (Filters(top_p=0.99, temperature=2), Filters(top_k=20_000, temperature=0.1))
    ]
    arguments = (scores_RV, scores_RV[:0], *draws_of(asked))
    assert torch.equal(cpu.draw(*arguments), reference.draw(*arguments))


@pytest.mark.parametrize("filters", DISTRIBUTIONS)
def test_draws_of_the_definition_follow_the_distribution(reference: Operators, filters: Filters) -> None:
    check_distribution(reference.draw, filters, 6000)


def test_weights_follow_the_exponential(reference: Operators) -> None:
    """Each is off by one unit, and by what float32 rounds."""
    assert reference is not None
    scores_V = torch.linspace(-40, 3, 3001)
    exact_V = ((scores_V.double() - 3) / 0.9).exp() * ONE
    found_V = weights_of(scores_V, 1.4426950408889634 / 0.9).double()
    assert bool(((found_V - exact_V).abs() <= 1 + 4e-6 * exact_V).all())
    assert int(found_V[-1]) == ONE


@pytest.mark.parametrize("vocabulary", SIZES)
def test_adjusted_scores_have_the_bits_of_the_definition(
    cpu: Operators, reference: Operators, vocabulary: int
) -> None:
    logits_RV, counts_SV, masks_GW, rows_MF, items_IF = every_adjustment(vocabulary)
    if vocabulary == 1:  # its items would name one token twice
        items_IF = items_IF[::2].repeat_interleave(2, dim=0)
        rows_MF[:, 7] = rows_MF[:, 6] + (rows_MF[:, 7] > rows_MF[:, 6])
    arguments = (logits_RV, counts_SV, masks_GW, rows_MF, items_IF)
    assert same_bits(cpu.adjust(*arguments), reference.adjust(*arguments))


@pytest.mark.parametrize("variant", ["cpu", "reference"])
def test_adjusted_score_written_out(request: pytest.FixtureRequest, variant: str) -> None:
    """Repetition, then frequency and presence, then the shift; a mask has the last word."""
    ops: Operators = request.getfixturevalue(variant)
    logits_RV = torch.tensor([[2.0, -2.0, 2.0, 2.0, 2.0]])
    counts_SV = torch.tensor([[PROMPT, PROMPT + 2, 3, 0, 0]], dtype=torch.int32)
    masks_GW = torch.tensor([[0b10111]], dtype=torch.int32)
    rows_MF = torch.tensor([[0, 0, 2.0, 0.5, 0.25, 0, 0, 1]], dtype=torch.float64)
    items_IF = torch.tensor([[4, 1, 8.0]], dtype=torch.float64)
    wanted = [1.0, -4 - 2 * 0.25 - 0.5, 1 - 3 * 0.25 - 0.5, -torch.inf, 1 - 0.25 - 0.5 + 8]
    assert ops.adjust(logits_RV, counts_SV, masks_GW, rows_MF, items_IF)[0].tolist() == wanted


@pytest.mark.parametrize("variant", ["cpu", "reference"])
def test_counts_change(request: pytest.FixtureRequest, variant: str) -> None:
    ops: Operators = request.getfixturevalue(variant)
    counts_SV = torch.zeros(2, 3, dtype=torch.int32)
    changes = [(0, 1, 1), (1, 2, PROMPT), (0, 1, 1), (1, 2, 1), (0, 1, -1)]
    ops.count(counts_SV, torch.tensor(changes, dtype=torch.float64))
    assert counts_SV.tolist() == [[0, 1, 0], [0, 0, PROMPT + 1]]
