"""Each byte of a page and of a state has one address, and addresses do not change unnoticed."""

from hashlib import sha256
from math import lcm

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kernels.shared.fp8 import Fp8, Pages
from tidemill.kvstore.layout import (
    KV_FORMATS,
    Attention,
    KvDtype,
    Latent,
    LayerSpec,
    Layout,
    Linear,
    PageId,
    StateDtype,
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


GPT_OSS_20B: list[LayerSpec] = [
    Window(kv_heads=8, head_dim=64, tokens=128),
    Attention(kv_heads=8, head_dim=64),
] * 12
DEEPSEEK_V3: list[LayerSpec] = [Latent(width=512 + 64)] * 61

DIMS = st.sampled_from([1, 2, 3, 8])


@st.composite
def layer_lists(draw: st.DrawFn) -> list[LayerSpec]:
    kv_heads, key_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    attention = st.builds(Attention, kv_heads=st.just(kv_heads), head_dim=DIMS)
    window = st.builds(Window, kv_heads=st.just(2), head_dim=DIMS, tokens=st.just(4))
    linear = st.builds(
        Linear,
        key_heads=st.just(key_heads),
        value_heads=st.sampled_from([key_heads, 2 * key_heads]),
        key_dim=st.integers(1, 4),
        value_dim=st.integers(1, 4),
        conv_width=st.integers(2, 4),
    )
    paged = draw(st.sampled_from([attention, attention, st.builds(Latent, width=DIMS)]))
    layers: list[LayerSpec] = [draw(paged)]
    layers += draw(st.lists(paged | linear, max_size=4))
    layers += draw(st.just([]) | st.lists(window, max_size=3))
    return draw(st.permutations(layers))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[LayerSpec], Layout]:
    layers, kv_dtype = draw(layer_lists()), draw(st.sampled_from(list(KV_FORMATS)))
    copied = any(isinstance(layer, Linear) for layer in layers) and draw(st.booleans())
    return layers, layout_of(
        layers,
        draw(st.sampled_from([4, 16] if kv_dtype.startswith("fp8") else [1, 2, 5, 16])),
        kv_dtype,
        draw(st.sampled_from(["float32", "bfloat16"])),
        "bfloat16" if copied else None,
        extent_bytes_min=draw(st.sampled_from([1, 3000])),
        granule_bytes=draw(st.sampled_from([1, 64])),
    )


@PROPERTY
@given(layouts())
def test_layout_tiles_an_extent_with_objects_of_each_class(drawn: tuple[list[LayerSpec], Layout]) -> None:
    layers, layout = drawn
    assert layout.pages_per_extent * layout.page_bytes == layout.extent_bytes
    assert layout.has_states == any(isinstance(layer, Linear) for layer in layers)
    if layout.has_windows:
        assert layout.windows_per_extent * layout.window_bytes == layout.extent_bytes
    if layout.has_states:
        assert layout.states_per_extent * layout.state_stride_bytes == layout.extent_bytes
        assert layout.state_bytes <= layout.state_stride_bytes
        assert layout.saved_bytes <= layout.saved_stride_bytes <= layout.state_stride_bytes
        [row] = [row for row in layout.classes if row.name == layout.saved]
        assert row.per_extent * row.bytes == layout.extent_bytes
    else:
        assert layout.states_per_extent == layout.state_bytes == layout.state_stride_bytes == 0


@PROPERTY
@given(layer_lists(), st.integers(1, 1 << 16), st.sampled_from([1, 64, 4096]))
def test_layout_of_makes_the_smallest_extent_allowed(
    layers: list[LayerSpec], extent_bytes_min: int, granule_bytes: int
) -> None:
    layout = layout_of(layers, 4, extent_bytes_min=extent_bytes_min, granule_bytes=granule_bytes)
    step_bytes = lcm(layout.page_bytes, layout.state_stride_bytes or 1, layout.window_bytes or 1)
    assert layout.extent_bytes >= extent_bytes_min
    assert layout.extent_bytes % granule_bytes == 0
    smaller = range(step_bytes, layout.extent_bytes, step_bytes)
    assert not [size for size in smaller if size >= extent_bytes_min and size % granule_bytes == 0]


@PROPERTY
@given(layouts())
def test_layout_gives_each_byte_of_a_page_to_one_element(drawn: tuple[list[LayerSpec], Layout]) -> None:
    """Layers, heads, K, V and tokens do not overlap in pages and in window pages. They leave no gap but with
    scales, a small one."""
    layers, layout = drawn
    arena, caches = _caches(layout, num_extents=2)
    paged = [layer for layer in layers if not isinstance(layer, Linear)]
    for of_windows in {isinstance(layer, Window) for layer in paged}:
        owners = torch.zeros(arena.numel(), dtype=torch.int32)
        for layer, view in zip(paged, caches.kv, strict=True):
            if isinstance(layer, Window) == of_windows:
                for part in _written(view):
                    _own(owners, part, KV_FORMATS[layout.kv_dtype].element_bytes)
        assert owners.le(1).all()
        padding_bytes = int(owners.eq(0).sum())
        assert padding_bytes <= (arena.numel() / 32 if KV_FORMATS[layout.kv_dtype].scale_bytes else 0)


@PROPERTY
@given(layouts())
def test_layout_gives_each_byte_of_a_state_to_one_element(drawn: tuple[list[LayerSpec], Layout]) -> None:
    _, layout = drawn
    arena, caches = _caches(layout, num_extents=2)
    owners = torch.zeros(arena.numel(), dtype=torch.int32)
    for view in [*caches.conv, *caches.temporal]:
        assert view.shape[0] * layout.state_stride_bytes == arena.numel()
        _own(owners, view, view.element_size())
    if layout.has_states:
        by_state = owners.view(-1, layout.state_stride_bytes)
        # States of an odd number of bfloat16 end with half a word.
        parts = layout.linear[0].key_heads * len(layout.linear)
        unused_bytes = by_state[:, : layout.state_bytes].eq(0).sum(1)
        assert unused_bytes.le(2 * parts if layout.state_dtype == "bfloat16" else 0).all()
        assert owners.le(1).all()
        assert by_state[:, layout.state_bytes :].eq(0).all()
    owners.zero_()
    for view in caches.saved:
        _own(owners, view, view.element_size())
    if layout.converts:
        by_copy = owners.view(-1, layout.saved_stride_bytes)
        unused_bytes = by_copy[:, : layout.saved_bytes].eq(0).sum(1)
        assert unused_bytes.le(2 * layout.linear[0].key_heads * len(layout.linear)).all()
        assert owners.le(1).all()
        assert by_copy[:, layout.saved_bytes :].eq(0).all()


@PROPERTY
@given(layouts(), st.data())
def test_layout_stores_the_share_of_a_head_contiguously(
    drawn: tuple[list[LayerSpec], Layout], data: st.DataObject
) -> None:
    """Ranks of unequal tensor parallelism can read each other's pages and states. Ids give their offsets."""
    layers, layout = drawn
    arena, caches = _caches(layout, num_extents=2)
    if layout.attention:
        kv_heads = layout.attention[0].kv_heads
        page = PageId(data.draw(st.integers(0, 2 * layout.pages_per_extent - 1)))
        paged = [layer for layer in layers if not isinstance(layer, Linear)]
        for head in range(kv_heads):
            arena.zero_()
            for layer, view in zip(paged, caches.kv, strict=True):
                if isinstance(layer, Attention):
                    for part in _written(view):
                        part[page, head] = 1
            size = layout.page_bytes // kv_heads
            _only_within(arena, layout.page_offset(page) + head * size, size)
    if layout.has_states:
        key_heads = layout.linear[0].key_heads
        state = StateId(data.draw(st.integers(0, 2 * layout.states_per_extent - 1)))
        for group in range(key_heads):
            arena.zero_()
            for view in [*caches.conv, *caches.temporal]:
                view[state, group] = 1.0
            size = layout.state_bytes // key_heads
            _only_within(arena, layout.state_offset(state) + group * size, size)


@pytest.mark.parametrize(
    ("layers", "kv_dtype", "sizes", "views"),
    [
        (KEEPER, "float32", (32_768, 31_488, 32_768, 1 << 20, 0), "1f039294c0e3"),
        (QWEN3_NEXT, "bfloat16", (3 << 19, 79_036_416, 51 * 3 << 19, 51 * 3 << 19, 0), "c0290d3ecb7a"),
        (GPT_OSS_20B, "bfloat16", (3 << 19, 0, 0, 3 << 19, 3 << 19), "063638679bef"),
        (GPT_OSS_20B, "fp8_per_token_head", (49 << 14, 0, 0, 49 << 15, 49 << 14), "2a77e6f4c745"),
        (DEEPSEEK_V3, "fp8", (64 * 35_136, 0, 0, 64 * 35_136, 0), "7435a7caaeb7"),
        (DEEPSEEK_V3, "bfloat16", (64 * 70_272, 0, 0, 64 * 70_272, 0), "99ed802ae8fd"),
    ],
    ids=["keeper", "qwen3-next-80b", "gpt-oss-20b", "gpt-oss-20b-fp8", "deepseek-v3-fp8", "deepseek-v3"],
)
def test_layout_of_models_does_not_change(
    layers: list[LayerSpec], kv_dtype: KvDtype, sizes: tuple[int, ...], views: str
) -> None:
    """`views` is the digest of the offsets and strides of all layers, in bytes."""
    layout = layout_of(layers, 64, kv_dtype)
    assert sizes == (
        layout.page_bytes,
        layout.state_bytes,
        layout.state_stride_bytes,
        layout.extent_bytes,
        layout.window_bytes,
    )
    _, caches = _caches(layout, num_extents=1, device="meta")
    pages = [part for view in caches.kv for part in _written(view)[:1]]
    found = [
        (view.storage_offset() * view.element_size(), *_strides_bytes(view))
        for view in (*pages, *caches.conv, *caches.temporal)
    ]
    assert sha256(str(found).encode()).hexdigest()[:12] == views


def test_layout_of_windows_and_latents() -> None:
    layout = layout_of(GPT_OSS_20B, 64, "bfloat16")
    assert layout.checkpoint_bytes == 2 * layout.window_bytes
    assert (layout.last_window(1), layout.last_window(9)) == (range(1), range(7, 9))
    assert (layout.hybrid, layout.has_states) == (True, False)
    assert layout.describe() == f"v1/p64/bfloat16/{tuple(GPT_OSS_20B[1::2])}/()/{tuple(GPT_OSS_20B[::2])}"
    layout = layout_of(DEEPSEEK_V3, 64, "bfloat16")
    assert (layout.hybrid, layout.checkpoint_bytes) == (False, 0)
    assert layout.describe() == f"v1/p64/bfloat16/()/()/{tuple(DEEPSEEK_V3)}"


shapes = st.tuples(st.integers(1, 9), st.integers(1, 40))
"""The tokens of a page, and of the window."""


def with_window(page_tokens: int, window: int) -> Layout:
    layers = (Attention(kv_heads=1, head_dim=1), Window(kv_heads=1, head_dim=1, tokens=window))
    return layout_of(layers, page_tokens, extent_bytes_min=1, granule_bytes=1)


@settings(PROPERTY, max_examples=300)
@given(shapes, st.integers(0, 12))
def test_last_window_is_exactly_what_the_next_token_sees(shape: tuple[int, int], depth_pages: int) -> None:
    size, window = shape
    layout = with_window(size, window)
    positions = layout.last_window(depth_pages)
    depth, seen = depth_pages * size, max(window, 2) - 1  # at least one page
    assert set(positions) == {position // size for position in range(max(0, depth - seen), depth)}
    assert layout.first_visible_window(depth_pages * size) == positions.start
    assert layout.checkpoint_bytes == len(layout.last_window(1000)) * layout.window_bytes


@settings(PROPERTY, max_examples=300)
@given(shapes, st.integers(0, 60), st.integers(1, 30))
def test_peak_windows_is_a_tight_bound(shape: tuple[int, int], depth: int, in_flight: int) -> None:
    size, window = shape
    layout = with_window(size, window)
    pinned = len(range(layout.first_visible_window(depth), -(-(depth + in_flight) // size)))
    assert pinned <= layout.peak_windows(depth + in_flight, in_flight)
    reach = range(10 * (window + in_flight), 10 * (window + in_flight) + size)
    peak = max(len(range(layout.first_visible_window(at), -(-(at + in_flight) // size))) for at in reach)
    assert layout.peak_windows(1 << 20, in_flight) - 1 <= peak


def test_pages_of_fp8_are_whole_words() -> None:
    with pytest.raises(ValueError, match="--page-size to a multiple of 4"):
        layout_of(KEEPER, 6, "fp8")


def test_checkpoints_of_fewer_bits_have_a_class_of_their_own() -> None:
    with pytest.raises(ValueError, match="leave out --checkpoint-dtype"):
        layout_of(GPT_OSS_20B, 64, checkpoint_dtype="bfloat16")
    same = layout_of(KEEPER, 64, "float32", "bfloat16", "bfloat16")
    assert same == layout_of(KEEPER, 64, "float32", "bfloat16")
    copied = layout_of(QWEN3_NEXT, 64, "bfloat16", checkpoint_dtype="bfloat16")
    assert (copied.state_bytes, copied.saved_bytes) == (79_036_416, 41_287_680)
    assert (copied.extent_bytes, copied.states_per_extent) == (53 * 3 << 19, 1)


def test_describe_differs_for_different_layouts() -> None:
    wider = Attention(kv_heads=2, head_dim=64)
    states: list[tuple[StateDtype, StateDtype | None]]
    states = [("float32", None), ("bfloat16", None), ("float32", "bfloat16")]
    described = {
        layout_of(layers, page_tokens, dtype, *state_dtype).describe()
        for layers in (KEEPER, KEEPER[1:], [*KEEPER, wider], [*KEEPER[:3], wider])
        for page_tokens in (16, 64)
        for dtype in KV_FORMATS
        for state_dtype in states
    }
    assert len(described) == 4 * 2 * 4 * 3


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
        ([Window(kv_heads=1, head_dim=1, tokens=4)], 4, "without attention"),
        ([Attention(kv_heads=1, head_dim=1), Window(kv_heads=1, head_dim=1, tokens=0)], 4, "window of 0"),
        ([Attention(kv_heads=1, head_dim=1), Latent(width=3)], 4, "two kinds of pages"),
        (
            [Attention(kv_heads=1, head_dim=1), *(Window(kv_heads=n, head_dim=1, tokens=4) for n in (1, 2))],
            4,
            "number of",
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


def _written(view: Pages) -> list[torch.Tensor]:
    """Return what tokens write: numbers, or codes and their scales."""
    if not isinstance(view, Fp8):
        return [view]
    return [view.codes] if view.is_fixed else list(view)


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
