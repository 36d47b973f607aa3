# pyright: basic
# torch's typing makes strict mode noise here.
"""`page_copy` over the caches of other engines: definition, parity, round trips, and nothing else written."""

from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.foreign import CACHES, Case, Memory, bytes_of
from tidemill.kernels.dispatch import page_copy
from tidemill.kernels.page_copy import reference
from tidemill.kernels.page_copy.planes import Direction, PageCopy, Plane
from tidemill.kvstore.memory.backing import Mmap

DIRECTIONS: tuple[Direction, ...] = ("export", "import")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@pytest.fixture(scope="session")
def variant(kernel_cache: Path) -> PageCopy:
    """tests/triton runs most of this file with another."""
    return page_copy("cpu", kernel_cache)


def run(copy: PageCopy, memory: Memory, direction: Direction) -> Memory:
    copy(memory.planes, memory.page_N, memory.slot_T, direction)
    return memory


CASES = (
    Case(tokens=1, page_tokens=1, block_tokens=1, heads=1, dims=(1,)),
    Case(tokens=64, page_tokens=64, block_tokens=16, heads=2, dims=(64,)),
    Case(tokens=65, page_tokens=16, block_tokens=64, heads=1, dims=(16, 128), dtype=torch.bfloat16),
    Case(tokens=37, page_tokens=8, block_tokens=12, heads=3, dims=(7, 1, 5)),
    Case(tokens=37, page_tokens=5, block_tokens=3, heads=3, dims=(7, 2), dtype=torch.bfloat16),
    Case(tokens=20, page_tokens=8, block_tokens=8, heads=5, dims=(3,), dtype=torch.uint8),
    Case(tokens=33, page_tokens=16, block_tokens=16, heads=1, dims=(576, 576), dtype=torch.bfloat16),
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_definition_token_by_token(cache: str, direction: Direction) -> None:
    case = Case(cache=cache, heads=3, dims=(5, 2), page_tokens=4, block_tokens=3, tokens=10)
    expected = Memory(case)
    for t, slot in enumerate(expected.slot_T.tolist()):
        page, token = int(expected.page_N[t // 4]), t % 4
        for plane in expected.planes:
            block, offset = divmod(slot, plane.cache.shape[2])
            for head in range(plane.pages.shape[1]):
                ours, theirs = plane.pages[page, head, token], plane.cache[block, head, offset]
                (theirs if direction == "export" else ours).copy_(ours if direction == "export" else theirs)
    assert run(reference.page_copy, Memory(case), direction).is_like(expected)


@settings(max_examples=150)
@given(
    case=st.builds(
        Case,
        cache=st.sampled_from(sorted(CACHES)),
        heads=st.integers(1, 4),
        dims=st.lists(st.integers(1, 9) | st.sampled_from([16, 64, 128]), min_size=1, max_size=3).map(tuple),
        page_tokens=st.integers(1, 9),
        block_tokens=st.integers(1, 9),
        tokens=st.integers(1, 40),
        dtype=st.sampled_from(DTYPES),
        seed=st.integers(0, 9),
    ),
    shuffled=st.booleans(),
    direction=st.sampled_from(DIRECTIONS),
)
def test_cpu_matches_the_definition(
    variant: PageCopy, case: Case, direction: Direction, *, shuffled: bool
) -> None:
    """Bytes outside the copy stay as they are."""
    expected = run(reference.page_copy, Memory(case, shuffled=shuffled), direction)
    assert run(variant, Memory(case, shuffled=shuffled), direction).is_like(expected)


@pytest.mark.parametrize("cache", CACHES)
def test_there_and_back_is_the_identity(variant: PageCopy, cache: str) -> None:
    """Into other pages than they came from, by way of a cache in no order."""
    case = Case(cache=cache, heads=3, dims=(7, 4), page_tokens=4, block_tokens=6, tokens=24)
    memory = run(variant, Memory(case, shuffled=True), "export")
    pages = [plane.pages[memory.page_N.long()].clone() for plane in memory.planes]
    for plane in memory.planes:
        plane.pages.fill_(torch.nan)
    memory.page_N = memory.page_N.flip(0)
    run(variant, memory, "import")
    for plane, wanted in zip(memory.planes, pages, strict=True):
        found = plane.pages[memory.page_N.long()]
        assert torch.equal(bytes_of(found.contiguous()), bytes_of(wanted))


def test_ranks_copy_their_heads_alone(variant: PageCopy) -> None:
    case = Case(heads=4, dims=(8, 8), tokens=30)
    whole, by_rank = run(variant, Memory(case), "import"), Memory(case)
    for heads in (slice(0, 1), slice(1, 4)):
        planes = [Plane(plane.pages[:, heads], plane.cache[:, heads]) for plane in by_rank.planes]
        variant(planes, by_rank.page_N, by_rank.slot_T, "import")
    assert by_rank.is_like(whole)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_of_a_page_may_lie_apart(variant: PageCopy, direction: Direction) -> None:
    """Strides say where pages lie too: here both sides are the caches of other engines."""

    def copied(copy: PageCopy) -> Memory:
        memory = Memory(Case(cache="flashinfer-hnd", heads=2, dims=(4,), tokens=12))
        pages_NPHD = torch.arange(5 * 4 * 2 * 4, dtype=torch.float32).view(5, 4, 2, 4)
        memory.parts.append(pages_NPHD)
        memory.planes = [Plane(pages_NPHD.transpose(1, 2), memory.planes[0].cache)]
        return run(copy, memory, direction)

    assert copied(variant).is_like(copied(reference.page_copy))


def test_empty_copy_moves_nothing(variant: PageCopy) -> None:
    memory = Memory(Case())
    variant(memory.planes, memory.page_N[:0], memory.slot_T[:0], "export")
    variant([], memory.page_N, memory.slot_T, "export")
    assert memory.is_like(Memory(Case()))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_any_number_of_threads(variant: PageCopy, direction: Direction) -> None:
    case = Case(heads=4, dims=(16, 16, 16), page_tokens=8, block_tokens=8, tokens=500)
    one = run(variant, Memory(case), direction)
    torch.set_num_threads(2)
    assert run(variant, Memory(case), direction).is_like(one)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_offsets_beyond_32_bits(variant: PageCopy, direction: Direction) -> None:
    """Pages, heads, blocks and tokens that lie more than 2^31 elements apart, in memory that is only
    reserved."""
    far = (1 << 31) + 8
    shape, strides = (2, 2, 2, 8), (4 * far, 2 * far, far, 1)
    reserved = [Mmap(4 * (far * 7 + 8)), Mmap(4 * (far * 7 + 8))]
    ours, theirs = (memory.memory.view(torch.float32).as_strided(shape, strides) for memory in reserved)
    source, target = (ours, theirs) if direction == "export" else (theirs, ours)
    source.copy_(torch.arange(prod(shape)).view(shape))
    page_N, slot_T = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1, 2, 3])
    variant([Plane(ours, theirs)], page_N, slot_T, direction)
    assert torch.equal(target, source.flip(0))
    for memory in reserved:
        memory.close()
