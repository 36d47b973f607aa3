"""The page of a rank is a byte range of the whole page, and the shards of a group cover it once."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kvstore.layout import Attention, LayerSpec, Layout, Linear, PageId, StateId, Window, layout_of
from tidemill.kvstore.shards import WHOLE, Shards, rank_layers, rank_share, shards_of
from tidemill.workers.models.inputs import Caches, caches_of

PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)
SIZES = (1, 2, 4, 8)
QWEN3_NEXT = (
    Linear(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4),
    Attention(kv_heads=2, head_dim=256),
)
NINE = Linear(key_heads=9, value_heads=9, key_dim=1, value_dim=1, conv_width=2)


@st.composite
def models(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    """Draw layers that groups of 1, 2, 4 and 8 ranks can share."""
    kv_heads, key_heads = draw(st.sampled_from(SIZES)), draw(st.sampled_from([8, 16]))
    attention = st.builds(Attention, kv_heads=st.just(kv_heads), head_dim=st.sampled_from([1, 2, 3]))
    linear = st.builds(
        Linear,
        key_heads=st.just(key_heads),
        value_heads=st.sampled_from([key_heads, 2 * key_heads]),
        key_dim=st.integers(1, 2),
        value_dim=st.integers(1, 3),
        conv_width=st.integers(2, 3),
    )
    layers: list[LayerSpec] = [draw(attention), *draw(st.lists(attention | linear, max_size=3))]
    return tuple(draw(st.permutations(layers)))


@PROPERTY
@given(models(), st.sampled_from(SIZES), st.sampled_from([1, 3]), st.data())
def test_rank_share_is_a_range_of_the_whole_page_and_state(
    layers: tuple[LayerSpec, ...], size: int, page_tokens: int, data: st.DataObject
) -> None:
    """Fill whole objects by heads, and those of a rank by its heads: the bytes are equal."""
    rank = data.draw(st.integers(0, size - 1))
    shards = shards_of(layers, data.draw(st.sets(st.sampled_from(SIZES))) | {size})
    share = rank_share(shards, rank, size)
    whole, local = (
        layout_of(specs, page_tokens, extent_bytes_min=1, granule_bytes=1)
        for specs in (layers, rank_layers(layers, size))
    )
    (whole_bytes, whole_caches), (local_bytes, local_caches) = _arena(whole), _arena(local)
    numbers = iter(range(1, 1 << 24))
    for full, part in zip(whole_caches.kv, local_caches.kv, strict=True):
        _number(full[0], part[0], rank * full.shape[1] // size, numbers_from=next(numbers))
    for full, part in zip(_states(whole_caches), _states(local_caches), strict=True):
        _number(full[1], part[1], rank * part.shape[1], numbers_from=next(numbers))

    page = _run(whole_bytes, whole.page_offset(PageId(0)), whole.page_bytes, share.pages, shards.pages)
    assert torch.equal(page, local_bytes[: local.page_bytes])
    if whole.hybrid:
        state_offset = whole.state_offset(StateId(1))
        state = _run(whole_bytes, state_offset, whole.state_bytes, share.states, shards.states)
        start = local.state_offset(StateId(1))
        assert torch.equal(state, local_bytes[start : start + local.state_bytes])


@PROPERTY
@given(models(), st.sampled_from(SIZES), st.sets(st.sampled_from(SIZES), min_size=1), st.data())
def test_rank_shares_publish_every_shard_once(
    layers: tuple[LayerSpec, ...], windowed: int, sizes: set[int], data: st.DataObject
) -> None:
    shards = shards_of((*layers, Window(kv_heads=windowed, head_dim=1, tokens=3)), sizes)
    size = data.draw(st.sampled_from(sorted(sizes)))
    shares = [rank_share(shards, rank, size) for rank in range(size)]
    published = chain.from_iterable(share.pages for share in shares if share.publishes_pages)
    assert list(published) == list(range(shards.pages))
    published = chain.from_iterable(share.windows for share in shares if share.publishes_windows)
    assert list(published) == list(range(shards.windows))
    if any(isinstance(layer, Linear) for layer in layers):
        assert list(chain.from_iterable(share.states for share in shares)) == list(range(shards.states))
    else:
        assert {share.states for share in shares} == {range(1)}


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ((), WHOLE),
        ((1,), WHOLE),
        ((2,), Shards(2, 2)),
        ((1, 2), Shards(2, 2)),
        ((4, 2), Shards(2, 4)),
        ((16,), Shards(2, 16)),
    ],
)
def test_shards_of_returns_the_fewest_shards_for_the_sizes(sizes: tuple[int, ...], shards: Shards) -> None:
    assert shards_of(QWEN3_NEXT, sizes) == shards


@pytest.mark.parametrize(
    ("layers", "size", "fix"),
    [
        (QWEN3_NEXT, 3, "use 1, 2, 4, 8 or 16$"),
        (QWEN3_NEXT, 0, "use 1, 2, 4, 8 or 16$"),
        (QWEN3_NEXT, 32, "use 1, 2, 4, 8 or 16$"),
        ((NINE, Attention(kv_heads=2, head_dim=1)), 3, "use 1$"),
        ((Attention(kv_heads=6, head_dim=1),), 4, "use 1, 2, 3 or 6, or a multiple of 6$"),
        ((Attention(kv_heads=1, head_dim=1),), 0, "use 1, or a multiple of 1$"),
    ],
)
def test_rank_layers_refuses_heads_that_cannot_be_shared(
    layers: tuple[LayerSpec, ...], size: int, fix: str
) -> None:
    with pytest.raises(ValueError, match=f"{size} ranks .*{fix}"):
        rank_layers(layers, size)
    with pytest.raises(ValueError, match=fix):
        shards_of(layers, (1, size))


def test_shards_describe_separates_namespaces_by_their_cuts() -> None:
    whole = layout_of(QWEN3_NEXT, 64)
    cuts = [Shards(pages, states) for pages in (1, 2) for states in (1, 2, 4)]
    assert len({shards.describe(whole) for shards in cuts}) == len(cuts)
    assert WHOLE.describe(whole) == whole.describe()


def _arena(layout: Layout) -> tuple[torch.Tensor, Caches]:
    """Return two extents of zeros: at least two objects of each kind."""
    arena = torch.zeros(2 * layout.extent_bytes, dtype=torch.uint8)
    return arena, caches_of(layout, arena)


def _states(caches: Caches) -> list[torch.Tensor]:
    return [*caches.conv, *caches.temporal]


def _number(full: torch.Tensor, part: torch.Tensor, first: int, numbers_from: int) -> None:
    """Number the elements of `full` (heads first), and copy the heads from `first` to `part`."""
    full[:] = torch.arange(full.numel(), dtype=torch.float32).view(full.shape) + numbers_from * 1_000.0
    part[:] = full[first : first + part.shape[0]]


def _run(arena: torch.Tensor, offset: int, num_bytes: int, shards: range, count: int) -> torch.Tensor:
    """Return the bytes of some of `count` shards of the object at `offset`."""
    size = num_bytes // count
    return arena[offset + shards.start * size : offset + shards.stop * size]
