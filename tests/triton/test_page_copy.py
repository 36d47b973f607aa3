# pyright: basic
"""`page_copy` in Triton: parity, round trips, and nothing else written, by the tests of the CPU variant."""

from itertools import cycle
from pathlib import Path

import pytest

from tests.support.kernels.foreign import CACHES, Case, Memory
from tests.unit.kernels.test_page_copy import (
    CASES,
    DIRECTIONS,
    run,
    test_empty_copy_moves_nothing,
    test_offsets_beyond_32_bits,
    test_ranks_copy_their_heads_alone,
    test_there_and_back_is_the_identity,
    test_tokens_of_a_page_may_lie_apart,
)
from tidemill.kernels.dispatch import page_copy
from tidemill.kernels.page_copy import reference
from tidemill.kernels.page_copy.planes import Direction, PageCopy

__all__ = [
    "test_empty_copy_moves_nothing",
    "test_offsets_beyond_32_bits",
    "test_ranks_copy_their_heads_alone",
    "test_there_and_back_is_the_identity",
    "test_tokens_of_a_page_may_lie_apart",
]


@pytest.fixture(scope="session")
def variant(kernel_cache: Path) -> PageCopy:
    return page_copy("triton", kernel_cache)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shuffled", [False, True], ids=["blocks", "tokens"])
@pytest.mark.parametrize(("case", "cache"), list(zip(CASES, cycle(CACHES), strict=False)), ids=str)
def test_matches_the_definition(
    variant: PageCopy, case: Case, cache: str, direction: Direction, *, shuffled: bool
) -> None:
    """Each case with one cache: all of them take the interpreter too long."""
    case = Case(**{**vars(case), "cache": cache})
    expected = run(reference.page_copy, Memory(case, shuffled=shuffled), direction)
    assert run(variant, Memory(case, shuffled=shuffled), direction).is_like(expected)
