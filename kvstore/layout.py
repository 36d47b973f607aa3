"""The memory layout of pages, window pages and states, computed from a model's layer specs. Pure.

    page         P tokens of every attention layer, contiguous:
                 [kv_head][attention layer][K|V][token][head_dim]
                 or, in a model that keeps latents instead, [latent layer][token][width]
                 In a format with scales, those of the tokens follow each [token][..]: one byte each.
                 Cut into slices, it is one such range after another, each of some attention layers: the
                 store has an object for each.
    window page  P tokens of every window layer, like a page; needed while a query sees them
    state        the recurrent state of one sequence, contiguous:
                 [head group][linear layer][conv | temporal]
                 conv      [conv_width - 1][channels of the group]         float32, oldest first.
                 temporal  [value heads of the group][key_dim][value_dim]  state dtype, in whole words.
    checkpoint   a state of a checkpoint, if its temporal part is kept in fewer bits than running states have;
                 two take the place of a state

A head group is one key head with the value heads that share it. Its channels are those of its q,
its k and its v heads. Head (group) is the outermost dimension, so that the share of a
tensor-parallel rank is one contiguous range of the object (shards.py).

    arena   |  extent 0  |  extent 1  |  ...          page p starts at byte p * page_bytes.
            an extent holds pages_per_extent pages,   Window page w starts at byte w * window_bytes.
            or windows_per_extent window pages,       State s starts at byte s * state_stride_bytes.
            or states_per_extent states, or nothing   An address follows from the id alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Literal, NewType, assert_never

PageId = NewType("PageId", int)
WindowId = NewType("WindowId", int)
StateId = NewType("StateId", int)
CheckpointId = NewType("CheckpointId", int)
StateDtype = Literal["float32", "bfloat16"]
KvDtype = Literal["float32", "bfloat16", "fp8", "fp8_per_token_head"]

LAYOUT_VERSION = 1
EXTENT_BYTES_MIN = 1 << 20
GRANULE_BYTES = 4096
WORD_BYTES = 4  # of an element of a convolution's state

PAGES, STATES, WINDOWS = CLASSES = ("pages", "states", "windows")
"""The names of the classes of objects that every model has rows for."""

CHECKPOINTS = "checkpoints"
"""The class of states in checkpoints that are kept in fewer bits than running states."""


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The storage of pages and states.

    name            in the configuration and in namespaces
    element         the type of an element in torch; of uint8 it is a code of FP8 (kernels/shared/fp8.py)
    element_bytes   of a number
    scale_bytes     of the scale of one token of a layer, of its keys or values in one head or of its latent;
                    0: numbers are stored as they are, or have the scale of their layer
    """

    name: KvDtype
    element: Literal["float32", "bfloat16", "uint8"]
    element_bytes: int
    scale_bytes: int = 0


KV_FORMATS: dict[KvDtype, KvFormat] = {
    kv_format.name: kv_format
    for kv_format in (
        KvFormat("float32", "float32", 4),
        KvFormat("bfloat16", "bfloat16", 2),
        KvFormat("fp8", "uint8", 1),
        KvFormat("fp8_per_token_head", "uint8", 1, scale_bytes=1),
    )
}


@dataclass(frozen=True, slots=True)
class ObjectClass:
    """A class of objects of equal size that share the extents of an arena with the other classes.

    name          in demand, usage, heartbeats and metrics
    bytes         from one object to the next; 0: the model has none
    per_extent    the objects of an extent
    shared        Any number of leases and checkpoints have an object together, and all of them are counted.
                  Otherwise it has one owner: a lease or an entry of the prefix index.
    """

    name: str
    bytes: int
    per_extent: int
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Full softmax attention: keys and values of every token are kept."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Softmax attention of each token over the last `tokens`, itself included."""

    kv_heads: int
    head_dim: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention whose keys and values are computed from one latent of `width` numbers per token. Every rank
    of a group has the whole latent."""

    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Gated linear attention behind a causal convolution: a state of fixed size per sequence."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def values_per_group(self) -> int:
        return self.value_heads // self.key_heads

    @property
    def group_channels(self) -> int:
        """The convolution channels of one head group: q, k, then its value heads."""
        return 2 * self.key_dim + self.values_per_group * self.value_dim

    @property
    def conv_elements(self) -> int:
        """The elements of the convolution state per head group."""
        return (self.conv_width - 1) * self.group_channels

    def temporal_bytes(self, dtype: StateDtype) -> int:
        """Return the bytes of the temporal state per head group, whole words."""
        num_bytes = self.values_per_group * self.key_dim * self.value_dim * KV_FORMATS[dtype].element_bytes
        return -(-num_bytes // WORD_BYTES) * WORD_BYTES

    def group_bytes(self, dtype: StateDtype) -> int:
        """Return the bytes of the whole state per head group."""
        return self.conv_elements * WORD_BYTES + self.temporal_bytes(dtype)


LayerSpec = Attention | Window | Latent | Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of the objects in an arena.

    slice_bytes     of the slices of a page
    window_bytes    0 without window layers
    window_tokens   the widest window, the query's own token included
    state_bytes     0 without linear layers
    saved_bytes     of the state of a checkpoint
    others          classes of objects beside pages, states and window pages
    """

    page_tokens: int
    kv_dtype: KvDtype
    state_dtype: StateDtype
    checkpoint_dtype: StateDtype
    layers: tuple[LayerSpec, ...]
    slice_bytes: tuple[int, ...]
    window_bytes: int
    window_tokens: int
    state_bytes: int
    state_stride_bytes: int
    saved_bytes: int
    extent_bytes: int
    others: tuple[ObjectClass, ...] = ()

    @property
    def page_bytes(self) -> int:
        return sum(self.slice_bytes)

    @property
    def classes(self) -> tuple[ObjectClass, ...]:
        """The classes of objects in the arena, one row each."""
        saved = (self.saved_stride_bytes, 2 * self.states_per_extent) if self.converts else (0, 0)
        return (
            ObjectClass(PAGES, self.page_bytes, self.pages_per_extent),
            ObjectClass(STATES, self.state_stride_bytes, self.states_per_extent),
            ObjectClass(WINDOWS, self.window_bytes, self.windows_per_extent, shared=True),
            ObjectClass(CHECKPOINTS, *saved),
            *self.others,
        )

    def extents_for(self, counts: Mapping[str, int]) -> int:
        """Return the extents that these numbers of objects fill, by class. A model needs none of a class that
        it does not have."""
        return sum(-(-counts.get(row.name, 0) // row.per_extent) for row in self.classes if row.bytes)

    @property
    def attention(self) -> tuple[Attention, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Attention))

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Window))

    @property
    def latents(self) -> tuple[Latent, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Latent))

    @property
    def linear(self) -> tuple[Linear, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Linear))

    @property
    def hybrid(self) -> bool:
        """True when restoring a sequence needs a checkpoint in addition to its pages."""
        return self.has_states or self.has_windows

    @property
    def has_states(self) -> bool:
        return self.state_bytes > 0

    @property
    def has_windows(self) -> bool:
        return self.window_bytes > 0

    @property
    def converts(self) -> bool:
        """True when checkpoints keep states in a class of their own, to which states are copied. Running
        states are then rounded on every page boundary, so that the copies lose nothing."""
        return self.has_states and self.checkpoint_dtype != self.state_dtype

    @property
    def saved(self) -> str:
        """The class of the states of checkpoints."""
        return CHECKPOINTS if self.converts else STATES

    @property
    def saved_stride_bytes(self) -> int:
        """The bytes from the state of a checkpoint to the next."""
        return self.state_stride_bytes // 2 if self.converts else self.state_stride_bytes

    @property
    def pages_per_extent(self) -> int:
        return self.extent_bytes // self.page_bytes

    @property
    def windows_per_extent(self) -> int:
        return self.extent_bytes // self.window_bytes if self.has_windows else 0

    @property
    def states_per_extent(self) -> int:
        return self.extent_bytes // self.state_stride_bytes if self.has_states else 0

    @property
    def checkpoint_bytes(self) -> int:
        """The largest size of a checkpoint; 0 if pages alone restore a sequence."""
        return self.saved_bytes + len(self.last_window(1 << 31)) * self.window_bytes

    def last_window(self, depth_pages: int) -> range:
        """Return the positions of the window pages of a checkpoint after `depth_pages` pages. Those are the
        window pages that the next token can see, at least one."""
        if not self.has_windows:
            return range(0)
        visible = max(1, -(-(self.window_tokens - 1) // self.page_tokens))
        return range(max(0, depth_pages - visible), depth_pages)

    def first_visible_window(self, depth: int) -> int:
        """Return the position of the first window page that a sequence of `depth` tokens needs. It needs
        those that its next tokens can see, and on a page boundary those of `last_window`."""
        if not self.has_windows:
            return 0
        visible = max(self.window_tokens - 1, 1)
        return max(0, depth - visible) // self.page_tokens

    def peak_windows(self, num_tokens: int, in_flight: int) -> int:
        """Return the most window pages that `num_tokens` need, `in_flight` of them in steps."""
        if not self.has_windows:
            return 0
        visible = -(-(self.window_tokens - 1 + in_flight) // self.page_tokens) + 1
        return min(-(-num_tokens // self.page_tokens), visible)

    def page_offset(self, page: PageId) -> int:
        return page * self.page_bytes

    def window_offset(self, window: WindowId) -> int:
        return window * self.window_bytes

    def state_offset(self, state: StateId) -> int:
        return state * self.state_stride_bytes

    def describe(self) -> str:
        """Return a text that identifies the layout. `Shards.describe` adds the cuts."""
        states = str(self.linear) + ("" if self.state_dtype == "float32" else f"/{self.state_dtype}")
        states += f"/checkpoints {self.checkpoint_dtype}" if self.converts else ""
        others = "".join(f"/{specs}" for specs in (self.windows, self.latents) if specs)
        others += f"/slices {len(self.slice_bytes)}" if len(self.slice_bytes) > 1 else ""
        return f"v{LAYOUT_VERSION}/p{self.page_tokens}/{self.kv_dtype}/{self.attention}/{states}{others}"


def layout_of(  # noqa: PLR0913  each is a setting
    layers: Sequence[LayerSpec],
    page_tokens: int,
    kv_dtype: KvDtype = "float32",
    state_dtype: StateDtype = "float32",
    checkpoint_dtype: StateDtype | None = None,
    page_slices: int = 1,
    *,
    extent_bytes_min: int = EXTENT_BYTES_MIN,
    granule_bytes: int = GRANULE_BYTES,
) -> Layout:
    """Return the layout of a model. Raises ValueError if its layers cannot share a page or state.

    An extent is a multiple of one state, rounded up so that pages and window pages tile it. It has
    at least `extent_bytes_min` bytes and is a multiple of `granule_bytes`, the unit of mapping.
    Checkpoints have the type of running states by default, or one of fewer bits.
    """
    if page_tokens < 1:
        raise ValueError(f"page size is {page_tokens} tokens: set --page-size to 1 or more")
    slice_bytes, window_bytes = _page_sizes(layers, page_tokens, KV_FORMATS[kv_dtype], page_slices)
    if 0 in slice_bytes:
        raise ValueError(f"--page-slices is {page_slices}: set it to at most the layers that have pages")
    page_bytes = sum(slice_bytes)
    state_bytes, saved_bytes = (
        _state_bytes(layers, dtype) for dtype in (state_dtype, checkpoint_dtype or state_dtype)
    )
    assert saved_bytes <= state_bytes
    if checkpoint_dtype not in {None, state_dtype} and not state_bytes:
        raise ValueError(
            "a model without recurrent states has none in checkpoints: leave out --checkpoint-dtype"
        )
    if KV_FORMATS[kv_dtype].element_bytes < 2 and page_tokens % WORD_BYTES:
        raise ValueError(
            f"pages of {kv_dtype} are whole words: set --page-size to a multiple of {WORD_BYTES}"
        )
    state_pages = -(-state_bytes // page_bytes)
    if saved_bytes < state_bytes:  # two of them take the place of a state, in whole words
        state_pages = max(state_pages, -(-2 * saved_bytes // page_bytes))
        state_pages += state_pages * page_bytes % (2 * WORD_BYTES) > 0
    unit_bytes = lcm(max(state_pages, 1) * page_bytes, window_bytes or 1)
    extent_bytes = unit_bytes
    while extent_bytes < extent_bytes_min or extent_bytes % granule_bytes:
        extent_bytes += unit_bytes
    return Layout(
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        checkpoint_dtype=checkpoint_dtype or state_dtype,
        layers=tuple(layers),
        slice_bytes=slice_bytes,
        window_bytes=window_bytes,
        window_tokens=max((layer.tokens for layer in layers if isinstance(layer, Window)), default=0),
        state_bytes=state_bytes,
        state_stride_bytes=state_pages * page_bytes,
        saved_bytes=saved_bytes,
        extent_bytes=extent_bytes,
    )


def _state_bytes(layers: Sequence[LayerSpec], dtype: StateDtype) -> int:
    return sum(layer.key_heads * layer.group_bytes(dtype) for layer in layers if isinstance(layer, Linear))


def slices_of(num_layers: int, num_slices: int) -> list[range]:
    """Return the layers of each slice of a page, by their number among the layers that have pages."""
    cuts = [num_layers * number // num_slices for number in range(num_slices + 1)]
    return [range(*pair) for pair in pairwise(cuts)]


def _page_sizes(
    layers: Sequence[LayerSpec], page_tokens: int, kv: KvFormat, page_slices: int
) -> tuple[tuple[int, ...], int]:
    """Return the bytes of the slices of a page and of a window page, or raise."""
    paged: list[int] = []  # by the token and head, of each layer
    windowed = 0
    heads: dict[type[LayerSpec], set[int]] = {Attention: set(), Window: set(), Latent: set(), Linear: set()}
    for layer in layers:
        match layer:
            case Attention():
                paged.append(2 * (layer.head_dim * kv.element_bytes + kv.scale_bytes))
                heads[Attention].add(layer.kv_heads)
            case Window():
                if layer.tokens < 1:
                    raise ValueError(f"a window of {layer.tokens} tokens: a window has 1 token or more")
                windowed += 2 * (layer.head_dim * kv.element_bytes + kv.scale_bytes)
                heads[Window].add(layer.kv_heads)
            case Latent():
                paged.append(layer.width * kv.element_bytes + kv.scale_bytes)
                heads[Latent].add(1)
            case Linear():
                heads[Linear].add(layer.key_heads)
            case _:
                assert_never(layer)
    if not paged:
        raise ValueError("a model without attention layers has no pages: it is not supported")
    if heads[Attention] and heads[Latent]:
        raise ValueError(
            "a model with latents beside keys and values needs two kinds of pages: not supported"
        )
    if any(len(counts) > 1 for counts in heads.values()):
        raise ValueError(
            "layers of one kind must have the same number of (key) heads to share a page or state"
        )
    (paged_heads,) = heads[Attention] or heads[Latent]
    return (
        tuple(
            paged_heads * _head_bytes(sum(paged[number] for number in some) * page_tokens, kv)
            for some in slices_of(len(paged), page_slices)
        ),
        sum(heads[Window]) * _head_bytes(windowed * page_tokens, kv),
    )


def _head_bytes(num_bytes: int, kv: KvFormat) -> int:
    """Return the bytes of a head in a slice. Scales make them odd multiples of small powers of two, and an
    extent is a multiple of the page and of the unit of mapping: a padding of 1/32 at most keeps it small."""
    unit = max(WORD_BYTES, 1 << max(0, num_bytes.bit_length() - 6)) if kv.scale_bytes else 1
    return -(-num_bytes // unit) * unit


def restorable_end(num_tokens: int, page_tokens: int) -> int:
    """Return the last page boundary before the last token, which is always computed."""
    assert num_tokens > 0
    return (num_tokens - 1) // page_tokens * page_tokens
