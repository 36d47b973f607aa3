"""Draws, adjusted scores and counts in Triton: the same tokens and bits as their definitions."""

import pytest
import torch

from tests.support.kernels.cases import same_bits
from tests.support.kernels.draws import (
    FILTERS,
    Filters,
    draws_of,
    every_adjustment,
    every_draw,
    scores_of,
)
from tidemill.kernels.draw import cuda, reference

# Infinite scores: what they give is not selected.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

CASES = {f"draw {size}": size for size in (1, 2, 33, 300)}


def check(vocabulary: int, device: str = "cpu") -> None:
    logits_RV, scores_MV, draws_NF, filtered = every_draw(vocabulary)
    wanted = reference.draw(logits_RV, scores_MV, draws_NF, filtered)
    found = cuda.draw(logits_RV.to(device), scores_MV.to(device), draws_NF.to(device), filtered)
    assert torch.equal(found.cpu(), wanted)


def check_adjusted(vocabulary: int, device: str = "cpu") -> None:
    arguments = list(every_adjustment(vocabulary))
    found = cuda.adjust(*(tensor.to(device) for tensor in arguments))
    assert same_bits(found.cpu(), reference.adjust(*arguments))


@pytest.mark.parametrize("vocabulary", CASES.values(), ids=CASES)
def test_same_tokens_as_the_definition(vocabulary: int) -> None:
    check(vocabulary)


@pytest.mark.parametrize("filters", FILTERS)
def test_vocabulary_of_several_blocks(filters: Filters) -> None:
    """More than one program's block of scores, and of the loops that compare thresholds."""
    scores_RV = scores_of(2 * cuda.BLOCK + 5)[:2]
    draws_NF, filtered = draws_of([(0, 0.6, filters), (1, 0.9999, filters)])
    found = cuda.draw(scores_RV, scores_RV[:0], draws_NF, filtered)
    assert torch.equal(found, reference.draw(scores_RV, scores_RV[:0], draws_NF, filtered))


@pytest.mark.parametrize("vocabulary", [2, 33, 5000])
def test_adjusted_scores_have_the_bits_of_the_definition(vocabulary: int) -> None:
    check_adjusted(vocabulary)


def test_counts_change() -> None:
    counts_SV = torch.zeros(2, 3, dtype=torch.int32)
    wanted = counts_SV.clone()
    changes = torch.tensor([(0, 1, 1), (1, 2, 1 << 30), (0, 1, 1), (1, 2, 1)], dtype=torch.float64)
    cuda.count(counts_SV, changes)
    reference.count(wanted, changes)
    assert torch.equal(counts_SV, wanted)


def test_nothing_to_draw() -> None:
    logits_RV = torch.zeros(2, 7)
    assert cuda.draw(logits_RV, logits_RV[:0], torch.zeros(0, 7, dtype=torch.float64), 0).shape == (0,)
    cuda.count(torch.zeros(1, 7, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.float64))
