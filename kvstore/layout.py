"""Where every byte of a page, a window page and a state lies, computed from the model's layer specs. Pure.

    page    [kv_head][attention layer][K|V][token][head_dim]    P tokens of every attention layer, one run
            ... or [latent layer][token][width]                 in a model that keeps latents instead
    window page  as a page, of every window layer               P tokens, needed while a query can see them
    state   [head group][linear layer][conv | temporal]         one sequence's recurrent state, one run
            conv      [conv_width - 1][channels of the group]   float32, oldest input first
            temporal  [value heads of the group][key_dim][value_dim]  float32

A head group is one key head with the value heads that share it; its channels are its q, its k and its v
heads. Head (group) comes first so that the share of a tensor-parallel rank is one contiguous range of the
object (shards.py).

    arena   |  extent 0  |  extent 1  |  ...          page id p starts at byte p * page_bytes,
            pages_per_extent pages, or                window id w at byte w * window_bytes,
            windows_per_extent window pages, or       state id s at byte s * state_stride_bytes:
            states_per_extent states, or nothing      an id says where its bytes are, whatever lies beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal, NewType, assert_never

PageId = NewType("PageId", int)
WindowId = NewType("WindowId", int)
StateId = NewType("StateId", int)
KvDtype = Literal["float32", "bfloat16"]

LAYOUT_VERSION = 1
EXTENT_BYTES_MIN = 1 << 20
GRANULE_BYTES = 4096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
STATE_DTYPE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Full softmax attention: keys and values of every token are kept."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Softmax attention of each token over the last `tokens`, itself included: the rest is not needed."""

    kv_heads: int
    head_dim: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Attention whose keys and values are made from one latent of `width` numbers per token, which every rank
    of a group has whole."""

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
        """Convolution channels of one head group: q, k, then its value heads."""
        return 2 * self.key_dim + self.values_per_group * self.value_dim

    @property
    def conv_elements(self) -> int:
        """Per head group."""
        return (self.conv_width - 1) * self.group_channels

    @property
    def temporal_elements(self) -> int:
        """Per head group."""
        return self.values_per_group * self.key_dim * self.value_dim


LayerSpec = Attention | Window | Latent | Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes in bytes of what an arena holds. `window_bytes` is 0 without window layers, `state_bytes` without
    linear layers. `window_tokens` is the widest window, the query's own token included."""

    page_tokens: int
    kv_dtype: KvDtype
    layers: tuple[LayerSpec, ...]
    page_bytes: int
    window_bytes: int
    window_tokens: int
    state_bytes: int
    state_stride_bytes: int
    extent_bytes: int

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
        """Whether pages alone do not restore a sequence: it needs checkpoints."""
        return self.has_states or self.has_windows

    @property
    def has_states(self) -> bool:
        return self.state_bytes > 0

    @property
    def has_windows(self) -> bool:
        return self.window_bytes > 0

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
        """Of what is kept or moved, at most, to restore a depth whose pages are there; 0: nothing."""
        return self.state_bytes + len(self.last_window(1 << 31)) * self.window_bytes

    def last_window(self, depth_pages: int) -> range:
        """The window pages, by their place in a sequence, that the token after `depth_pages` pages can see:
        those of a checkpoint. At least one, so that a checkpoint of windows is something."""
        if not self.has_windows:
            return range(0)
        seen = max(1, -(-(self.window_tokens - 1) // self.page_tokens))
        return range(max(0, depth_pages - seen), depth_pages)

    def first_seen(self, depth: int) -> int:
        """The place of the first window page that matters to who has `depth` tokens: what the next ones can
        see, and on a page boundary `last_window`."""
        if not self.has_windows:
            return 0
        seen = max(self.window_tokens - 1, 1)
        return max(0, depth - seen) // self.page_tokens

    def windows_at_once(self, num_tokens: int, in_flight: int) -> int:
        """The most window pages that a sequence of `num_tokens` needs while steps run `in_flight` of them."""
        if not self.has_windows:
            return 0
        in_sight = -(-(self.window_tokens - 1 + in_flight) // self.page_tokens) + 1
        return min(-(-num_tokens // self.page_tokens), in_sight)

    def page_offset(self, page: PageId) -> int:
        return page * self.page_bytes

    def window_offset(self, window: WindowId) -> int:
        return window * self.window_bytes

    def state_offset(self, state: StateId) -> int:
        return state * self.state_stride_bytes

    def describe(self) -> str:
        """What the bytes of a page and of a state mean. A key's namespace also covers how they are cut: see
        Shards.describe."""
        others = "".join(f"/{specs}" for specs in (self.windows, self.latents) if specs)
        return f"v{LAYOUT_VERSION}/p{self.page_tokens}/{self.kv_dtype}/{self.attention}/{self.linear}{others}"


def layout_of(
    layers: Sequence[LayerSpec],
    page_tokens: int,
    kv_dtype: KvDtype = "float32",
    extent_bytes_min: int = EXTENT_BYTES_MIN,
    granule_bytes: int = GRANULE_BYTES,
) -> Layout:
    """Layout of a model's memory. Raises ValueError when the layers cannot share one page or one state.

    An extent is one state rounded up so that pages tile it, and window pages too, taken as often as it needs
    to reach `extent_bytes_min` and to be a multiple of `granule_bytes`, what the system maps and unmaps.
    """
    if page_tokens < 1:
        raise ValueError(f"page size is {page_tokens} tokens: set --page-size to 1 or more")
    token_bytes, window_token_bytes, state_bytes = _sizes(layers, DTYPE_BYTES[kv_dtype])
    page_bytes, window_bytes = token_bytes * page_tokens, window_token_bytes * page_tokens
    state_pages = -(-state_bytes // page_bytes)
    unit_bytes = lcm(max(state_pages, 1) * page_bytes, window_bytes or 1)
    extent_bytes = unit_bytes
    while extent_bytes < extent_bytes_min or extent_bytes % granule_bytes:
        extent_bytes += unit_bytes
    return Layout(
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        layers=tuple(layers),
        page_bytes=page_bytes,
        window_bytes=window_bytes,
        window_tokens=max((layer.tokens for layer in layers if isinstance(layer, Window)), default=0),
        state_bytes=state_bytes,
        state_stride_bytes=state_pages * page_bytes,
        extent_bytes=extent_bytes,
    )


def _sizes(layers: Sequence[LayerSpec], dtype_bytes: int) -> tuple[int, int, int]:
    """Bytes of a token in a page and in a window page, and of a state. Raises ValueError."""
    paged, windowed, state_bytes = 0, 0, 0
    heads: dict[type[LayerSpec], set[int]] = {Attention: set(), Window: set(), Latent: set(), Linear: set()}
    for layer in layers:
        match layer:
            case Attention():
                paged += 2 * layer.kv_heads * layer.head_dim * dtype_bytes
                heads[Attention].add(layer.kv_heads)
            case Window():
                if layer.tokens < 1:
                    raise ValueError(f"a window of {layer.tokens} tokens: it has the query's own at least")
                windowed += 2 * layer.kv_heads * layer.head_dim * dtype_bytes
                heads[Window].add(layer.kv_heads)
            case Latent():
                paged += layer.width * dtype_bytes
                heads[Latent].add(1)
            case Linear():
                elements = layer.conv_elements + layer.temporal_elements
                state_bytes += layer.key_heads * elements * STATE_DTYPE_BYTES
                heads[Linear].add(layer.key_heads)
            case _:
                assert_never(layer)
    if not paged:
        raise ValueError("a model without attention layers has no pages: it is not supported")
    if heads[Attention] and heads[Latent]:
        raise ValueError("a model with latents beside keys and values has two kinds of pages: not supported")
    if any(len(counts) > 1 for counts in heads.values()):
        raise ValueError(
            "layers of one kind must have the same number of (key) heads to share a page or state"
        )
    return paged, windowed, state_bytes


def restorable_end(num_tokens: int, page_tokens: int) -> int:
    """The deepest page boundary below the last token, which is always computed: `((L - 1) // P) * P`."""
    assert num_tokens > 0
    return (num_tokens - 1) // page_tokens * page_tokens
