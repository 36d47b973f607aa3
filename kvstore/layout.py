"""Where every byte of a page and of a state lies, computed from the model's layer specs. Pure.

    page    [kv_head][attention layer][K|V][token][head_dim]    P tokens of every attention layer, one run
    state   [head group][linear layer][conv | temporal]         one sequence's recurrent state, one run
            conv      [conv_width - 1][channels of the group]   float32, oldest input first
            temporal  [value heads of the group][key_dim][value_dim]  float32

A head group is one key head with the value heads that share it; its channels are its q, its k and its v
heads. Head (group) comes first so that the share of a tensor-parallel rank is one contiguous range of the
object (shards.py).

    arena   |  extent 0  |  extent 1  |  ...          page id p starts at byte p * page_bytes,
            pages_per_extent pages, or                state id s starts at byte s * state_stride_bytes:
            states_per_extent states, or nothing      an id says where its bytes are, whatever lies beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NewType, assert_never

PageId = NewType("PageId", int)
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


LayerSpec = Attention | Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes in bytes and the index of each layer inside its kind. `state_bytes` is 0 without linear
    layers."""

    page_tokens: int
    kv_dtype: KvDtype
    attention: tuple[Attention, ...]
    linear: tuple[Linear, ...]
    page_bytes: int
    state_bytes: int
    state_stride_bytes: int
    extent_bytes: int

    @property
    def hybrid(self) -> bool:
        return self.state_bytes > 0

    @property
    def pages_per_extent(self) -> int:
        return self.extent_bytes // self.page_bytes

    @property
    def states_per_extent(self) -> int:
        return self.extent_bytes // self.state_stride_bytes if self.hybrid else 0

    def page_offset(self, page: PageId) -> int:
        return page * self.page_bytes

    def state_offset(self, state: StateId) -> int:
        return state * self.state_stride_bytes

    def describe(self) -> str:
        """What the bytes of a page and of a state mean. A key's namespace also covers how they are cut: see
        Shards.describe."""
        return f"v{LAYOUT_VERSION}/p{self.page_tokens}/{self.kv_dtype}/{self.attention}/{self.linear}"


def layout_of(
    layers: Sequence[LayerSpec],
    page_tokens: int,
    kv_dtype: KvDtype = "float32",
    extent_bytes_min: int = EXTENT_BYTES_MIN,
    granule_bytes: int = GRANULE_BYTES,
) -> Layout:
    """Layout of a model's memory. Raises ValueError when the layers cannot share one page or one state.

    An extent is one state rounded up so that pages tile it, taken as often as it needs to reach
    `extent_bytes_min` and to be a multiple of `granule_bytes`, what the system maps and unmaps.
    """
    attention: list[Attention] = []
    linear: list[Linear] = []
    for layer in layers:
        match layer:
            case Attention():
                attention.append(layer)
            case Linear():
                linear.append(layer)
            case _:
                assert_never(layer)
    if not attention:
        raise ValueError("a model without attention layers has no pages: it is not supported")
    if page_tokens < 1:
        raise ValueError(f"page size is {page_tokens} tokens: set --page-size to 1 or more")
    if len({layer.kv_heads for layer in attention}) > 1 or len({layer.key_heads for layer in linear}) > 1:
        raise ValueError(
            "layers of one kind must have the same number of (key) heads to share a page or state"
        )

    token_elements = sum(2 * layer.kv_heads * layer.head_dim for layer in attention)
    page_bytes = token_elements * page_tokens * DTYPE_BYTES[kv_dtype]
    state_bytes = STATE_DTYPE_BYTES * sum(
        layer.key_heads * (layer.conv_elements + layer.temporal_elements) for layer in linear
    )
    state_pages = -(-state_bytes // page_bytes)
    extent_pages = max(state_pages, 1)
    while extent_pages * page_bytes < extent_bytes_min or extent_pages * page_bytes % granule_bytes:
        extent_pages += max(state_pages, 1)
    return Layout(
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
        attention=tuple(attention),
        linear=tuple(linear),
        page_bytes=page_bytes,
        state_bytes=state_bytes,
        state_stride_bytes=state_pages * page_bytes,
        extent_bytes=extent_pages * page_bytes,
    )


def restorable_end(num_tokens: int, page_tokens: int) -> int:
    """The deepest page boundary below the last token, which is always computed: `((L - 1) // P) * P`."""
    assert num_tokens > 0
    return (num_tokens - 1) // page_tokens * page_tokens
