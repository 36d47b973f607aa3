"""Each byte of a page and of a state has one address, and addresses do not change unnoticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kvstore.layout import (
    KV_FORMATS,
    Attention,
    KvDtype,
    Latent,
    LayerSpec,
    Layout,
    Linear,
    PageId,
    StateId,
    Window,
    layout_of,
    restorable_end,
)
from tidemill.workers.models.inputs import Caches, caches_of

PROPERTY = settings(deadline=None, derandomize=True, max_examples=40)

KEEPER_LINEAR = Linear(key_heads=2, value_heads=2, key_dim=32, value_dim=32, conv_width=4)
KEEPER = [*[KEEPER_LINEAR] * 3, Attention(kv_heads=2, head_dim=32)]
QWEN3_NEXT_LINEAR = Linear(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4)
QWEN3_NEXT = [*[QWEN3_NEXT_LINEAR] * 3, Attention(kv_heads=2, head_dim=256)] * 12


@st.composite
def layer_lists(draw: st.DrawFn) -> list[LayerSpec]:
    kv_heads, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attention = st.builds(Attention, kv_heads=st.just(kv_heads), head_dim=st.sampled_from([1, 2, 3, 8]))
    linear = st.builds(
        Linear,
        key_heads=st.just(key_heads),
        value_heads=st.sampled_from([key_heads, 2 * key_heads]),
        key_dim=st.integers(1, 4),
        value_dim=st.integers(1, 4),
        conv_width=st.integers(2, 4),
    )
    layers: list[LayerSpec] = [draw(attention)]
    layers += draw(st.lists(attention | linear, max_size=4))
    return draw(st.permutations(layers))


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return layout_of(
        draw(layer_lists()),
        draw(st.sampled_from([1, 2, 5, 16])),
        draw(st.sampled_from(["float32", "bfloat16"])),
        draw(st.sampled_from(["float32", "bfloat16"])),
        extent_bytes_min=draw(st.sampled_from([1, 3000])),
        granule_bytes=draw(st.sampled_from([1, 64])),
    )


@PROPERTY
@given(layouts())
def test_layout_tiles_an_extent_with_pages_and_states(layout: Layout) -> None:
    assert layout.pages_per_extent * layout.page_bytes == layout.extent_bytes
    assert layout.hybrid == bool(layout.linear)
    if layout.hybrid:
        assert layout.states_per_extent * layout.state_stride_bytes == layout.extent_bytes
        assert layout.state_bytes <= layout.state_stride_bytes < layout.state_bytes + layout.page_bytes
        assert layout.state_stride_bytes % layout.page_bytes == 0
    else:
        assert layout.states_per_extent == layout.state_bytes == layout.state_stride_bytes == 0


@PROPERTY
@given(layer_lists(), st.integers(1, 1 << 16), st.sampled_from([1, 64, 4096]))
def test_layout_of_makes_the_smallest_extent_allowed(
    layers: list[LayerSpec], extent_bytes_min: int, granule_bytes: int
) -> None:
    layout = layout_of(layers, 4, extent_bytes_min=extent_bytes_min, granule_bytes=granule_bytes)
    step_bytes = layout.state_stride_bytes or layout.page_bytes
    assert layout.extent_bytes >= extent_bytes_min
    assert layout.extent_bytes % granule_bytes == 0
    smaller = range(step_bytes, layout.extent_bytes, step_bytes)
    assert not [size for size in smaller if size >= extent_bytes_min and size % granule_bytes == 0]


@PROPERTY
@given(layouts())
def test_layout_gives_each_byte_of_a_page_to_one_element(layout: Layout) -> None:
    """Layers, heads, K, V and tokens do not overlap and leave no gap."""
    arena, caches = _caches(layout, num_extents=2)
    owners = torch.zeros(arena.numel(), dtype=torch.int32)
    for view in caches.kv:
        assert view.shape[0] * layout.page_bytes == arena.numel()
        _own(owners, view, KV_FORMATS[layout.kv_dtype].element_bytes)
    assert owners.eq(1).all()


@PROPERTY
@given(layouts())
def test_layout_gives_each_byte_of_a_state_to_one_element(layout: Layout) -> None:
    arena, caches = _caches(layout, num_extents=2)
    owners = torch.zeros(arena.numel(), dtype=torch.int32)
    for view in [*caches.conv, *caches.temporal]:
        assert view.shape[0] * layout.state_stride_bytes == arena.numel()
        _own(owners, view, view.element_size())
    if layout.hybrid:
        by_state = owners.view(-1, layout.state_stride_bytes)
        # States of an odd number of bfloat16 end with half a word.
        parts = layout.linear[0].key_heads * len(layout.linear)
        unused_bytes = by_state[:, : layout.state_bytes].eq(0).sum(1)
        assert unused_bytes.le(2 * parts if layout.state_dtype == "bfloat16" else 0).all()
        assert owners.le(1).all()
        assert by_state[:, layout.state_bytes :].eq(0).all()


@PROPERTY
@given(layouts(), st.data())
def test_layout_offsets_follow_from_ids(layout: Layout, data: st.DataObject) -> None:
    arena, caches = _caches(layout, num_extents=2)
    page = PageId(data.draw(st.integers(0, 2 * layout.pages_per_extent - 1)))
    for view in caches.kv:
        view[page] = 1.0
    _only_within(arena, layout.page_offset(page), layout.page_bytes)
    arena.zero_()
    if layout.hybrid:
        state = StateId(data.draw(st.integers(0, 2 * layout.states_per_extent - 1)))
        for view in [*caches.conv, *caches.temporal]:
            view[state] = 1.0
        _only_within(arena, layout.state_offset(state), layout.state_bytes)


@PROPERTY
@given(layouts())
def test_layout_stores_the_share_of_a_head_contiguously(layout: Layout) -> None:
    """Ranks of unequal tensor parallelism can read each other's pages and states."""
    arena, caches = _caches(layout, num_extents=1)
    kv_heads = layout.attention[0].kv_heads
    for head in range(kv_heads):
        arena.zero_()
        for view in caches.kv:
            view[0, head] = 1.0
        _only_within(arena, head * layout.page_bytes // kv_heads, layout.page_bytes // kv_heads)
    if layout.hybrid:
        key_heads = layout.linear[0].key_heads
        for group in range(key_heads):
            arena.zero_()
            for view in [*caches.conv, *caches.temporal]:
                view[0, group] = 1.0
            _only_within(arena, group * layout.state_bytes // key_heads, layout.state_bytes // key_heads)


def test_layout_of_keeper() -> None:
    layout = layout_of(KEEPER, 64)
    assert (layout.page_bytes, layout.state_bytes) == (32_768, 31_488)
    assert (layout.state_stride_bytes, layout.extent_bytes) == (32_768, 1 << 20)
    assert (layout.pages_per_extent, layout.states_per_extent) == (32, 32)
    _, caches = _caches(layout, num_extents=1)
    assert [(view.storage_offset() * 4, _strides_bytes(view)) for view in caches.kv] == [
        (0, (32_768, 16_384, 8_192, 128, 4))
    ]
    assert [view.storage_offset() * 4 for view in caches.conv] == [0, 5_248, 10_496]
    assert [view.storage_offset() * 4 for view in caches.temporal] == [1_152, 6_400, 11_648]
    assert {_strides_bytes(view) for view in caches.conv} == {(32_768, 15_744, 384, 4)}
    assert {_strides_bytes(view) for view in caches.temporal} == {(32_768, 15_744, 4_096, 128, 4)}


def test_layout_of_qwen3_next_80b() -> None:
    layout = layout_of(QWEN3_NEXT, 64, "bfloat16")
    assert layout.page_bytes // layout.page_tokens == 24_576
    assert layout.page_bytes == 3 << 19  # 1.5 MiB
    temporal_bytes = 36 * 32 * 128 * 128 * 4
    conv_bytes = 36 * 3 * (16 * 2 * 128 + 32 * 128) * 4
    assert layout.state_bytes == temporal_bytes + conv_bytes == 79_036_416
    assert layout.state_stride_bytes == layout.extent_bytes == 51 * layout.page_bytes
    assert (layout.pages_per_extent, layout.states_per_extent) == (51, 1)
    head_bytes = layout.page_bytes // 2
    assert [QWEN3_NEXT.count(layer) for layer in (QWEN3_NEXT_LINEAR, layout.attention[0])] == [36, 12]
    _, caches = _caches(layout, num_extents=1, device="meta")
    assert [view.storage_offset() * 2 for view in caches.kv] == [index * 65_536 for index in range(12)]
    assert {_strides_bytes(view) for view in caches.kv} == {(3 << 19, head_bytes, 32_768, 512, 2)}
    group_bytes = layout.state_bytes // 16
    layer_bytes = group_bytes // 36
    conv_group_bytes = 3 * 512 * 4
    assert [view.storage_offset() * 4 for view in caches.conv] == [index * layer_bytes for index in range(36)]
    assert [view.storage_offset() * 4 for view in caches.temporal] == [
        index * layer_bytes + conv_group_bytes for index in range(36)
    ]
    stride_bytes = layout.state_stride_bytes
    assert {_strides_bytes(view) for view in caches.conv} == {(stride_bytes, group_bytes, 2_048, 4)}
    assert {_strides_bytes(view) for view in caches.temporal} == {(stride_bytes, group_bytes, 65_536, 512, 4)}


GPT_OSS_20B: list[LayerSpec] = [
    Window(kv_heads=8, head_dim=64, tokens=128),
    Attention(kv_heads=8, head_dim=64),
] * 12
DEEPSEEK_V3: list[LayerSpec] = [Latent(width=512 + 64)] * 61


def test_layout_of_gpt_oss_20b() -> None:
    layout = layout_of(GPT_OSS_20B, 64, "bfloat16")
    assert layout.page_bytes == layout.window_bytes == 12 * 2 * 8 * 64 * 64 * 2 == 3 << 19
    assert (layout.extent_bytes, layout.pages_per_extent, layout.windows_per_extent) == (3 << 19, 1, 1)
    assert layout.checkpoint_bytes == 2 * layout.window_bytes
    assert (layout.last_window(1), layout.last_window(9)) == (range(1), range(7, 9))
    assert (layout.hybrid, layout.has_states, layout.state_bytes) == (True, False, 0)
    _, caches = _caches(layout, num_extents=2, device="meta")
    assert [view.storage_offset() * 2 for view in caches.kv] == [i // 2 * 16_384 for i in range(24)]
    assert {_strides_bytes(view) for view in caches.kv} == {(3 << 19, 196_608, 8_192, 128, 2)}
    assert caches.has_windows
    assert layout.describe() == (f"v1/p64/bfloat16/{tuple(GPT_OSS_20B[1::2])}/()/{tuple(GPT_OSS_20B[::2])}")


def test_layout_of_deepseek_v3() -> None:
    layout = layout_of(DEEPSEEK_V3, 64, "bfloat16")
    assert layout.page_bytes // layout.page_tokens == 70_272
    assert (layout.hybrid, layout.checkpoint_bytes, layout.windows_per_extent) == (False, 0, 0)
    _, caches = _caches(layout, num_extents=1, device="meta")
    assert {tuple(view.shape) for view in caches.kv} == {(1, 1, 1, 64, 576)}
    assert [view.storage_offset() * 2 for view in caches.kv] == [i * 73_728 for i in range(61)]
    assert {_strides_bytes(view) for view in caches.kv} == {(layout.page_bytes, 0, 0, 1_152, 2)}
    assert layout.describe() == f"v1/p64/bfloat16/()/()/{tuple(DEEPSEEK_V3)}"


WINDOW_SIZES = st.sampled_from([1, 2, 3, 8])


@PROPERTY
@given(st.lists(WINDOW_SIZES, min_size=1, max_size=3), WINDOW_SIZES, st.integers(1, 5), st.data())
def test_layout_tiles_an_extent_with_window_pages(
    dims: list[int], head_dim: int, page_tokens: int, data: st.DataObject
) -> None:
    """A page, a window page and a state of any size divide the extent."""
    windows = [Window(kv_heads=2, head_dim=dim, tokens=4) for dim in dims]
    pages: list[LayerSpec] = [Attention(kv_heads=3, head_dim=head_dim)]
    if data.draw(st.booleans()):
        pages = [Latent(width=head_dim), Latent(width=2)]
    linear = [KEEPER_LINEAR] * data.draw(st.integers(0, 1))
    layers = data.draw(st.permutations([*windows, *pages, *linear]))
    layout = layout_of(layers, page_tokens, extent_bytes_min=1, granule_bytes=4)
    for num_bytes in (layout.page_bytes, layout.window_bytes, layout.state_stride_bytes or 1):
        assert layout.extent_bytes % num_bytes == 0
    arena, caches = _caches(layout, num_extents=1)
    paged = [layer for layer in layers if not isinstance(layer, Linear)]
    for of_windows in (True, False):
        owners = torch.zeros(arena.numel(), dtype=torch.int32)
        for layer, view in zip(paged, caches.kv, strict=True):
            if isinstance(layer, Window) == of_windows:
                _own(owners, view, 4)
        assert owners.eq(1).all()


def test_describe_differs_for_different_layouts() -> None:
    wider = Attention(kv_heads=2, head_dim=64)
    dtypes: list[KvDtype] = ["float32", "bfloat16"]
    described = {
        layout_of(layers, page_tokens, dtype, state_dtype).describe()
        for layers in (KEEPER, KEEPER[1:], [*KEEPER, wider], [*KEEPER[:3], wider])
        for page_tokens in (16, 64)
        for dtype in dtypes
        for state_dtype in dtypes
    }
    assert len(described) == 4 * 2 * 2 * 2


@pytest.mark.parametrize(
    ("layers", "page_tokens", "problem"),
    [
        ([KEEPER_LINEAR], 64, "without attention"),
        (KEEPER, 0, "--page-size"),
        ([*KEEPER, Attention(kv_heads=1, head_dim=32)], 64, "heads"),
        (
            [*KEEPER, Linear(key_heads=1, value_heads=1, key_dim=32, value_dim=32, conv_width=4)],
            64,
            "heads",
        ),
    ],
)
def test_layout_of_rejects_layers_that_cannot_share_a_page(
    layers: list[LayerSpec], page_tokens: int, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        layout_of(layers, page_tokens)


@PROPERTY
@given(st.integers(1, 500), st.integers(1, 70))
def test_restorable_end_is_before_the_last_token(num_tokens: int, page_tokens: int) -> None:
    end = restorable_end(num_tokens, page_tokens)
    assert end % page_tokens == 0
    assert 0 <= end < num_tokens <= end + page_tokens


def _caches(layout: Layout, num_extents: int, device: str = "cpu") -> tuple[torch.Tensor, Caches]:
    arena = torch.zeros(num_extents * layout.extent_bytes, dtype=torch.uint8, device=device)
    return arena, caches_of(layout, arena)


def _own(owners: torch.Tensor, view: torch.Tensor, element_bytes: int) -> None:
    """Count every byte of every element of `view`, by its strides."""
    first = owners.view(-1, element_bytes)
    counted = first.as_strided(
        (*view.shape, element_bytes),
        (*(stride * element_bytes for stride in view.stride()), 1),
        view.storage_offset() * element_bytes,
    )
    places = torch.arange(owners.numel()).as_strided(
        counted.shape, counted.stride(), counted.storage_offset()
    )
    owners.index_add_(0, places.reshape(-1), torch.ones(places.numel(), dtype=torch.int32))


def _only_within(arena: torch.Tensor, offset_bytes: int, num_bytes: int) -> None:
    touched = arena.nonzero().flatten()
    assert offset_bytes <= touched.min()
    assert touched.max() < offset_bytes + num_bytes


def _strides_bytes(view: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride * view.element_size() for stride in view.stride())
