"""Tensor parallelism cuts whole pages and states into shares of ranks and shards of the store.
Pure.

    a whole page    | head 0 | head 1 | head 2 | head 3 |   4 KV heads, cut into 4 shards.
    2 ranks         |<---- rank 0 --->|<---- rank 1 --->|   A rank has shards 0-1, or 2-3.
    8 ranks         |<- 0,1->|<- 2,3->|<- 4,5->|<- 6,7->|   Two ranks have a copy, one publishes.

Window pages are cut by their KV heads in the same way, states by head groups, which are never
copied. Pages of latents are not cut: every rank has a copy. Heads are the outermost dimension of
pages and states, so a share is contiguous, and the page of a rank has the layout of the rank's
layers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import assert_never

from tidemill.kvstore.layout import Attention, Latent, LayerSpec, Layout, Linear, Window


@dataclass(frozen=True, slots=True)
class Shards:
    """The number of equal ranges into which the store cuts each whole page, state and window page. All
    workers that share objects have the same counts: they are part of the namespace of a key."""

    pages: int = 1
    states: int = 1
    windows: int = 1

    def describe(self, whole: Layout) -> str:
        """Return a text that identifies the format of objects, for the namespace of their keys. `whole` is
        the layout of the model, not of a rank."""
        cut = "" if self == WHOLE else f"/shards {self.pages}, {self.states}"
        return whole.describe() + cut + (f", {self.windows}" if self.windows > 1 else "")


WHOLE = Shards()


@dataclass(frozen=True, slots=True)
class Share:
    """The shards of one rank, which lie end to end in each of its pages, states and window pages.
    `publishes_pages` and `publishes_windows` are False if another rank publishes the same copy."""

    pages: range
    states: range
    windows: range
    publishes_pages: bool
    publishes_windows: bool


def rank_layers(layers: Sequence[LayerSpec], size: int) -> tuple[LayerSpec, ...]:
    """Return the layers of each of `size` ranks: contiguous heads, the same number on every rank.

    With more ranks than KV heads, rank r has a copy of KV head `r * kv_heads // size`.
    Raises ValueError that names the sizes that work.
    """
    if size < 1 or not all(_fits(layer, size) for layer in layers):
        raise ValueError(f"{size} ranks cannot share the heads of this model: use {_sizes(layers)}")
    return tuple(_part(layer, size) for layer in layers)


def shards_of(layers: Sequence[LayerSpec], sizes: Collection[int]) -> Shards:
    """Return the fewest shards that suit the ranks of every group size in `sizes`. Raises ValueError like
    `rank_layers`."""
    for size in sizes:
        rank_layers(layers, size)
    paged = next((layer.kv_heads for layer in layers if isinstance(layer, Attention)), 1)
    windowed = next((layer.kv_heads for layer in layers if isinstance(layer, Window)), 1)
    return Shards(
        pages=lcm(*(min(size, paged) for size in sizes)),
        states=lcm(*sizes) if any(isinstance(layer, Linear) for layer in layers) else 1,
        windows=lcm(*(min(size, windowed) for size in sizes)),
    )


def rank_share(shards: Shards, rank: int, size: int) -> Share:
    """Return the share of `rank` in a group of `size`, one of the sizes given to `shards_of`."""
    assert 0 <= rank < size
    return Share(
        _range(shards.pages, rank, size),
        _range(shards.states, rank, size),
        _range(shards.windows, rank, size),
        publishes_pages=rank % max(1, size // shards.pages) == 0,
        publishes_windows=rank % max(1, size // shards.windows) == 0,
    )


def heads_fit(count: int, size: int) -> bool:
    """Return whether each of `size` ranks can have as many of `count` heads, or one with equal numbers of
    copies."""
    return count % size == 0 or size % count == 0


def _range(count: int, rank: int, size: int) -> range:
    assert heads_fit(count, size)
    first = rank * count // size
    return range(first, first + max(1, count // size))


def _fits(layer: LayerSpec, size: int) -> bool:
    match layer:
        case Attention() | Window():
            return heads_fit(layer.kv_heads, size)
        case Latent():
            return True
        case Linear():
            return layer.key_heads % size == 0
        case _:
            assert_never(layer)


def _part(layer: LayerSpec, size: int) -> LayerSpec:
    match layer:
        case Attention() | Window():
            return replace(layer, kv_heads=max(1, layer.kv_heads // size))
        case Latent():
            return layer
        case Linear():
            return replace(layer, key_heads=layer.key_heads // size, value_heads=layer.value_heads // size)
        case _:
            assert_never(layer)


def _sizes(layers: Sequence[LayerSpec]) -> str:
    key_heads = [layer.key_heads for layer in layers if isinstance(layer, Linear)]
    kv_heads = [layer.kv_heads for layer in layers if isinstance(layer, Attention | Window)]
    bound = gcd(*key_heads) if key_heads else lcm(*kv_heads)
    sizes = [str(size) for size in range(1, bound + 1) if all(_fits(layer, size) for layer in layers)]
    return " or ".join(filter(None, (", ".join(sizes[:-1]), sizes[-1]))) + (
        "" if key_heads else f", or a multiple of {bound}"
    )
